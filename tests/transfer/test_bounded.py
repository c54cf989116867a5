import dataclasses
import math
import statistics

import numpy as np
import pytest
from planted_losses import BASE, GROWING, HARMFUL, HARMLESS, MARGIN, draw, question, regret

from transfer.regret import loss_curve
from transfer.regret.bounded_regret import find_obstacle, judge_bounded
from transfer.verdict.verdict import decide, judge

NUM = 20
ALL = {**HARMLESS, **HARMFUL, **GROWING}


def judged(truth, num_sizes, noise_nats, beyond, num=NUM):
    q = question(num_sizes, beyond)
    for seed in range(num):
        points = draw(truth, np.random.default_rng(seed), num_sizes, noise_nats)
        yield judge_bounded(points, q, draws=400, rng=np.random.default_rng(seed)).regret_nats


@pytest.mark.parametrize(("num_sizes", "noise_nats", "beyond"), [(3, 0.005, 16), (2, 0.02, 2)])
def test_whatever_the_shape_few_verdicts_are_wrong_and_the_upper_bound_covers(
    num_sizes, noise_nats, beyond
):
    wrong, covered = [], []
    for truth in ALL.values():
        planted = regret(truth, num_sizes - 1 + math.log2(beyond))
        for found in judged(truth, num_sizes, noise_nats, beyond, num=10):
            covered.append(planted <= found.high + 1e-9)
            outcome = decide(found, MARGIN)
            wrong.append(outcome == ("holds" if planted > MARGIN else "drifts"))
    print(
        f"{num_sizes} sizes, noise {noise_nats}, {beyond} times the largest: "
        f"{statistics.mean(wrong):.3f} wrong, "
        f"upper bound covers {statistics.mean(covered):.3f}"
    )
    assert statistics.mean(wrong) < 0.05
    assert statistics.mean(covered) >= 0.9


@pytest.mark.parametrize("name", HARMFUL)
def test_three_margins_lost_are_found(name):
    outcomes = [decide(found, MARGIN) for found in judged(HARMFUL[name], 3, 0.005, 2)]
    assert outcomes.count("drifts") >= 0.9 * NUM


@pytest.mark.parametrize(("name", "share"), [("inner optimum", 0.9), ("flat", 0.3), ("kink", 0.3)])
def test_what_costs_nothing_is_let_pass(name, share):
    outcomes = [decide(found, MARGIN) for found in judged(HARMLESS[name], 3, 0.005, 2)]
    print(f"{name}: {outcomes.count('holds') / NUM:.2f} hold")
    assert outcomes.count("holds") >= share * NUM


@pytest.mark.parametrize(
    ("broken", "truth", "noise_nats", "beyond"),
    [
        # A smooth curve alone dips beside a kink; a trend that never fades turns a slope that
        # vanishes into its opposite.
        ({"FREEDOMS": np.array([1e-6])}, lambda x, d: 0.2 * np.maximum(0, -x), 0.005, 2),
        ({"STEADY_SHARE": 1 - 1e-9}, lambda x, d: -0.02 * 2.0**-d * x, 0.001, 8),
    ],
)
def test_without_its_two_doubts_the_model_is_wrong(monkeypatch, broken, truth, noise_nats, beyond):
    def drifts():
        return [
            decide(found, MARGIN) for found in judged(truth, 3, noise_nats, beyond, num=10)
        ].count("drifts")

    assert drifts() == 0
    for name, value in broken.items():
        monkeypatch.setattr(loss_curve, name, value)
    assert drifts() > 0


def test_the_verdict_takes_it_where_a_size_has_no_optimum():
    points = draw(HARMFUL["falling to the edge"], np.random.default_rng(0))
    found = judge(points, question(3, 2))
    assert found.outcome == "drifts" and found.bounded is not None
    assert found.bounded.best_log2 == 2.0 and (found.bounded.low_log2, found.bounded.high_log2) == (
        -2.0,
        2.0,
    )
    assert found.bounded.cost_of_2x_off_nats.value == pytest.approx(0.015, abs=0.005)
    assert found.regret_nats == found.bounded.regret_nats
    assert found.regret_nats.low < 0.03 < found.regret_nats.high
    assert (
        judge(points, dataclasses.replace(question(3, 2), hyperparameter="learning_rate")).bounded
        is None
    )


def test_a_rule_carries_the_value_to_every_size():
    # The optimum moves by an octave a doubling; so does the value, whose cost is then nothing.
    points = draw(
        lambda x, d: 0.06 * (x - d) ** 2 / 2,
        np.random.default_rng(0),
        offsets=(-2, -1, 0, 1, 2, 3, 4),
    )
    moved = judge_bounded(
        points, question(3, 2, power=1.0), draws=200, rng=np.random.default_rng(0)
    )
    assert moved.transferred_log2 == 3.0 and (moved.low_log2, moved.high_log2) == (1.0, 5.0)
    assert decide(moved.regret_nats, MARGIN) == "holds"
    stayed = judge_bounded(points, question(3, 2), draws=200, rng=np.random.default_rng(0))
    assert decide(stayed.regret_nats, MARGIN) == "drifts"


@pytest.mark.parametrize(
    ("change", "others", "said"),
    [
        (lambda p: p, {"power": None}, "measuring the exponent"),
        (
            lambda p: p,
            {"transferred_log2": 3.0},
            "the transferred value, 8 at the base, is beyond those",
        ),
        (lambda p: [q for q in p if q.size == BASE], {}, "only one width"),
        (
            lambda p: [q for q in p if q.seed == 0 and abs(q.log2_value) < 2 and q.size < 128],
            {},
            "too few runs",
        ),
        (
            lambda p: [
                dataclasses.replace(q, loss_nats=None)
                if (q.size, q.seed, q.log2_value) == (128, 1, 0.0)
                else q
                for q in p
            ],
            {},
            "width 128: a run at the transferred value, 1 at the base, diverged",
        ),
    ],
)
def test_where_there_is_no_answer_it_says_why(change, others, said):
    points, q = change(draw(HARMLESS["flat"], np.random.default_rng(0))), question(3, 2, **others)
    assert said in find_obstacle(points, q)
    assert judge_bounded(points, q, draws=200, rng=np.random.default_rng(0)) is None
