"""Tests of the regret of a value that need not have an optimum, such as a clip norm.

The regret is judged against the best of the values that were run.
"""

import dataclasses
import math
import statistics

import numpy as np
import pytest
from planted_losses import (
    BASE,
    GROWING,
    HARMFUL,
    HARMLESS,
    MARGIN,
    compute_regret,
    draw,
    make_question,
)

from forerun._proxies.core.checks import Interval
from forerun._transfer.question import Question
from forerun._transfer.regret import loss_curve
from forerun._transfer.regret.bounded_regret import BoundedRegret, find_obstacle, judge_bounded
from forerun._transfer.verdict.reasons import explain_bounded
from forerun._transfer.verdict.verdict import decide, judge

NUM_DRAWS = 20
"""Number of draws of each planted loss."""
ALL = {**HARMLESS, **HARMFUL, **GROWING}
"""Planted losses by name: functions of the octaves above the transferred value and of the doublings
above the base.
"""


def judge_draws(truth, *, num_sizes, noise_nats, beyond, num_draws=NUM_DRAWS):
    """Yield the estimated regret for each draw of a planted loss, at a target of `beyond` times the
    largest size.
    """
    question = make_question(num_sizes, beyond)
    for seed in range(num_draws):
        points = draw(truth, np.random.default_rng(seed), num_sizes, noise_nats)
        yield judge_bounded(
            points, question, draws=400, rng=np.random.default_rng(seed)
        ).regret_nats


@pytest.mark.parametrize(("num_sizes", "noise_nats", "beyond"), [(3, 0.005, 16), (2, 0.02, 2)])
def test_few_verdicts_are_wrong_and_upper_bounds_cover_for_all_shapes(
    num_sizes, noise_nats, beyond
):
    wrong, covered = [], []
    for truth in ALL.values():
        true_regret = compute_regret(truth, num_sizes - 1 + math.log2(beyond))
        for estimate in judge_draws(
            truth, num_sizes=num_sizes, noise_nats=noise_nats, beyond=beyond, num_draws=10
        ):
            covered.append(true_regret <= estimate.high + 1e-9)
            outcome = decide(estimate, MARGIN)
            wrong.append(outcome == ("holds" if true_regret > MARGIN else "drifts"))
    assert statistics.mean(wrong) < 0.05
    assert statistics.mean(covered) >= 0.9  # an upper bound at level 0.9 should cover 0.95


@pytest.mark.parametrize("name", HARMFUL)
def test_regret_of_three_margins_is_detected(name):
    estimates = judge_draws(HARMFUL[name], num_sizes=3, noise_nats=0.005, beyond=2)
    outcomes = [decide(estimate, MARGIN) for estimate in estimates]
    assert outcomes.count("drifts") >= 0.9 * NUM_DRAWS


@pytest.mark.parametrize(("name", "share"), [("inner optimum", 0.9), ("flat", 0.3), ("kink", 0.3)])
def test_harmless_values_hold(name, share):
    """Nearly all draws of an inner optimum hold. A flat loss or a kink may leave two thirds
    open."""
    estimates = judge_draws(HARMLESS[name], num_sizes=3, noise_nats=0.005, beyond=2)
    outcomes = [decide(estimate, MARGIN) for estimate in estimates]
    assert outcomes.count("holds") >= share * NUM_DRAWS


@pytest.mark.parametrize(
    ("constant", "value", "truth", "noise_nats", "beyond"),
    [
        # The prior without kinks: a smooth curve dips next to a kink
        ("D_VARIANCES", np.array([1e-6]), lambda x, d: 0.2 * np.maximum(0, -x), 0.005, 2),
        # The prior without slopes that vanish with size: the fit extrapolates such a slope until
        # its sign changes
        ("STEADY_SHARE", 1 - 1e-9, lambda x, d: -0.02 * 2.0**-d * x, 0.001, 8),
    ],
    ids=["kinks", "vanishing slopes"],
)
def test_verdicts_are_wrong_if_the_prior_excludes_kinks_or_vanishing_slopes(
    monkeypatch, constant, value, truth, noise_nats, beyond
):
    def count_drifts():
        estimates = judge_draws(
            truth, num_sizes=3, noise_nats=noise_nats, beyond=beyond, num_draws=10
        )
        return [decide(estimate, MARGIN) for estimate in estimates].count("drifts")

    assert count_drifts() == 0
    monkeypatch.setattr(loss_curve, constant, value)
    assert count_drifts() > 0


