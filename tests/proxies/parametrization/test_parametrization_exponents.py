"""Tests of the parametrizations by measurement: how far one AdamW step moves random networks.

A correct parametrization moves each layer equally at every width or depth. Each of the last tests
plants one wrong power and requires that a check notices it. m_N is the ratio of width to the base.
"""

import dataclasses

import pytest
from parametrization_cases import (
    FAMILIES,
    check_completedp_is_completep,
    check_matches_mup,
    check_moves_equally_at_every_depth,
    check_moves_equally_at_every_width,
    grow,
    measure_slopes_by_depth,
    measure_slopes_by_width,
)

from forerun._proxies.core.rules import get_parametrization, make_forward_rule, make_kind_rule
from forerun._proxies.parametrization import parametrization


@pytest.mark.parametrize("name", ["mup", "completedp"])
def test_layers_move_equally_at_every_width(name):
    check_moves_equally_at_every_width(get_parametrization(name))


def test_layers_of_gpt2_move_equally_at_every_width():
    check_moves_equally_at_every_width(get_parametrization("mup"), "gpt2")


def test_layers_of_the_standard_parametrization_move_further_with_width():
    for name, (slope, half_width) in measure_slopes_by_width(get_parametrization("sp")).items():
        assert slope - half_width > 0.4, (name, slope, half_width)


@pytest.mark.parametrize("name", ["completep", "umup"])
def test_stream_moves_equally_at_every_depth(name):
    check_moves_equally_at_every_depth(get_parametrization(name))


def test_stream_moves_further_with_depth_without_a_depth_rule():
    slope, half_width = measure_slopes_by_depth(get_parametrization("mup"))["stream"]
    assert slope - half_width > 0.7


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
"""Kind of parameter, its setting, the wrong power, and the check that must notice it."""
CHECKS = {
    "mup": lambda: check_matches_mup(grow(FAMILIES["gpt2"], heads=4), FAMILIES["gpt2"]),
    "absorbed": lambda: check_completedp_is_completep(
        grow(FAMILIES["llama"], heads=4), FAMILIES["llama"]
    ),
    "widths": lambda: check_moves_equally_at_every_width(get_parametrization("mup")),
    "depths": lambda: check_moves_equally_at_every_depth(get_parametrization("umup")),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_power_is_noticed(monkeypatch, mutant):
    mutated_kind, setting, powers, check = MUTANTS[mutant]
    num_changed = 0

    def make_mutated_rule(rules, kind, *, by_shape=None):
        nonlocal num_changed
        rule = make_kind_rule(rules, kind, by_shape=by_shape)
        wrong = dataclasses.replace(getattr(rule, setting), **powers)
        # The check "absorbed" compares two forms of the readout: only one of them is wrong.
        if kind != mutated_kind or (check == "absorbed" and rules.output != "absorbed"):
            return rule
        num_changed += wrong != getattr(rule, setting)
        return dataclasses.replace(rule, **{setting: wrong})

    monkeypatch.setattr(parametrization, "make_kind_rule", make_mutated_rule)
    with pytest.raises(AssertionError):
        CHECKS[check]()
    assert num_changed


@pytest.mark.parametrize(
    ("part", "powers", "check"),
    [
        ("output", {"width": -0.5}, "mup"),
        ("output", {"width": 0}, "absorbed"),
        ("residual", {"depth": 0}, "depths"),
    ],
)
def test_wrong_multiplier_is_noticed(monkeypatch, part, powers, check):
    def make_mutated_rule(rules):
        rule = make_forward_rule(rules)
        return {**rule, part: dataclasses.replace(rule[part], **powers)}

    monkeypatch.setattr(parametrization, "make_forward_rule", make_mutated_rule)
    with pytest.raises(AssertionError):
        CHECKS[check]()
