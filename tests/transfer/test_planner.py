"""What a design is expected to decide, held against planted valleys drawn by somebody else."""

import dataclasses

import numpy as np
import pytest
from planted_valleys import World

from transfer.question import Question, TransferError
from transfer.verdict.planner import Cells, expect
from transfer.verdict.verdict import judge

OFFSETS = (-2.0, -1.0, 0.0, 1.0, 2.0)
DESIGN = [Cells(size=size, offsets_octaves=OFFSETS, num_seeds=3) for size in (32, 64, 128)]
QUESTION = Question(target_size=256, base_size=32)


def sized(**changes):
    return [dataclasses.replace(cells, **changes) for cells in DESIGN]


def test_the_expectation_is_what_planted_valleys_give():
    world = World((32, 64, 128), tuple(range(-8, -3)), 3, 0.01, 256)
    outcomes = []
    for seed in range(30):
        points, _ = world.draw(np.random.default_rng(seed))
        outcomes.append(judge(points, QUESTION, seed=seed, draws=200).outcome)
    found = expect(DESIGN, QUESTION, noise_nats=0.01, curvature=world.curvature, num_simulations=30)
    print(found, outcomes.count("holds") / 30)
    assert found.nothing_lost.get("holds", 0) == pytest.approx(outcomes.count("holds") / 30, abs=0.25)
    assert found.nothing_lost.get("drifts", 0) < 0.05
    assert found.num_runs == 45 and found.cost == 15 * (1 + 4 + 16)


def test_more_seeds_and_less_noise_are_sharper():
    plain = expect(DESIGN, QUESTION, noise_nats=0.015, curvature=0.05, num_simulations=16)
    seeds = expect(sized(num_seeds=6), QUESTION, noise_nats=0.015, curvature=0.05, num_simulations=16)
    quiet = expect(DESIGN, QUESTION, noise_nats=0.003, curvature=0.05, num_simulations=16)
    assert seeds.drift_width_octaves < plain.drift_width_octaves
    assert quiet.drift_width_octaves < seeds.drift_width_octaves
    assert plain.decided <= quiet.decided and quiet.decided > 0.8


def test_three_margins_lost_are_seen_by_a_sharp_design_and_holds_is_not_said_of_them():
    found = expect(sized(num_seeds=3), QUESTION, noise_nats=0.004, curvature=0.1, num_simulations=16)
    assert found.margins_lost["drifts"] > 0.8
    assert found.margins_lost.get("holds", 0) == 0


def test_a_measured_rule_can_lose_nothing_to_itself():
    measured = dataclasses.replace(QUESTION, axis="duration", power=None)
    found = expect(DESIGN, measured, noise_nats=0.005, curvature=0.06, num_simulations=8)
    assert found.margins_lost is None and found.decided == found.nothing_lost.get("holds", 0.0)


def test_a_measured_rule_is_planted_where_it_is_likely_to_lie():
    # The third size's grid follows the smaller ones; about a base's grid that does not move, three doublings are far.
    sizes = (50, 100, 200, 400)
    fixed, moving = (
        [Cells(size=size, offsets_octaves=OFFSETS, num_seeds=3, follows=follows and size > 100) for size in sizes]
        for follows in (False, True)
    )
    q = Question(axis="duration", base_size=50, target_size=12800, power=None)
    still = dataclasses.replace(q, built_in=-0.3)  # the parametrization moves it already: nothing is left to measure
    for design, question in ((moving, q), (fixed, still), (fixed, q)):
        found = expect(design, question, noise_nats=0.005, curvature=0.08, num_simulations=8)
        assert found.nothing_lost.get("drifts", 0.0) == 0.0
        assert found.cost == 15 * (1 + 2 + 4 + 8)


def test_a_cost_may_be_given_in_flops():
    found = expect(DESIGN, QUESTION, noise_nats=0.01, curvature=0.06, num_simulations=1,
                   flops={32: 1e9, 64: 3e9, 128: 1e10})  # fmt: skip
    assert found.cost == pytest.approx(15 * 1.4e10)
    with pytest.raises(TransferError, match="flops: those of a run at every size"):
        expect(DESIGN, QUESTION, noise_nats=0.01, curvature=0.06, flops={32: 1e9})


def test_the_same_seed_foretells_the_same():
    one, two, other = (
        expect(DESIGN, QUESTION, noise_nats=0.01, curvature=0.06, num_simulations=6, seed=seed) for seed in (0, 0, 1)
    )
    assert one == two != other


def test_everything_wrong_is_said_at_once():
    with pytest.raises(TransferError) as caught:
        expect(DESIGN[:1], QUESTION, noise_nats=0, curvature=float("inf"), num_simulations=0)
    assert len(caught.value.problems) == 4
    with pytest.raises(TransferError) as caught:
        Cells(size=0, offsets_octaves=(), num_seeds=0)
    assert len(caught.value.problems) == 3
