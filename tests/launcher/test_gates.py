"""What closes each gate."""

import dataclasses
from types import SimpleNamespace

import pytest

from launcher import gates
from launcher.evidence import gather
from launcher.stages import recorded_study
from sweeps.ledger import Ledger

LAYER = {"layer": "lm_head", "slope": -0.83, "interval": [-1.0, -0.7], "cause": "too small", "outcome": "vanishes"}


@pytest.fixture(scope="module")
def study(finished):
    return recorded_study(finished / "study")


@pytest.fixture(scope="module")
def ledger(finished):
    return Ledger.read(finished / "study")


@pytest.fixture(scope="module")
def found(study, ledger):
    return gather(study, ledger)


def coordinates(outcome, *layers, not_finite_width=None):
    return {"outcome": outcome, "layers": list(layers), "not_finite_width": not_finite_width}


@pytest.mark.parametrize(
    ("body", "outcome", "reason"),
    [
        (coordinates("passes", {**LAYER, "outcome": "passes"}), "passed", "all 1 layers' updates keep their size"),
        (coordinates("cannot_tell", {**LAYER, "outcome": "cannot_tell"}), "cannot_tell", "lm_head cannot tell"),
        (coordinates("vanishes", LAYER), "failed", "lm_head vanishes (slope -0.83): too small"),
        (coordinates("blows_up", not_finite_width=64), "failed", "width 64 left the finite numbers"),
        (None, "cannot_tell", "not run yet: `forerun check PLAN` does"),
    ],
)
def test_the_coordinate_gate(body, outcome, reason):
    gate = gates.coordinate_gate(body)
    assert (gate.name, gate.outcome) == ("coordinates", outcome)
    assert gate.reason.startswith(reason)


@pytest.mark.parametrize(
    ("verdict", "outcome"), [("holds", "passed"), ("drifts", "failed"), ("cannot_tell", "cannot_tell")]
)
def test_the_transfer_gate(verdict, outcome):
    gate = gates.transfer_gate(SimpleNamespace(outcome=verdict, reasons=("a", "b")))
    assert (gate.outcome, gate.reason) == (outcome, "a; b")


def fit_of(status="converged", num_covered=3, num_held_out=3, *, backtest=True):
    tested = SimpleNamespace(largest_error=0.0123, num_covered=num_covered, runs=[None] * num_held_out)
    return SimpleNamespace(status=status, warnings=("w",), level=0.9, backtest=tested if backtest else None)


@pytest.mark.parametrize(
    ("fit", "outcome", "reason"),
    [
        (fit_of(), "passed", "held-out largest rung predicted with 1.23% error at most, inside its 90% interval"),
        (fit_of(num_covered=2), "failed", "held-out largest rung predicted with 1.23% error at most, outside its 90%"),
        (fit_of(num_covered=None), "failed", "held-out largest rung"),
        (fit_of(status="at_bound"), "passed", "held-out largest rung"),
        (fit_of(status="unidentified"), "cannot_tell", "unidentified: w"),
        (fit_of(backtest=False), "cannot_tell", "too few rungs to hold the largest one out"),
    ],
)
def test_the_fit_gate(study, found, fit, outcome, reason):
    gate = gates.gates(study, None, found.verdict, fit, found.choice)[2]
    assert (gate.name, gate.outcome) == ("fit", outcome)
    assert gate.reason.startswith(reason)


def test_no_back_test_speaks_for_a_target_far_away(study, found):
    outcomes = []
    for reach in (gates.FARTHEST_REACH, 1.01 * gates.FARTHEST_REACH):
        prediction = dataclasses.replace(found.choice.prediction, extrapolation=reach)
        choice = dataclasses.replace(found.choice, prediction=prediction)
        outcomes.append(gates.gates(study, None, found.verdict, fit_of(), choice)[2].outcome)
    assert outcomes == ["passed", "cannot_tell"]


def test_the_data_gate(study, found):
    have = study.manifest.num_tokens("train")
    for wanted, outcome in ((have, "passed"), (have + 1, "failed")):
        prediction = dataclasses.replace(found.choice.prediction, tokens=float(wanted))
        choice = dataclasses.replace(found.choice, prediction=prediction)
        gate = gates.gates(study, None, found.verdict, found.fit, choice)[3]
        assert (gate.name, gate.outcome) == ("data", outcome)


def test_the_gates_have_the_names_that_freeze_knows(found):
    from launcher.verbs.freeze import GATES

    assert tuple(gate.name for gate in found.gates) == GATES
