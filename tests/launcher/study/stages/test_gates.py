"""Tests of a study's gates, the checks that must pass before a config is frozen: the findings that
close each gate, and the runs that could open it.
"""

import dataclasses
import re
import tomllib
from types import SimpleNamespace

import pytest

from forerun._launcher.report.answers.outcome import format_next_decision
from forerun._launcher.study.experiments.coordinate_record import RecordedCheck
from forerun._launcher.study.stages import gates
from forerun._launcher.study.stages.next_runs import find_next_runs
from forerun._proxies.core.checks import Interval

OLD_LAYER = {
    "layer": "lm_head",
    "role": "readout",
    "slope": -0.83,
    "interval": [-1.0, -0.7],
    "expected": [0.0, 0.0],
    "cause": "too small",
    "outcome": "vanishes",
}
"""A layer in the record of a coordinate check by the first version of the check, without `rate`."""
LAYER = {**OLD_LAYER, "rate": None}
"""A layer in the record of a coordinate check by the present version."""


def make_check_body(outcome, *layers, lost=None, mistakes=(), axis="width"):
    """Return the record of a coordinate check, by name of the check.

    Args:
        outcome: Outcome of the check.
        layers: Records of its layers.
        lost: Size at which a run became non-finite; None if none did.
        mistakes: Mistakes that the check names.
        axis: Axis of the check, `width` or `depth`.
    """
    check = {
        "outcome": outcome,
        "layers": list(layers),
        "mistakes": list(mistakes),
        "notes": [],
        "axis": axis,
        "widths": [64, 128],
        "depths": [2, 2],
        "num_steps": 4,
        "num_seeds": 2,
        "learning_rate": 0.01,
        "level": 0.9,
        "not_finite_width": lost,
        "not_finite_depth": lost,
        "not_finite_step": lost and 3,
    }
    return {"depth" if axis == "depth" else "mup": RecordedCheck.model_validate(check)}


PASSING = make_check_body("passes", {**LAYER, "outcome": "passes"})


@pytest.mark.parametrize(
    ("body", "outcome", "reason"),
    [
        (PASSING, "passed", "all layers (1) keep their size as width grows"),
        (
            make_check_body("cannot_tell", {**LAYER, "outcome": "cannot_tell"}),
            "cannot_tell",
            "lm_head cannot tell",
        ),
        (make_check_body("vanishes", LAYER), "failed", "lm_head vanishes (slope -0.83): too small"),
        (
            make_check_body("vanishes", OLD_LAYER),
            "cannot_tell",
            "lm_head vanishes (slope -0.83): too small; recorded by",
        ),
        (
            make_check_body("blows_up", {**OLD_LAYER, "outcome": "blows_up"}),
            "failed",
            "lm_head blows up",
        ),
        (make_check_body("blows_up", lost=64), "failed", "width 64 became non-finite at step 3"),
        (make_check_body("blows_up", mistakes=["unscaled readout"]), "failed", "unscaled readout"),
        (
            PASSING | make_check_body("vanishes", LAYER, axis="depth"),
            "failed",
            "all layers (1) keep their size as width",
        ),
        ({}, "cannot_tell", "not run yet: run `forerun check PLAN`"),
    ],
)
def test_coordinate_gate_follows_the_recorded_checks(body, outcome, reason):
    gate = gates.judge_coordinates(body, "mup")
    assert (gate.name, gate.outcome) == ("coordinates", outcome)
    assert gate.reason.startswith(reason)


def make_verdicts(together, failed=0, **outcomes):
    """Return verdicts.

    Args:
        together: Outcome of the learning rate over all axes at once.
        failed: Number of failed runs of each test.
        outcomes: Outcomes of single tests, by hyperparameter.
    """
    tests = [
        (
            SimpleNamespace(hyperparameter=name, name=f"{name} over width"),
            SimpleNamespace(outcome=outcome, reasons=(f"{name} reason", "more")),
        )
        for name, outcome in outcomes.items()
    ]
    together = SimpleNamespace(outcome=together, reasons=("a", "b"))
    return SimpleNamespace(together=together, tests=tuple(tests), count_failed=lambda _: failed)


