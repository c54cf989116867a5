import dataclasses

import numpy as np
import pytest
from planted_axes import BASE, TARGET, Axes

from proxies.core.hyperparameters import WITH_OPTIMUM
from transfer.question import AXES, Question
from transfer.regret.regret import rules_for
from transfer.verdict.verdict import judge


def test_rules_are_those_of_the_sources_and_doing_nothing_is_among_them():
    duration = rules_for("learning_rate", "duration")
    assert [rule.power for rule in duration] == [0.0, -0.28, -0.3, -0.32, -0.5]
    assert [rule.power for rule in rules_for("learning_rate", "batch")] == [0.0, 0.5, 1.0]
    for name in WITH_OPTIMUM:
        for axis in AXES:
            rules = rules_for(name, axis)
            assert not rules or rules[0].power == 0.0
            assert all(rule.source for rule in rules)
            assert len({rule.power for rule in rules}) == len(rules)


@pytest.mark.parametrize("name", ["warmup_fraction", "clip_norm"])
def test_no_source_scales_warmup_or_clip(name):
    assert all(rules_for(name, axis) == () for axis in AXES)


@pytest.fixture(scope="module")
def runs():
    return Axes(noise_nats=0.002).draw(np.random.default_rng(0))[0]["duration"]


QUESTION = Question(axis="duration", base_size=BASE["duration"], target_size=TARGET["duration"], power=None)


def test_each_published_rule_is_charged_at_the_target(runs):
    found = judge(runs, QUESTION, draws=400)  # -0.3 is planted
    costs = {rule.power: rule.regret_nats for rule in found.alternatives}
    assert list(costs) == [0.0, -0.28, -0.3, -0.32, -0.5]
    assert costs[-0.3].high < 0.01 < costs[0.0].low
    assert min(costs, key=lambda power: costs[power].value) in (-0.28, -0.3, -0.32)
    assert found.power == pytest.approx(-0.3, abs=0.05)


def test_what_the_parametrization_does_by_itself_is_not_charged_twice(runs):
    found = judge(runs, dataclasses.replace(QUESTION, built_in=0.2), draws=400)
    costs = {rule.power: rule.regret_nats.value for rule in found.alternatives}
    assert (
        min(costs, key=costs.get) == 0.0
    )  # the runs drift by -0.3 beyond the 0.2: -0.1 in all, to which no rule is nearer
    assert found.alternatives[0].source == "no rule"


def test_a_target_at_the_base_has_nothing_to_compare(runs):
    at_base = dataclasses.replace(QUESTION, target_size=BASE["duration"])
    assert judge(runs, at_base, draws=400).alternatives == ()
