"""What closes each gate."""

import dataclasses
import re
from types import SimpleNamespace

import pytest

from launcher.answers.outcome import decide_line
from launcher.study import gates
from launcher.study.next_runs import next_runs

OLD_LAYER = {
    "layer": "lm_head",
    "role": "readout",
    "slope": -0.83,
    "interval": [-1.0, -0.7],
    "expected": [0.0, 0.0],
    "cause": "too small",
    "outcome": "vanishes",
}
LAYER = {**OLD_LAYER, "rate": None}


def coordinates(outcome, *layers, lost=None, mistakes=(), axis="width"):
    check = {
        "outcome": outcome,
        "layers": list(layers),
        "mistakes": list(mistakes),
        "axis": axis,
        "not_finite_width": lost,
        "not_finite_depth": lost,
        "not_finite_step": lost and 3,
    }
    return {"depth" if axis == "depth" else "mup": check}


PASSING = coordinates("passes", {**LAYER, "outcome": "passes"})


@pytest.mark.parametrize(
    ("body", "outcome", "reason"),
    [
        (PASSING, "passed", "all layers (1) keep their size as width grows"),
        (
            coordinates("cannot_tell", {**LAYER, "outcome": "cannot_tell"}),
            "cannot_tell",
            "lm_head cannot tell",
        ),
        (coordinates("vanishes", LAYER), "failed", "lm_head vanishes (slope -0.83): too small"),
        (
            coordinates("vanishes", OLD_LAYER),
            "cannot_tell",
            "lm_head vanishes (slope -0.83): too small; recorded by",
        ),
        (
            coordinates("blows_up", {**OLD_LAYER, "outcome": "blows_up"}),
            "failed",
            "lm_head blows up",
        ),
        (coordinates("blows_up", lost=64), "failed", "width 64 became non-finite at step 3"),
        (coordinates("blows_up", mistakes=["unscaled readout"]), "failed", "unscaled readout"),
        (
            PASSING | coordinates("vanishes", LAYER, axis="depth"),
            "failed",
            "all layers (1) keep their size as width",
        ),
        ({}, "cannot_tell", "not run yet: run `forerun check PLAN`"),
    ],
)
def test_the_coordinate_gate(body, outcome, reason):
    gate = gates.coordinate_gate(body, "mup")
    assert (gate.name, gate.outcome) == ("coordinates", outcome)
    assert gate.reason.startswith(reason)


def verdicts_of(together, failed=0, **others):
    judged = [
        (
            SimpleNamespace(hyperparameter=name, name=f"{name} over width"),
            SimpleNamespace(
                verdict=SimpleNamespace(outcome=outcome, reasons=(f"{name} reason", "more"))
            ),
        )
        for name, outcome in others.items()
    ]
    together = SimpleNamespace(outcome=together, reasons=("a", "b"))
    return SimpleNamespace(
        together=together, tests=tuple(judged), num_failed=lambda _: failed, pairs=()
    )


@pytest.mark.parametrize(
    ("verdict", "others", "outcome"),
    [
        ("holds", {}, "passed"),
        ("cannot_tell", {}, "cannot_tell"),
        # one axis by itself: what counts is all of them together
        ("holds", {"learning_rate": "drifts"}, "passed"),
        ("holds", {"clip_norm": "drifts", "warmup_fraction": "cannot_tell"}, "failed"),
        ("holds", {"clip_norm": "cannot_tell"}, "cannot_tell"),
    ],
)
def test_the_transfer_gate(verdict, others, outcome):
    gate = gates.transfer_gate(verdicts_of(verdict, **others))
    assert gate.outcome == outcome
    assert gate.reason.startswith("learning rate: a; b")
    assert ("clip_norm over width: clip_norm reason" in gate.reason) == ("clip_norm" in others)


def test_a_pair_of_rates_closes_the_transfer_gate():
    held = verdicts_of("holds", muon_lr="holds")
    for outcome, closed in (
        ("holds", "passed"),
        ("cannot_tell", "cannot_tell"),
        ("drifts", "failed"),
    ):
        held.pairs = (
            SimpleNamespace(outcome=outcome, reasons=("learning rate with muon lr: why",)),
        )
        gate = gates.transfer_gate(held)
        assert gate.outcome == closed and "learning rate with muon lr: why" in gate.reason


def fit_of(status="converged", num_covered=3, num_held_out=3, *, backtest=True, error=0.0123):
    tested = SimpleNamespace(
        largest_error=error, num_covered=num_covered, runs=[None] * num_held_out, extrapolation=4.0
    )
    return SimpleNamespace(
        status=status, warnings=("w",), level=0.9, backtest=tested if backtest else None
    )


