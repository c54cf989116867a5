import dataclasses
import statistics

import pytest
from planted_losses import HARMFUL, HARMLESS
from planted_market import clips, play, rates, wanted

from transfer.basin.optimum import Optimum
from transfer.design.next_runs import MOST_SPENT, Suggestion, again, mend, sharpen_bounded, sharpen_optima
from transfer.question import Point, Question
from transfer.verdict.verdict import examine

WIDTH = Question(target_size=1024, base_size=32)


def unusable(status):
    return Optimum(size=64, status=status, num_runs=1, num_diverged=0)


def points(losses, size=64, seeds=1):
    return [
        Point(size=size, log2_value=-8.0 + i, loss_nats=x, seed=s) for i, x in enumerate(losses) for s in range(seeds)
    ]


def mended(status, losses, seeds=1):
    return [s.log2_value for s in mend(unusable(status), points(losses, seeds=seeds), WIDTH)]


@pytest.mark.parametrize(("losses", "values"), [
    ([2.0, 2.1, 2.2, 2.3], [-9, -10]), ([2.3, 2.2, 2.1, 2.0], [-4, -3]), ([2.2, 2.1, 2.0, 2.01], [-4]),
    ([2.3, 2.2, 2.1, 2.0, None], [-4.5]),
])  # fmt: skip
def test_an_edge_is_extended_on_its_side_but_not_over_the_cliff(losses, values):
    assert mended("edge", losses) == values


def test_a_suggestion_says_what_it_costs():
    found = mend(unusable("edge"), points([2.2, 2.1, 2.0, 2.01], seeds=2), WIDTH)[0]
    assert str(found).startswith("run width 64 at 2^-4 (2 seeds): ")
    assert found.relative_cost == 8.0  # two runs of four times the base's FLOPs
    batch = dataclasses.replace(WIDTH, axis="batch", hyperparameter="clip_norm")
    assert again(points([2.0])[0], batch).relative_cost == 2.0
    assert str(again(points([2.0])[0], batch)).startswith("run 64 tokens a step at clip_norm = 0.00391 (2 seeds): ")


def asked(market, runs, q):
    outcome, found = wanted(runs, q)
    assert outcome == "cannot_tell"
    return found


def test_a_round_is_bought_where_it_is_cheap_and_costs_no_more_than_it_may():
    market, runs, q = rates(0.02, 0.0, 0)
    found = asked(market, runs, q)
    prices = [s.relative_cost / s.num_seeds for s in found]
    assert all(isinstance(s, Suggestion) for s in found)
    assert [s.relative_cost for s in found] == sorted(s.relative_cost for s in found)
    spent = sum((p.size / 32) ** 2 for p in runs)
    assert sum(s.relative_cost for s in found) <= MOST_SPENT * spent
    seeds = {s.size: s.num_seeds for s in found}
    assert prices and seeds[min(seeds)] >= seeds[max(seeds)]
    assert max(seeds) < q.target_size


def test_a_target_far_away_asks_for_a_longer_proxy_about_the_predicted_optimum():
    _, runs, q = rates(0.01, 0.0, 0, axis="duration", sizes=(50, 100, 200), target=51200, measured=True)
    judged = examine(runs, q, draws=400)
    found = sharpen_optima(runs, judged.verdict.optima, q, judged.at_target)
    new = [s for s in found if s.size > 200]
    assert new and "a larger proxy" in new[0].reason
    centre = statistics.mean({s.log2_value for s in new})
    there = judged.verdict.optima[0].log2_value + judged.verdict.power * 3
    assert abs(centre - there) < 1.0


def test_of_a_clip_seeds_are_asked_for_at_the_value_and_the_ends():
    _, runs, q = clips(HARMLESS["flat"], 0.01, 0)
    judged = examine(runs, q, draws=400)
    found = sharpen_bounded(runs, judged.verdict.bounded, q)
    assert {s.log2_value for s in found if s.size <= 128} <= {-2.0, -1.0, 0.0, 1.0, 2.0}
    assert {-2.0, 0.0, 2.0} <= {s.log2_value for s in found}
    assert all(s.hyperparameter == "clip_norm" for s in found)


OPEN = [  # what is planted, how it ends
    (lambda seed: rates(0.01, 0.0, seed), "holds"),
    (lambda seed: rates(0.01, 0.03, seed), "drifts"),
    (lambda seed: rates(0.02, 0.0, seed, axis="duration", sizes=(50, 100, 200, 400), target=3200, measured=True),
     "holds"),
    (lambda seed: rates(0.02, 0.03, seed, axis="batch", sizes=(1024, 2048, 4096), target=16384), "drifts"),
    (lambda seed: rates(0.005, 0.0, seed, off=2.5, target=512), "holds"),
    (lambda seed: rates(0.005, 0.0, seed, offsets=(-1, 0, 1), target=512), "holds"),
    (lambda seed: clips(HARMLESS["flat"], 0.005, seed), "holds"),
    (lambda seed: clips(HARMFUL["falling to the edge"], 0.01, seed), "drifts"),
]  # fmt: skip


@pytest.mark.slow
def test_what_is_asked_for_decides_within_three_rounds():
    """Designs that are open at first are meant."""
    played = [(right, play(*make(seed))[0]) for make, right in OPEN for seed in range(2)]
    ends = [(right, outcomes[-1]) for right, outcomes in played if outcomes[0] == "cannot_tell"]
    decided = [right == end for right, end in ends if end != "cannot_tell"]
    print(f"{len(ends)} open designs, {len(decided)} decided, {decided.count(False)} wrong")
    assert len(ends) >= 8 and len(decided) >= 0.8 * len(ends) and all(decided)