@pytest.mark.parametrize(
    ("verdict", "outcomes", "outcome"),
    [
        ("holds", {}, "passed"),
        ("cannot_tell", {}, "cannot_tell"),
        # A drift over one axis does not count, only all axes together.
        ("holds", {"learning_rate": "drifts"}, "passed"),
        ("holds", {"clip_norm": "drifts", "warmup_fraction": "cannot_tell"}, "failed"),
        ("holds", {"clip_norm": "cannot_tell"}, "cannot_tell"),
    ],
)
def test_transfer_gate_follows_the_verdicts(verdict, outcomes, outcome):
    gate = gates.judge_transfer(make_verdicts(verdict, **outcomes))
    assert gate.outcome == outcome
    assert gate.reason.startswith("learning rate: a; b")
    assert ("clip_norm over width: clip_norm reason" in gate.reason) == ("clip_norm" in outcomes)


def make_fit(status="converged", num_covered=3, num_held_out=3, *, has_backtest=True, error=0.0123):
    """Return a fit whose intervals cover `num_covered` of the held-out runs."""
    backtest = SimpleNamespace(
        largest_error=error, num_covered=num_covered, runs=[None] * num_held_out, extrapolation=4.0
    )
    return SimpleNamespace(
        status=status, warnings=("w",), level=0.9, backtest=backtest if has_backtest else None
    )


@pytest.mark.parametrize(
    ("fit", "outcome", "reason"),
    [
        (
            make_fit(),
            "passed",
            (
                "largest runs held out (3) predicted with at most 1.23\u00a0% error from runs 4 "
                "times "
                "smaller"
            ),
        ),
        # One miss of one is within chance at level 0.9.
        (make_fit(num_covered=0, num_held_out=1), "passed", "largest run held out (1)"),
        (make_fit(num_covered=1), "failed", "largest runs held out (3)"),
        (
            make_fit(error=0.06),
            "failed",
            "largest runs held out (3) predicted with at most 6\u00a0% error",
        ),
        (make_fit(status="at_bound"), "cannot_tell", "at_bound: w"),
        (
            make_fit(has_backtest=False),
            "cannot_tell",
            "too few rungs to hold out the largest one",
        ),
    ],
)
def test_fit_gate_follows_the_backtest(study, findings, fit, outcome, reason):
    """The backtest predicts the largest runs of the ladder from the smaller ones."""
    gate = gates.judge_gates(study, {}, findings.verdicts, fit, make_good_choice(findings))[2]
    assert (gate.name, gate.outcome) == ("fit", outcome)
    assert gate.reason.startswith(reason)


@pytest.mark.parametrize("fit", [make_fit(), make_fit(status="degenerate")])
def test_main_run_narrower_than_every_proxy_cannot_be_judged(study, findings, fit):
    choice = make_good_choice(findings)
    narrow = dataclasses.replace(
        choice, shape=dataclasses.replace(choice.shape, width=4, num_heads=1, num_kv_heads=1)
    )
    gate = gates.judge_gates(study, {}, findings.verdicts, fit, narrow)[2]
    assert gate.outcome == "cannot_tell" and "width 4 is below 8" in gate.reason
    assert "is below" not in gates.judge_gates(study, {}, findings.verdicts, fit, choice)[2].reason


def make_good_choice(findings):
    """Return the choice that a good ladder would give."""
    choice, best = findings.choice, findings.choice.allocation.loss_nats
    return dataclasses.replace(
        choice,
        allocation=dataclasses.replace(choice.allocation, warnings=()),
        prediction=dataclasses.replace(
            choice.prediction,
            loss_nats=best,
            low=0.95 * best,
            high=1.05 * best,
            extrapolation=10.0,
        ),
    )


def test_data_gate_fails_if_the_corpus_has_too_few_tokens(study, findings):
    num_tokens = study.manifest.count_tokens("train")
    for needed, outcome in ((num_tokens, "passed"), (num_tokens + 1, "failed")):
        prediction = dataclasses.replace(findings.choice.prediction, tokens=float(needed))
        choice = dataclasses.replace(findings.choice, prediction=prediction)
        gate = gates.judge_gates(study, {}, findings.verdicts, findings.fit, choice)[3]
        assert (gate.name, gate.outcome) == ("data", outcome)


def test_no_runs_are_offered_if_they_cannot_open_a_failed_gate(study, ledger, findings):
    def find_runs(*accepted, **outcomes):
        planted = tuple(
            gates.Gate(name=name, outcome=outcome, reason="") for name, outcome in outcomes.items()
        )
        return find_next_runs(study, ledger, dataclasses.replace(findings, gates=planted), accepted)

    assert find_runs(data="passed").num_runs > 0
    assert find_runs(data="failed") is None and find_runs(fit="failed") is None
    assert find_runs("data", data="failed") == find_runs(data="passed")
    failed = gates.Gate(name="data", outcome="failed", reason="")
    needs = gates.format_needs([failed])
    assert "data.path" in needs and needs == format_next_decision(None, None, [failed])


