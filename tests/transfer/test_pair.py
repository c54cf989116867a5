"""Planted pairs of values whose cross term is known: found, and never said to cost less than they
do.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from transfer.basin.optimum import Optimum
from transfer.question import CORNERS
from transfer.regret.regret import Estimate
from transfer.verdict.pair_verdict import PairQuestion, judge_pair

CURVATURES = (0.1, 0.04)


def loss(x: float, y: float, r: float) -> float:
    """A quadratic form with its optimum at 0, 0: nats."""
    one, other = CURVATURES
    return 2 + 0.5 * (one * x * x + other * y * y) + r * math.sqrt(one * other) * x * y


def basin(curvature: float) -> Optimum:
    curve = tuple((x, 2 + 0.5 * curvature * x * x) for x in np.linspace(-2, 2, 41))
    return Optimum(size=32, status="ok", log2_value=0.0, curve=curve, num_runs=10, num_diverged=0)


def question(*regrets: float, noise_nats: float | None = 1e-4, **changes) -> PairQuestion:
    costs = tuple(Estimate(value=nats, low=nats, high=nats) for nats in regrets)
    given = {"base": tuple(map(basin, CURVATURES)), "margin_nats": 0.01, "level": 0.9, **changes}
    return PairQuestion(
        hyperparameters=("learning_rate", "muon_lr"),
        labels=("learning rate", "muon lr"),
        regrets=costs,
        noise_nats=noise_nats,
        **given,
    )


def corners(
    r: float, num_seeds: int = 2, sd: float = 0.0, seed: int = 0
) -> list[dict[tuple[int, int], float | None]]:
    rng = np.random.default_rng(seed)
    return [
        {at: loss(*at, r) + sd * rng.standard_normal() for at in CORNERS} for _ in range(num_seeds)
    ]


@pytest.mark.parametrize("r", [-0.9, -0.3, 0.0, 0.5, 0.9])
def test_the_cross_term_is_found_and_the_pair_costs_no_more_than_is_said(r):
    """Offsets that each test sees, of every sign: the true cost of the pair is under the bound."""
    for x, y in ((0.3, 0.2), (0.3, -0.2), (0.0, 0.4)):
        one, other = CURVATURES
        found = judge_pair(corners(r), question(0.5 * one * x * x, 0.5 * other * y * y))
        assert found.correlation is not None and found.regret_nats is not None
        assert found.correlation.value == pytest.approx(r, abs=1e-9)
        matrix = np.array([[one, r * math.sqrt(one * other)], [r * math.sqrt(one * other), other]])
        # what both tests saw of the way to the pair's own optimum
        slope = np.array([one * x, other * y])
        assert 0.5 * slope @ np.linalg.solve(matrix, slope) <= found.regret_nats.value + 1e-12


def test_the_interval_covers_as_often_as_it_says():
    found = [
        judge_pair(corners(0.4, sd=2e-3, seed=s), question(0.0, 0.0, noise_nats=2e-3))
        for s in range(400)
    ]
    inside = [
        f.correlation is not None and f.correlation.low <= 0.4 <= f.correlation.high for f in found
    ]
    assert np.mean(inside) == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize(
    ("r", "regrets", "outcome"),
    [
        (0.0, (0.002, 0.002), "holds"),
        (0.9, (0.002, 0.002), "cannot_tell"),
        (0.0, (0.02, 0.0), "drifts"),
    ],
)
def test_what_holds_one_by_one_need_not_hold_as_a_pair(r, regrets, outcome):
    assert judge_pair(corners(r), question(*regrets)).outcome == outcome


@pytest.mark.parametrize(
    ("found", "asked", "said"),
    [
        ([{**corners(0.0)[0], (1, 1): None}], question(0.0, 0.0), "diverged or failed"),
        (corners(0.0), question(0.0, 0.0, noise_nats=None), "no known curvature"),
        (corners(0.0), question(0.0, 0.0, base=(basin(0.1), None)), "no known curvature"),
        (corners(0.0), question(0.0, 0.0, noise_nats=1.0), "is not known: r = "),
    ],
)
def test_what_is_not_known_is_said(found, asked, said):
    verdict = judge_pair(found, asked)
    assert verdict.outcome == "cannot_tell" and verdict.regret_nats is None
    assert (
        verdict.reasons
        and verdict.reasons[0].startswith("learning rate with muon lr: ")
        and said in verdict.reasons[0]
    )
