"""Beyond the runs: the interval grows with the distance, and a verdict says what it assumes and how
far it reaches.
"""

import math

import numpy as np
import pytest
from planted_valleys import rng

from transfer.basin.spikes import find_outvoted
from transfer.question import Point, Question
from transfer.regret.drift import LINES, draw_walks
from transfer.regret.reach import find_largest_ratio
from transfer.verdict.optima_verdict import judge_optima
from transfer.verdict.summary import verdict_summary
from transfer.verdict.verdict import judge


def flat_runs(sd=0.004):
    """The optimum is 2^-6 at widths 64, 128 and 256, with two seeds."""
    noise = rng(0)
    return [
        Point(
            size=size,
            log2_value=float(x),
            loss_nats=2.5
            + 0.05 * (x + 6) ** 2
            - 0.1 * math.log2(size / 64)
            + float(noise.normal(0, sd)),
            seed=seed,
        )
        for size in (64, 128, 256)
        for x in range(-10, -2)
        for seed in range(2)
    ]


def test_a_verdict_states_its_assumption_and_ends_at_the_largest_ratio_it_supports():
    found = {
        target: judge(flat_runs(), Question(base_size=64, target_size=target), draws=600)
        for target in (256, 512, 4096, 1_000_000)
    }
    assert [v.outcome for v in found.values()] == ["holds", "holds", "cannot_tell", "cannot_tell"]
    assert found[256].assumption is None
    assert found[4096].assumption == "assumes that nothing begins between 256 and 4,096"
    ratios = {v.largest_ratio for v in found.values()}
    assert len(ratios) == 1 and 2 <= ratios.pop() < 16
    widths = [v.offset.high - v.offset.low for v in found.values()]
    assert widths == sorted(widths) and widths[-1] > 4
    body = verdict_summary(found[512])
    assert body["largest_ratio"] == found[512].largest_ratio
    assert any(body["assumption"] in reason for reason in body["reasons"])
    limit = math.floor(256 * found[512].largest_ratio)
    assert (
        judge(flat_runs(), Question(base_size=64, target_size=limit), draws=600).outcome == "holds"
    )


def test_optima_alone_reach_no_further():
    optima = [(64 * 2**k, -6.0 + 0.02 * (-1) ** k) for k in range(6)]
    near, far = (
        judge_optima(optima, Question(base_size=64, target_size=size)) for size in (2048, 2**21)
    )
    assert near.outcome == "holds" and far.outcome == "cannot_tell"
    assert near.largest_ratio == far.largest_ratio and "2,097,152" in far.assumption


@pytest.mark.parametrize(
    ("limit", "target", "outcome", "ratio"),
    [
        (700, 512, "holds", 2 ** (11 / 8)),
        (700, 4096, "cannot_tell", 2 ** (11 / 8)),
        (100, 512, "cannot_tell", None),
    ],
)
def test_the_largest_ratio_does_not_depend_on_the_target(limit, target, outcome, ratio):
    found = find_largest_ratio(lambda size: size <= limit, 256, target, outcome)
    assert found == (ratio if ratio is None else pytest.approx(ratio))


def test_the_walk_grows_with_the_doublings_to_the_power_of_one_and_a_half():
    walks = draw_walks(20_001, np.array([0.0, 1.0, 4.0]), 0.05, rng(0))
    spread = np.quantile(np.abs(walks), 0.9, axis=0)
    assert spread[0] < 1e-3 and spread[2] / spread[1] == pytest.approx(8.0, rel=0.1)
    assert not walks[0].any()
    assert {axis for axis, prior in LINES.items() if prior.walk_octaves} == {
        "width",
        "depth",
        "params",
    }


def test_a_run_is_outvoted_only_by_repeats_that_agree():
    def cell(*losses):
        return [
            Point(size=64, log2_value=-6.0, loss_nats=loss, seed=i) for i, loss in enumerate(losses)
        ]

    assert find_outvoted(cell(3.0, 3.01, 3.3)).point.loss_nats == 3.3
    assert find_outvoted(cell(3.0, 3.15, 3.3)) is None
    assert find_outvoted(cell(3.0, 3.3)) is None
    assert find_outvoted(cell(3.0, 3.3, 3.3)) is None