@pytest.fixture
def plant_findings(findings, monkeypatch):
    """A function that plants findings in which two gates, `transfer` and `ladder_tuned`, lack runs.

    The test of the learning rate over duration knows its optimum to 0.3 octaves at the largest
    duration. The function takes the runs that the verdicts ask for, and the half width of the
    interval of the optimum at the target, in octaves.
    """
    for name, judge in (("transfer", "judge_transfer"), ("ladder_tuned", "judge_ladder_rates")):
        gate = gates.Gate(name=name, outcome="cannot_tell", reason="")
        monkeypatch.setattr(
            f"forerun._launcher.study.stages.next_runs.{judge}", lambda *_, gate=gate: gate
        )

    def plant(missing, half_width):
        monkeypatch.setattr(
            "forerun._launcher.study.stages.next_runs.find_next_round_runs",
            lambda *_: missing,
        )
        tests = []
        for test, recorded in findings.verdicts.tests:
            verdict = recorded
            if (test.hyperparameter, test.axis) == ("learning_rate", "duration"):
                largest = dataclasses.replace(verdict.optima[-1], interval_log2=(-6.3, -5.7))
                verdict = dataclasses.replace(
                    verdict,
                    outcome="cannot_tell",
                    optima=(*verdict.optima[:-1], largest),
                    offset=Interval(estimate=0.0, low=-half_width, high=half_width, level=0.9),
                    question=dataclasses.replace(verdict.question, target_size=100 * largest.size),
                )
            tests.append((test, verdict))
        together = dataclasses.replace(
            findings.verdicts.together,
            outcome="cannot_tell",
            untested=(),
            regret_nats=Interval(estimate=0.0, low=0.0, high=0.1, level=0.9),
        )
        verdicts = dataclasses.replace(findings.verdicts, tests=tuple(tests), together=together)
        return dataclasses.replace(findings, verdicts=verdicts, gates=())

    return plant


def test_runs_that_the_verdicts_ask_for_come_first(study, ledger, plant_findings):
    """Runs of the ladder come later, because their learning rate follows from the verdict."""
    spec = study.build_trial(study.space.lowest)
    next_runs = find_next_runs(study, ledger, plant_findings({spec.id: spec}, 3.0))
    assert (next_runs.gates, next_runs.sets, next_runs.num_runs) == (("transfer",), (), 1)


def test_target_far_beyond_the_tests_needs_a_longer_test(study, ledger, plant_findings):
    durations = study.plan.transfer.durations
    next_runs = find_next_runs(study, ledger, plant_findings({}, 3.0))
    # The first of the `--set` options is "transfer.durations=[...]".
    new_durations = tomllib.loads(next_runs.sets[0].partition(".")[2])["durations"]
    assert new_durations == [*durations, 4 * max(durations)]
    assert not any("transfer." in value for value in next_runs.sets[1:])
    # If the interval is as wide at the largest duration, noise hides the optimum.
    more_seeds = find_next_runs(study, ledger, plant_findings({}, 0.3))
    assert more_seeds.sets[0].startswith("transfer.num_seeds=")
    assert 0 < next_runs.num_runs < more_seeds.num_runs


def test_missing_data_is_warned_of_before_any_run(study):
    num_tokens = study.manifest.count_tokens("train")
    assert not gates.warn_of_data(study, num_tokens)
    warning = gates.warn_of_data(study, num_tokens + 1)
    max_flops = float(re.search(r"target.budget_flops of at most about (\S+);", warning)[1])
    # 6ND with N = D / 20
    assert max_flops == pytest.approx(6 * num_tokens * num_tokens / 20, rel=0.05)


def test_freeze_knows_the_names_of_all_gates(findings):
    from forerun._launcher.cli.verbs.freeze import GATES

    conditional_gates = ("replays_agree", "runs_ended")
    assert (*(gate.name for gate in findings.gates), *conditional_gates) == GATES


def test_advice_names_no_fix_if_the_control_passes_too():
    """The control is the standard parametrization, which must not pass. If it does, the check
    cannot tell.
    """
    gate = gates.judge_coordinates(PASSING | {"sp": PASSING["mup"]}, "mup")
    assert gate.outcome == "cannot_tell"
    advice = gates.advise_on_check(gate.outcome)
    assert "fix" not in advice and "check_widths" in advice
    assert "fix" in gates.advise_on_check("failed")