@pytest.mark.parametrize(
    ("fit", "outcome", "reason"),
    [
        (
            fit_of(),
            "passed",
            (
                "largest runs held out (3) predicted with at most 1.23\u00a0% error from runs 4 "
                "times "
                "smaller"
            ),
        ),
        # chance alone allows it
        (fit_of(num_covered=0, num_held_out=1), "passed", "largest run held out (1)"),
        (fit_of(num_covered=1), "failed", "largest runs held out (3)"),
        (
            fit_of(error=0.06),
            "failed",
            "largest runs held out (3) predicted with at most 6\u00a0% error",
        ),
        (fit_of(status="at_bound"), "cannot_tell", "at_bound: w"),
        (fit_of(backtest=False), "cannot_tell", "too few rungs to hold out the largest one"),
    ],
)
def test_the_fit_gate(study, found, fit, outcome, reason):
    gate = gates.gates(study, {}, found.verdicts, fit, sure(found))[2]
    assert (gate.name, gate.outcome) == ("fit", outcome)
    assert gate.reason.startswith(reason)


@pytest.mark.parametrize("fit", [fit_of(), fit_of(status="degenerate")])
def test_a_main_run_narrower_than_every_proxy_is_doubted(study, found, fit):
    choice = sure(found)
    narrow = dataclasses.replace(
        choice, shape=dataclasses.replace(choice.shape, width=4, num_heads=1, num_kv_heads=1)
    )
    gate = gates.gates(study, {}, found.verdicts, fit, narrow)[2]
    assert gate.outcome == "cannot_tell" and "width 4 is below 8" in gate.reason
    assert "is below" not in gates.gates(study, {}, found.verdicts, fit, choice)[2].reason


def sure(found, warnings=(), **prediction):
    """The choice, as a good ladder would have made it, with the prediction changed."""
    best = found.choice.allocation.loss_nats
    good = {"loss_nats": best, "low": 0.95 * best, "high": 1.05 * best, "extrapolation": 10.0}
    return dataclasses.replace(
        found.choice,
        allocation=dataclasses.replace(found.choice.allocation, warnings=warnings),
        prediction=dataclasses.replace(found.choice.prediction, **{**good, **prediction}),
    )


def test_the_data_gate(study, found):
    have = study.manifest.num_tokens("train")
    for wanted, outcome in ((have, "passed"), (have + 1, "failed")):
        prediction = dataclasses.replace(found.choice.prediction, tokens=float(wanted))
        choice = dataclasses.replace(found.choice, prediction=prediction)
        gate = gates.gates(study, {}, found.verdicts, found.fit, choice)[3]
        assert (gate.name, gate.outcome) == ("data", outcome)


def test_no_runs_are_offered_where_a_gate_failed_that_they_cannot_open(study, ledger, found):
    def asked(*accepted, **outcomes):
        planted = tuple(
            gates.Gate(name=name, outcome=outcome, reason="") for name, outcome in outcomes.items()
        )
        return next_runs(study, ledger, dataclasses.replace(found, gates=planted), accepted)

    assert asked(data="passed")["num_runs"] > 0
    assert asked(data="failed") is None and asked(fit="failed") is None
    assert asked("data", data="failed") == asked(data="passed")
    failed = gates.Gate(name="data", outcome="failed", reason="")
    assert "data.path" in gates.needs_text([failed]) and gates.needs_text([failed]) == decide_line(
        None, None, [failed]
    )


def test_too_few_data_are_named_before_any_run(study):
    have = study.manifest.num_tokens("train")
    assert not gates.data_warning(study, have)
    warned = gates.data_warning(study, have + 1)
    most = float(re.search(r"target.budget_flops of at most about (\S+);", warned)[1])
    assert most == pytest.approx(6 * have * have / 20, rel=0.05)  # 6ND at 20 tokens a parameter


def test_the_gates_have_the_names_that_freeze_knows(found):
    from launcher.verbs.freeze import GATES

    only_where_asked_or_failed = ("replays_agree", "runs_ended")
    assert (*(gate.name for gate in found.gates), *only_where_asked_or_failed) == GATES


def test_a_check_whose_control_passes_too_names_nothing_to_fix():
    """The control names a mistake in its own model, which is right."""
    gate = gates.coordinate_gate(PASSING | {"sp": PASSING["mup"]}, "mup")
    assert gate.outcome == "cannot_tell"
    assert "fix" not in gates.check_advice(gate.outcome) and "check_widths" in gates.check_advice(
        gate.outcome
    )
    assert "fix" in gates.check_advice("failed")
