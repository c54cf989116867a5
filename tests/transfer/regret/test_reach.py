"""Tests of targets beyond the runs: the interval grows with the distance, and a verdict states its
assumption and the largest ratio it supports.
"""

import math

import numpy as np
import pytest

from forerun._transfer.question import Point, Question
from forerun._transfer.regret.extrapolation import LINE_PRIORS, draw_walk_paths
from forerun._transfer.regret.reach import find_largest_ratio
from forerun._transfer.verdict.optima_verdict import judge_optima
from forerun._transfer.verdict.summary import summarize_verdict
from forerun._transfer.verdict.verdict import judge


def make_flat_runs():
    """Return runs of two seeds with the optimum 2^-6 at widths 64, 128, and 256. The losses have
    noise of 0.004 nats.
    """
    noise = np.random.default_rng(0)
    return [
        Point(
            size=size,
            log2_value=float(x),
            loss_nats=2.5
            + 0.05 * (x + 6) ** 2
            - 0.1 * math.log2(size / 64)
            + float(noise.normal(0, 0.004)),
            seed=seed,
        )
        for size in (64, 128, 256)
        for x in range(-10, -2)
        for seed in range(2)
    ]


def test_verdict_states_its_assumption_and_its_largest_ratio():
    # Within the runs, near them, far, and very far
    verdicts = {
        target: judge(make_flat_runs(), Question(base_size=64, target_size=target), draws=600)
        for target in (256, 512, 4096, 1_000_000)
    }
    assert [v.outcome for v in verdicts.values()] == [
        "holds",
        "holds",
        "cannot_tell",
        "cannot_tell",
    ]
    assert verdicts[256].assumption is None
    assert verdicts[4096].assumption == "assumes that nothing begins between 256 and 4,096"
    # The ratio does not depend on the target
    ratios = {v.largest_ratio for v in verdicts.values()}
    assert len(ratios) == 1 and 2 <= ratios.pop() < 16
    widths = [v.offset.high - v.offset.low for v in verdicts.values()]
    assert widths == sorted(widths) and widths[-1] > 4
    body = summarize_verdict(verdicts[512])
    assert body["largest_ratio"] == verdicts[512].largest_ratio
    assert any(body["assumption"] in reason for reason in body["reasons"])
    limit = math.floor(256 * verdicts[512].largest_ratio)
    assert (
        judge(make_flat_runs(), Question(base_size=64, target_size=limit), draws=600).outcome
        == "holds"
    )


def test_largest_ratio_also_limits_a_table_of_optima():
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
def test_largest_ratio_does_not_depend_on_the_target(limit, target, outcome, ratio):
    largest_ratio = find_largest_ratio(lambda size: size <= limit, 256, target, outcome)
    assert largest_ratio == (ratio if ratio is None else pytest.approx(ratio))


def test_walk_grows_with_the_power_one_and_a_half_of_the_doublings():
    walks = draw_walk_paths(20_001, np.array([0.0, 1.0, 4.0]), 0.05, np.random.default_rng(0))
    spread = np.quantile(np.abs(walks), 0.9, axis=0)
    assert spread[0] < 1e-3 and spread[2] / spread[1] == pytest.approx(8.0, rel=0.1)
    assert not walks[0].any()
    assert {axis for axis, prior in LINE_PRIORS.items() if prior.walk_octaves} == {
        "width",
        "depth",
        "params",
    }
