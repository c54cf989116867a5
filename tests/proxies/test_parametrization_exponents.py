"""Exponents measured on random nets after one AdamW step: what a parametrization is for, shown
rather than written.
"""

import dataclasses

import pytest
from parametrization_cases import (
    FAMILIES,
    by_depth,
    by_width,
    completedp_is_completep,
    grown,
    is_mups,
    moves_by_the_same_at_every_depth,
    moves_by_the_same_at_every_width,
)

from proxies.core.rules import forward_rule, kind_rule, named
from proxies.parametrization import parametrization


@pytest.mark.parametrize("name", ["mup", "completedp"])
def test_every_layer_moves_by_the_same_at_every_width(name):
    moves_by_the_same_at_every_width(named(name))


def test_gpt2_too():
    moves_by_the_same_at_every_width(named("mup"), "gpt2")


def test_the_standard_form_blows_up_with_width():
    for name, (slope, half) in by_width(named("sp")).items():
        assert slope - half > 0.4, (name, slope, half)


@pytest.mark.parametrize("name", ["completep", "umup"])
def test_the_stream_moves_by_the_same_at_every_depth(name):
    moves_by_the_same_at_every_depth(named(name))


def test_without_a_depth_rule_it_moves_further_the_deeper():
    slope, half = by_depth(named("mup"))["stream"]
    assert slope - half > 0.7


# One power of one rule, and the oracle that must notice.
MUTANTS = {
    "hidden rate m_N^-1/2": ("hidden", "learning_rate", {"width": -0.5}, "mup"),
    "hidden init constant": ("hidden", "init_std", {"width": 0}, "mup"),
    "hidden decay constant": ("hidden", "weight_decay", {"width": 0}, "mup"),
    "embedding rate m_N^-1/2": ("embedding", "learning_rate", {"width": -0.5}, "mup"),
    "readout rate m_N^-1": ("readout", "learning_rate", {"width": -1}, "mup"),
    "gain eps m_N^-1": ("block_gain", "eps", {"width": -1}, "mup"),
    "absorbed readout init m_N^-1/2": ("readout", "init_std", {"width": -0.5}, "absorbed"),
    "absorbed readout decay constant": ("readout", "weight_decay", {"width": 0}, "absorbed"),
    "hidden rate m_N^-1/2, measured": ("hidden", "learning_rate", {"width": -0.5}, "widths"),
    "hidden rate without depth": ("hidden", "learning_rate", {"depth": 0}, "depths"),
}
ORACLES = {
    "mup": lambda: is_mups(grown(FAMILIES["gpt2"], heads=4), FAMILIES["gpt2"]),
    "absorbed": lambda: completedp_is_completep(
        grown(FAMILIES["llama"], heads=4), FAMILIES["llama"]
    ),
    "widths": lambda: moves_by_the_same_at_every_width(named("mup")),
    "depths": lambda: moves_by_the_same_at_every_depth(named("umup")),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_one_wrong_power_is_noticed(monkeypatch, mutant):
    kind, number, powers, oracle = MUTANTS[mutant]
    planted = 0

    def mutated(rules, asked, *, by_shape=None):
        nonlocal planted
        rule = kind_rule(rules, asked, by_shape=by_shape)
        wrong = dataclasses.replace(getattr(rule, number), **powers)
        # The other form of the readout stays as it is.
        if asked != kind or (oracle == "absorbed" and rules.output != "absorbed"):
            return rule
        planted += wrong != getattr(rule, number)
        return dataclasses.replace(rule, **{number: wrong})

    monkeypatch.setattr(parametrization, "kind_rule", mutated)
    with pytest.raises(AssertionError):
        ORACLES[oracle]()
    assert planted


@pytest.mark.parametrize(
    ("part", "powers", "oracle"),
    [
        ("output", {"width": -0.5}, "mup"),
        ("output", {"width": 0}, "absorbed"),
        ("residual", {"depth": 0}, "depths"),
    ],
)
def test_one_wrong_multiplier_is_noticed(monkeypatch, part, powers, oracle):
    def mutated(rules):
        rule = forward_rule(rules)
        return {**rule, part: dataclasses.replace(rule[part], **powers)}

    monkeypatch.setattr(parametrization, "forward_rule", mutated)
    with pytest.raises(AssertionError):
        ORACLES[oracle]()