def test_verdict_uses_the_bounded_regret_where_a_size_has_no_optimum():
    points = draw(HARMFUL["falling to the edge"], np.random.default_rng(0))
    verdict = judge(points, make_question(num_sizes=3, beyond=2))
    bounded = verdict.bounded
    assert verdict.outcome == "drifts" and bounded is not None
    assert (bounded.low_log2, bounded.best_log2, bounded.high_log2) == (-2.0, 2.0, 2.0)
    assert bounded.cost_of_2x_off_nats.estimate == pytest.approx(0.015, abs=0.005)
    assert verdict.regret_nats == bounded.regret_nats
    assert verdict.regret_nats.low < 0.03 < verdict.regret_nats.high
    rate_question = dataclasses.replace(
        make_question(num_sizes=3, beyond=2), hyperparameter="learning_rate"
    )
    assert judge(points, rate_question).bounded is None


def test_value_follows_its_power_to_every_size():
    # The optimum moves by an octave per doubling, so a value that moves in the same way has no
    # regret
    points = draw(
        lambda x, d: 0.06 * (x - d) ** 2 / 2,
        np.random.default_rng(0),
        offsets=(-2, -1, 0, 1, 2, 3, 4),
    )
    moved = judge_bounded(
        points,
        make_question(num_sizes=3, beyond=2, power=1.0),
        draws=200,
        rng=np.random.default_rng(0),
    )
    assert moved.transferred_log2 == 3.0 and (moved.low_log2, moved.high_log2) == (1.0, 5.0)
    assert decide(moved.regret_nats, MARGIN) == "holds"
    stayed = judge_bounded(
        points, make_question(num_sizes=3, beyond=2), draws=200, rng=np.random.default_rng(0)
    )
    assert decide(stayed.regret_nats, MARGIN) == "drifts"


@pytest.mark.parametrize(
    ("change_points", "question_fields", "message"),
    [
        (lambda runs: runs, {"power": None}, "measuring the exponent"),
        (
            lambda runs: runs,
            {"transferred_log2": 3.0},
            "the transferred value, 8 at the base, is beyond those",
        ),
        (lambda runs: [run for run in runs if run.size == BASE], {}, "only one width"),
        (
            lambda runs: [
                run for run in runs if run.seed == 0 and abs(run.log2_value) < 2 and run.size < 128
            ],
            {},
            "too few runs",
        ),
        (
            lambda runs: [
                dataclasses.replace(run, loss_nats=None)
                if (run.size, run.seed, run.log2_value) == (128, 1, 0.0)
                else run
                for run in runs
            ],
            {},
            "width 128: a run at the transferred value, 1 at the base, diverged",
        ),
    ],
)
def test_obstacle_to_an_estimate_is_named(change_points, question_fields, message):
    points = change_points(draw(HARMLESS["flat"], np.random.default_rng(0)))
    question = make_question(num_sizes=3, beyond=2, **question_fields)
    assert message in find_obstacle(points, question)


@pytest.mark.parametrize(
    ("hyperparameter", "low_log2", "high_log2", "values"),
    [
        ("clip_norm", 3.0, 4.0, "from 8 to 16"),
        ("beta2", -5.0, -1.0, "from 0.5 to 0.969"),
    ],
)
def test_values_tried_are_reported_in_ascending_order(hyperparameter, low_log2, high_log2, values):
    """The text 16 sorts before the text 8. The log2 of a beta falls as its value rises."""
    interval = Interval(estimate=0.0, low=0.0, high=0.001, level=0.9)
    bounded = BoundedRegret(
        regret_nats=interval,
        low_log2=low_log2,
        high_log2=high_log2,
        transferred_log2=low_log2,
        best_log2=low_log2,
        cost_of_2x_off_nats=None,
    )
    question = Question(base_size=32, target_size=64, hyperparameter=hyperparameter)
    assert values in explain_bounded("holds", bounded, question, most_nats=1.0)[0]
