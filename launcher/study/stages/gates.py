"""The gates of freezing: the condition of each, and its outcome. A study stops after a gate that
failed, unless somebody has accepted that (`refuse_failed`).

This module also writes the sentences about gates, coordinate checks, and failed runs that several
verbs print.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun._launcher.main_run.frozen.launch_file import CheckOutcome
from forerun._launcher.main_run.progress_output import print_progress
from forerun._proxies.core.errors import ExitCode, InputError
from forerun._proxies.core.notation import (
    format_count,
    format_counted,
    format_factor,
    format_percent,
)
from forerun._proxies.core.spec import RunResult
from forerun._scaling_fits.forecast.conclusive import (
    format_doubts,
    judge_backtest,
    list_fit_doubts,
    list_reach_doubts,
)

if TYPE_CHECKING:
    # Pydantic is not loaded for `--help`.
    from forerun._launcher.study.experiments.coordinate_record import RecordedCheck
    from forerun._launcher.study.experiments.transfer_results import Verdicts
    from forerun._launcher.study.plan.study import Study
    from forerun._launcher.study.stages.ladder_checks import LadderChecks
    from forerun._launcher.study.stages.main_run_choice import MainRunChoice
    from forerun._scaling_fits.forecast.uncertainty import FittedRuns
    from forerun._sweeps.store.ledger import Ledger

ACCEPTED = "accepted"
"""Kind of the ledger's records of accepted gates."""
RUNS_ENDED = "runs_ended"
"""Name of the gate that no run has finally failed."""
_MAX_FAILED_NAMED = 8
"""Maximum number of failed runs that are named."""
SHAPE_EXCESS = 0.01
"""Maximum increase of the predicted loss by rounding the size to a shape, as a share of the
loss.
"""
_PASSED = ("passes", "holds", "tuned", "agrees")
"""Outcomes of checks, verdicts, rungs, and replays that count as passed."""


class GateError(InputError):
    """A gate failed. The message says which one, why, and what to do."""

    exit_code = ExitCode.GATE


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One condition of freezing, with its outcome."""

    name: str
    outcome: CheckOutcome
    reason: str
    """Reason for the outcome. An acceptance holds only for this very text."""


def judge_findings(name: str, outcomes: Iterable[str], reasons: Iterable[str]) -> Gate:
    """Return a gate from several findings: it has the worst of their outcomes, and all of their
    reasons.

    Args:
        name: Name of the gate.
        outcomes: Outcomes in the words of the findings, such as `passes`, `drifts` or
            `cannot_tell`. A word that is neither in `_PASSED` nor `cannot_tell` fails the gate.
        reasons: Reasons of the findings.
    """
    words = [outcome for outcome in outcomes if outcome not in _PASSED]
    outcome: CheckOutcome = "passed" if not words else "cannot_tell"
    if any(word != "cannot_tell" for word in words):
        outcome = "failed"
    return Gate(name=name, outcome=outcome, reason="; ".join(reasons))


def judge_gates(
    study: Study,
    coordinates: Mapping[str, RecordedCheck],
    verdicts: Verdicts,
    fit: FittedRuns,
    choice: MainRunChoice,
    lost_rungs: Sequence[RunResult] = (),
    checks: LadderChecks | None = None,
) -> tuple[Gate, ...]:
    """Judge every condition of freezing.

    Args:
        study: Study to judge.
        coordinates: Coordinate checks by name; empty if none has run.
        verdicts: Verdicts at the chosen sizes.
        fit: Fit of the ladder.
        choice: Main run that would be launched.
        lost_rungs: Results of rungs without a loss.
        checks: Checks of rungs at other learning rates; None if none has run.
    """
    coordinates_gate = judge_coordinates(coordinates, study.plan.proxy.parametrization)
    if study.plan.command is not None:
        reason = "forerun cannot see your own trainer's activations: run the coordinate check there"
        coordinates_gate = Gate(name="coordinates", outcome="cannot_tell", reason=reason)
    return (
        coordinates_gate,
        judge_transfer(verdicts),
        _judge_fit(study, fit, choice, lost_rungs),
        _judge_data(study, choice.num_tokens),
        judge_ladder_rates(checks),
    )


def judge_coordinates(checks: Mapping[str, RecordedCheck], parametrization: str) -> Gate:
    """Judge the coordinate checks: layers keep their size at every width, and at every depth if
    the parametrization has a depth rule.
    """
    if parametrization not in checks:
        reason = "not run yet: run `forerun check PLAN`"
        return Gate(name="coordinates", outcome="cannot_tell", reason=reason)
    judged_checks = [checks[name] for name in (parametrization, "depth") if name in checks]
    outcomes: list[str] = [check.outcome for check in judged_checks]
    reasons = [
        "; ".join(check.describe_problems())
        or f"all layers ({len(check.layers)}) keep their size as {check.axis} grows"
        for check in judged_checks
    ]
    for index, check in enumerate(judged_checks):
        # Earlier versions of the check did not record the sizes of the updates themselves.
        if outcomes[index] == "vanishes" and not any(layer.has_rate for layer in check.layers):
            outcomes[index] = "cannot_tell"
            reasons.append(
                "recorded by an earlier version of this check, which mistook the noise of small "
                "models for vanishing: check in a new study"
            )
    control = checks.get("sp")
    if parametrization != "sp" and control is not None and control.outcome == "passes":
        outcomes.append("cannot_tell")
        reasons.append(
            "the standard parametrization passes too, so this check would miss a mistake: add "
            "widths or steps"
        )
    return judge_findings("coordinates", outcomes, reasons)


def describe_check(name: str, outcome: str, parametrization: str) -> str:
    """Return the outcome of one coordinate check in words.

    Args:
        name: Parametrization that was checked, or `depth`.
        outcome: Outcome of the check.
        parametrization: Parametrization of the study; the standard one is its control, which should
            not pass.
    """
    is_control = name == "sp" and parametrization != "sp"
    as_it_should = ", as it should" if is_control and outcome == "blows_up" else ""
    return outcome.replace("_", " ") + as_it_should


def advise_on_check(outcome: str) -> str:
    """Return the advice after a coordinate check that did not pass.

    A check that cannot tell names no mistake: its layers are undecided, or the control passes too.
    """
    if outcome == "failed":
        return "fix the layers named above in the model or in proxy.rules"
    return (
        "give the check more widths, steps or seeds (transfer.check_widths, check_num_steps, "
        "check_num_seeds)"
    )


def find_failed_check(study: Study, checks: Mapping[str, RecordedCheck]) -> tuple[Gate, ...]:
    """Return the gate of the coordinate check if it failed, else an empty tuple.

    A study of the standard parametrization is never stopped, because that parametrization is known
    not to keep sizes.
    """
    name = study.plan.proxy.parametrization
    return select_failed([judge_coordinates(checks, name)]) if name != "sp" else ()


def find_failed_transfer(verdicts: Verdicts) -> tuple[Gate, ...]:
    """Return the transfer gate if a value drifts, else an empty tuple."""
    return select_failed([judge_transfer(verdicts)])


def select_failed(gates: Iterable[Gate]) -> tuple[Gate, ...]:
    """Return the gates that failed."""
    return tuple(gate for gate in gates if gate.outcome == "failed")


def refuse_failed(study: Study, ledger: Ledger, known_gates: Iterable[Gate]) -> None:
    """Stop a study before its next stage if a gate failed. A gate that cannot tell stops nothing.

    Args:
        study: Study as its ledger has it.
        ledger: Ledger, whose records say which gates were accepted.
        known_gates: Gates that are known before the next stage.

    Raises:
        GateError: Gates failed that nobody accepted.
    """
    records, unaccepted = ledger.read_records(ACCEPTED), []
    for gate in select_failed(known_gates):
        if any(is_acceptance(record.body, gate) for record in records):
            print_progress(f"accepted failure: gate {gate.name} failed, the study goes on")
        else:
            unaccepted.append(gate)
    if not unaccepted:
        return
    lines = [f"gate {gate.name} failed: {gate.reason}" for gate in unaccepted]
    accept = " ".join(f"--accept {gate.name}" for gate in unaccepted)
    raise GateError(
        "\n".join([*lines, "Nothing more was run.", format_needs(unaccepted)])
        + f"\nor go on all the same: forerun freeze {study.study_dir} {accept} --reason TEXT, "
        "then the same command again"
    )


def judge_transfer(verdicts: Verdicts) -> Gate:
    """Judge the verdicts: the learning rate over all axes at once, and every other hyperparameter
    that is tested.
    """
    outcomes: list[str] = [verdicts.together.outcome]
    reasons = [f"learning rate: {'; '.join(verdicts.together.reasons)}"]
    for test, verdict in verdicts.tests:
        # The workers of these runs died, so their results are not known.
        if num_failed := verdicts.count_failed(test):
            outcomes.append("cannot_tell")
            reasons.append(f"{test.name}: {format_counted(num_failed, 'run')} failed, not counted")
        if test.hyperparameter != "learning_rate":
            outcomes.append(verdict.outcome)
            reasons.append(f"{test.name}: {verdict.reasons[0]}")
    return judge_findings("transfer", outcomes, reasons)


def _judge_fit(
    study: Study, fit: FittedRuns, choice: MainRunChoice, lost_rungs: Sequence[RunResult]
) -> Gate:
    """Judge the fit. It passes if every rung has trained, the fit predicts the largest rungs when
    they are held out, and the target is within reach.
    """
    if lost_rungs:
        diverged = any(rung.status == "diverged" for rung in lost_rungs)
        message = "; ".join(f"a rung {rung.status}: {rung.reason}" for rung in lost_rungs)
        return Gate(name="fit", outcome="failed" if diverged else "cannot_tell", reason=message)
    narrower = describe_narrow_target(study, choice.shape.width)
    if fit.status != "converged" or fit.backtest is None:
        reasons = filter(None, [*list_fit_doubts(fit), narrower])
        return Gate(name="fit", outcome="cannot_tell", reason="; ".join(reasons))
    notes, wrong = judge_backtest(fit.backtest, fit.level)
    prediction, doubts = choice.prediction, list(choice.allocation.warnings)
    doubts += [narrower] if narrower else []
    excess = prediction.loss_nats / choice.allocation.loss_nats - 1
    if excess > SHAPE_EXCESS:
        doubts.append(
            f"the nearest width allowed costs {format_percent(excess)} over the best size: lower "
            "target.width_multiple or launch.tensor"
        )
    low, high = prediction.low, prediction.high
    interval = None if low is None or high is None else (low, high)
    doubts += list_reach_doubts(prediction.loss_nats, interval, prediction.extrapolation)
    outcome: CheckOutcome = "failed" if wrong else "cannot_tell" if doubts else "passed"
    return Gate(name="fit", outcome=outcome, reason=", ".join([*notes, *doubts, *fit.warnings]))


def is_acceptance(record: Any, gate: Gate) -> bool:
    """Return whether the body of an `ACCEPTED` record accepts exactly this outcome and reason of a
    gate.
    """
    return (record["gate"], record["outcome"], record["found"]) == (
        gate.name,
        gate.outcome,
        gate.reason,
    )


def build_forecast_warnings(gates: Iterable[Gate]) -> tuple[str, ...]:
    """Return the warnings to print before a forecast whose fit gate did not pass, accepted or
    not.
    """
    return format_doubts(
        tuple(
            f"the fit gate {gate.outcome.replace('_', ' ')}: {gate.reason}"
            for gate in gates
            if gate.name == "fit" and gate.outcome != "passed"
        )
    )


def describe_narrow_target(study: Study, width: int) -> str:
    """Return a warning if the main run is narrower than every proxy; else empty."""
    plan = study.plan
    narrowest = min(plan.proxy.base_width, *plan.transfer.widths, *plan.ladder.widths)
    if width >= narrowest:
        return ""
    return (
        f"the main run's width {width} is below {narrowest}, the narrowest proxy's: the proxies "
        "say nothing about so small a model; raise target.budget_flops, or add rungs if the fit "
        "chose this width"
    )


def judge_ladder_rates(checks: LadderChecks | None) -> Gate:
    """Judge the ladder. It passes if the learning rates of the checked rungs lose no more than the
    margin.
    """
    if checks is None or not checks.num_planned:
        reason = (
            "no rung is checked at other rates: set ladder.check_offsets_octaves or raise "
            "ladder.check_share"
        )
        return Gate(name="ladder_tuned", outcome="cannot_tell", reason=reason)
    outcomes: list[str] = [rung.outcome for rung in checks.rungs]
    reasons = [rung.words for rung in checks.rungs]
    if num_missing := checks.num_planned - len(checks.rungs):
        outcomes.append("cannot_tell")
        reasons.append(
            f"{num_missing} of {format_counted(checks.num_planned, 'rung')} not checked yet: run "
            "`forerun ladder PLAN`"
        )
    if "mis_tuned" in outcomes:
        reasons.append(
            "the learning rate does not transfer there: test it up to that size (transfer.widths, "
            "transfer.durations), and the ladder follows"
        )
    return judge_findings("ladder_tuned", outcomes, reasons)


def _judge_data(study: Study, num_tokens: float) -> Gate:
    """Judge whether the corpus has as many unique tokens as the main run needs."""
    num_available = study.manifest.count_tokens("train")
    if study.corpus is None:
        unseen = (
            f"{format_count(num_tokens)} tokens needed; forerun cannot count the unique ones of "
            f"{study.plan.data.external}"
        )
        return Gate(name="data", outcome="cannot_tell", reason=unseen)
    sources = study.manifest.sources
    epochs = {
        s.name: s.weight * num_tokens / max(1, s.count_tokens("train")) for s in sources if s.weight
    }
    repeated = [
        f"{name} {format_factor(times)} times" for name, times in epochs.items() if times > 1
    ]
    reason = (
        f"{format_count(num_tokens)} tokens needed, {format_count(num_available)} unique tokens "
        "available"
    )
    if repeated and len(sources) > 1:
        reason += f"; by their weights the run repeats {', '.join(repeated)}"
    return Gate(name="data", outcome="failed" if repeated else "passed", reason=reason)


def warn_of_data(study: Study, num_tokens: float) -> str:
    """Return a warning if the corpus is too small for a main run of `num_tokens` tokens; else
    empty.

    The number of tokens is a guess before any run. The data gate will refuse such a main run.
    """
    sources = [source for source in study.manifest.sources if source.weight]
    max_tokens = min(
        (source.count_tokens("train") / source.weight for source in sources), default=0.0
    )
    # The data of a user's own trainer are not counted.
    if not max_tokens or num_tokens <= max_tokens:
        return ""
    return (
        f"gate data: the main run will need about {format_count(num_tokens)} tokens and the corpus "
        f"has {format_count(max_tokens)}, so `forerun freeze` will refuse, whatever the runs find. "
        "Use a larger corpus (data.path), or target.budget_flops of at most about "
        f"{max_tokens * max_tokens * _BUDGET_OF_TOKENS:.2g}; or repeat the data, by `forerun "
        "freeze --accept data` in the end"
    )


_BUDGET_OF_TOKENS = 6 / 20
"""FLOPs (6ND) of a main run with 20 tokens per parameter, divided by the square of its tokens."""
# A gate without an entry has no common remedy.
_NEEDS = {
    "coordinates": (
        "a model whose layers keep their size: fix the layers that the check names, or sweep the "
        'model as it is with proxy.parametrization = "sp". Use a new study; only a factory without '
        "recorded runs may be fixed in this one"
    ),
    "transfer": "a new plan with another parametrization, or with sizes nearer to the target",
    "fit": "more rungs (ladder.widths, ladder.num_steps) in a child study (--fork keeps the runs)",
    "data": (
        "a larger corpus (data.path) in a new study, or a smaller target.budget_flops in a child "
        "study (--fork)"
    ),
    "ladder_tuned": (
        "learning rates tested up to the ladder's sizes (transfer.widths, transfer.durations)"
    ),
    "replays_agree": "sound machines: test those named, and begin a new study",
}


def format_needs(gates: Iterable[Gate]) -> str:
    """Return one line per failed gate with what it needs."""
    return "\n".join(
        f"gate {gate.name} needs {_NEEDS[gate.name]}"
        for gate in gates
        if gate.outcome == "failed" and gate.name in _NEEDS
    )


def format_failed_runs(ledger: Ledger, study_dir: Path) -> str:
    """Return all runs that failed, with their reasons and the command that runs them again; empty
    if there are none.

    The command starts a child study, because later suggestions of this one counted the run as
    failed.
    """
    from forerun._launcher.study.plan.study import (
        PLAN_FILE,  # here, because `--help` must not load pydantic
    )

    failed = [result for result in ledger.get_results().values() if result.status == "failed"]
    if not failed:
        return ""
    reasons = [f"{result.id[:12]} ({result.reason})" for result in failed[:_MAX_FAILED_NAMED]]
    if len(failed) > _MAX_FAILED_NAMED:
        reasons.append(f"{len(failed) - _MAX_FAILED_NAMED} more")
    runs = format_counted(len(failed), "run")
    return (
        f"{runs} failed for good (not counted): {'; '.join(reasons)}. "
        f"`forerun run {study_dir / PLAN_FILE} --study ANOTHER --fork {study_dir}` runs the failed "
        "ones again and keeps the others"
    )


def build_failed_runs_gate(ledger: Ledger, study_dir: Path) -> tuple[Gate, ...]:
    """Return the gate of the runs that failed; empty if none failed."""
    reason = format_failed_runs(ledger, study_dir)
    return (Gate(name=RUNS_ENDED, outcome="cannot_tell", reason=reason),) if reason else ()
