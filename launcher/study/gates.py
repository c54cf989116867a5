"""The gates of freezing: the condition of each, and its outcome. A study stops after a gate that
failed.

This module also turns a coordinate check into text: mistakes first, then one row for every role of
layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from launcher.base.talk import say
from launcher.frozen.launch_file import CheckOutcome
from proxies.core import canon
from proxies.core.errors import ExitCode, InputError
from proxies.core.notation import counted, format_count, format_factor, format_percent
from proxies.core.spec import RunResult
from scaling_fits.forecast.conclusive import fit_doubts, inconclusive, judge_backtest, reach_doubts

if TYPE_CHECKING:
    from launcher.experiments.transferred_values import Verdicts
    from launcher.plan.study import Study
    from launcher.study.decide import Choice
    from launcher.study.ladder_checks import LadderChecks
    from scaling_fits.forecast.uncertainty import FittedRuns
    from sweeps.store.ledger import Ledger

ACCEPTED = "accepted"
"""Kind of the ledger's records of accepted gates."""
RUNS_ENDED = "runs_ended"
"""Name of the gate that no run has finally failed."""
_MAX_FAILED_NAMED = 8
"""Maximum number of failed runs that are named."""
SHAPE_EXCESS = 0.01
"""Maximum share of the predicted loss that rounding the size to a shape may cost."""


class GateError(InputError):
    """A gate failed. The message says which one, why, and what to do."""

    exit_code = ExitCode.GATE


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One condition of freezing, with its outcome."""

    name: str
    outcome: CheckOutcome
    reason: str


def gates(
    study: Study,
    coordinates: Mapping[str, Any],
    verdicts: Verdicts,
    fit: FittedRuns,
    choice: Choice,
    lost_rungs: Sequence[RunResult] = (),
    checks: LadderChecks | None = None,
) -> tuple[Gate, ...]:
    """Judge every condition of freezing.

    Args:
        study: Study to judge.
        coordinates: Records of the coordinate checks by name; empty if none has run.
        verdicts: Verdicts at the chosen sizes.
        fit: Fit of the ladder.
        choice: Main run that would be launched.
        lost_rungs: Results of rungs without a loss.
        checks: Checks of rungs at other learning rates; None if none has run.
    """
    reason = "forerun cannot see your own trainer's activations: run the coordinate check there"
    unseen_gate = Gate(name="coordinates", outcome="cannot_tell", reason=reason)
    return (
        coordinate_gate(coordinates, study.plan.proxy.parametrization)
        if study.plan.command is None
        else unseen_gate,
        transfer_gate(verdicts),
        _judge_fit(study, fit, choice, lost_rungs),
        _judge_data(study, choice.num_tokens),
        tuned_gate(checks),
    )


def coordinate_gate(checks: Mapping[str, Any], parametrization: str) -> Gate:
    """Judge the coordinate checks: layers keep their size at every width, and at every depth if
    the parametrization has a depth rule.
    """
    own_checks = [checks[name] for name in (parametrization, "depth") if name in checks]
    if parametrization not in checks:
        return Gate(
            name="coordinates",
            outcome="cannot_tell",
            reason="not run yet: run `forerun check PLAN`",
        )
    outcomes: dict[str, CheckOutcome] = {"passes": "passed", "cannot_tell": "cannot_tell"}
    results: list[CheckOutcome] = [
        "cannot_tell" if _is_judged_by_old_rule(check) else outcomes.get(check["outcome"], "failed")
        for check in own_checks
    ]
    notes = [
        "; ".join(findings(check))
        or f"all layers ({len(check['layers'])}) keep their size as {check['axis']} grows"
        for check in own_checks
    ]
    if any(map(_is_judged_by_old_rule, own_checks)):
        notes.append(
            "recorded by an earlier rule, which took the noise of small models for this: check in "
            "a new study"
        )
    control = checks.get("sp")
    if parametrization != "sp" and control is not None and control["outcome"] == "passes":
        results.append("cannot_tell")
        notes.append(
            "the standard parametrization passes too, so this check would miss a mistake: add "
            "widths or steps"
        )
    return Gate(name="coordinates", outcome=worst(results), reason="; ".join(notes))


def describe_check(name: str, outcome: str, parametrization: str) -> str:
    """Return the outcome of one coordinate check in words.

    Args:
        name: Parametrization that was checked, or `depth`.
        outcome: Outcome of the check.
        parametrization: Parametrization of the study; the standard one is its control, which should
            not pass.
    """
    is_control = name == "sp" and parametrization != "sp"
    return outcome.replace("_", " ") + (
        ", as it should" if is_control and outcome == "blows_up" else ""
    )


def check_advice(outcome: str) -> str:
    """Return the advice after a coordinate check that did not pass.

    A check that cannot tell names no mistake: its layers are undecided, or the control passes too.
    """
    if outcome == "failed":
        return "fix the layers named above in the model or in proxy.rules"
    return (
        "give the check more widths, steps or seeds (transfer.check_widths, check_num_steps, "
        "check_num_seeds)"
    )


def find_failed_check(study: Study, checks: Mapping[str, Any]) -> tuple[Gate, ...]:
    """Return the gate of the coordinate check if it failed, else nothing.

    A study of the standard parametrization is never stopped, because that parametrization is known
    not to keep sizes.
    """
    name = study.plan.proxy.parametrization
    return select_failed([coordinate_gate(checks, name)]) if name != "sp" else ()


def find_failed_transfer(verdicts: Verdicts) -> tuple[Gate, ...]:
    """Return the transfer gate if a value drifts, else nothing."""
    return select_failed([transfer_gate(verdicts)])


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
    records, closed = ledger.records(ACCEPTED), []
    for gate in select_failed(known_gates):
        if any(is_acceptance(record.body, gate) for record in records):
            say(f"accepted failure: gate {gate.name} failed, the study goes on")
        else:
            closed.append(gate)
    if not closed:
        return
    lines = [f"gate {gate.name} failed: {gate.reason}" for gate in closed]
    accept = " ".join(f"--accept {gate.name}" for gate in closed)
    raise GateError(
        "\n".join([*lines, "Nothing more was run.", needs_text(closed)])
        + f"\nor go on all the same: forerun freeze {study.study_dir} {accept} --reason TEXT, "
        "then the same command again"
    )


def _is_judged_by_old_rule(check: Any) -> bool:
    """Return whether a record is by an earlier rule, which did not use the updates' own sizes."""
    return check["outcome"] == "vanishes" and not any("rate" in layer for layer in check["layers"])


def worst(outcomes: Sequence[CheckOutcome]) -> CheckOutcome:
    """Return the worst of several outcomes: `failed`, then `cannot_tell`, then `passed`."""
    order: tuple[CheckOutcome, ...] = ("failed", "cannot_tell")
    return next((outcome for outcome in order if outcome in outcomes), "passed")


def transfer_gate(verdicts: Verdicts) -> Gate:
    """Judge the verdicts: the learning rate over all axes at once, and every other hyperparameter
    that is tested.
    """
    outcomes: dict[str, CheckOutcome] = {
        "holds": "passed",
        "drifts": "failed",
        "cannot_tell": "cannot_tell",
    }
    results = [outcomes[verdicts.together.outcome]]
    notes = [f"learning rate: {'; '.join(verdicts.together.reasons)}"]
    for test, judged in verdicts.tests:
        # The workers of these runs died, so their results are not known.
        if num_failed := verdicts.num_failed(test):
            results.append("cannot_tell")
            notes.append(f"{test.name}: {counted(num_failed, 'run')} failed, not counted")
        if test.hyperparameter != "learning_rate":
            results.append(outcomes[judged.verdict.outcome])
            notes.append(f"{test.name}: {judged.verdict.reasons[0]}")
    for pair in verdicts.pairs:
        results.append(outcomes[pair.outcome])
        notes += pair.reasons
    return Gate(name="transfer", outcome=worst(results), reason="; ".join(notes))


def _judge_fit(
    study: Study, fit: FittedRuns, choice: Choice, lost_rungs: Sequence[RunResult]
) -> Gate:
    """Judge the fit: every rung has trained, the held-out largest rungs were predicted, and the
    target is within reach.
    """
    if lost_rungs:
        diverged = any(rung.status == "diverged" for rung in lost_rungs)
        message = "; ".join(f"a rung {rung.status}: {rung.reason}" for rung in lost_rungs)
        return Gate(name="fit", outcome="failed" if diverged else "cannot_tell", reason=message)
    narrower = describe_narrow_target(study, choice.shape.width)
    if fit.status != "converged" or fit.backtest is None:
        reasons = filter(None, [*fit_doubts(fit), narrower])
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
    doubts += reach_doubts(prediction.loss_nats, interval, prediction.extrapolation)
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


def open_gates(body: Any) -> list[Any]:
    """Return the gates of a `report.json` that did not pass and that nobody accepted."""
    return [
        gate
        for gate in body["gates"]
        if gate["outcome"] != "passed" and gate["name"] not in body["accepted"]
    ]


def forecast_warnings(gates: Iterable[Any]) -> tuple[str, ...]:
    """Return the warnings to print before a forecast whose fit gate did not pass, accepted or not.
    `gates` are records or JSON.
    """
    fits = [gate for each in gates if (gate := cast(Any, canon.to_json(each)))["name"] == "fit"]
    closed = [gate for gate in fits if gate["outcome"] != "passed"]
    return inconclusive(
        tuple(f"the fit gate {g['outcome'].replace('_', ' ')}: {g['reason']}" for g in closed)
    )


def describe_narrow_target(study: Study, width: int) -> str:
    """Return a warning if the main run is narrower than every proxy; else empty."""
    plan = study.plan
    narrowest = min(plan.proxy.base_width, *plan.transfer.widths, *plan.ladder.widths)
    if width >= narrowest:
        return ""
    return (
        f"the main run's width {width} is below {narrowest}, the narrowest proxy's: nothing is "
        "learned for so small a model; raise target.budget_flops, or add rungs if the fit chose "
        "this width"
    )


def tuned_gate(checks: LadderChecks | None) -> Gate:
    """Judge the ladder: the checked rungs lose no more than the margin by their learning rate."""
    outcomes: dict[str, CheckOutcome] = {
        "tuned": "passed",
        "mis_tuned": "failed",
        "cannot_tell": "cannot_tell",
    }
    if checks is None or not checks.wanted:
        reason = (
            "no rung is checked at other rates: set ladder.check_offsets_octaves or raise "
            "ladder.check_share"
        )
        return Gate(name="ladder_tuned", outcome="cannot_tell", reason=reason)
    results = [outcomes[rung.outcome] for rung in checks.rungs]
    notes = [rung.words for rung in checks.rungs]
    if len(checks.rungs) < checks.wanted:
        results.append("cannot_tell")
        missing = checks.wanted - len(checks.rungs)
        notes.append(
            f"{missing} of {counted(checks.wanted, 'rung')} not checked yet: run `forerun ladder "
            "PLAN`"
        )
    if "mis_tuned" in (rung.outcome for rung in checks.rungs):
        notes.append(
            "the learning rate does not transfer there: test it up to that size (transfer.widths, "
            "transfer.durations), and the ladder follows"
        )
    return Gate(name="ladder_tuned", outcome=worst(results), reason="; ".join(notes))


def _judge_data(study: Study, num_tokens: float) -> Gate:
    """Judge whether the corpus has as many unique tokens as the main run needs."""
    num_available = study.manifest.num_tokens("train")
    if study.corpus is None:
        unseen = (
            f"{format_count(num_tokens)} tokens needed; forerun cannot count the unique ones of "
            f"{study.plan.data.external}"
        )
        return Gate(name="data", outcome="cannot_tell", reason=unseen)
    sources = study.manifest.sources
    epochs = {
        s.name: s.weight * num_tokens / max(1, s.num_tokens("train")) for s in sources if s.weight
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


def data_warning(study: Study, want: float) -> str:
    """Return the reason for which the data gate will refuse a main run of `want` tokens, guessed
    before any run; empty if it will not.
    """
    sources = [source for source in study.manifest.sources if source.weight]
    max_tokens = min(
        (source.num_tokens("train") / source.weight for source in sources), default=0.0
    )
    if not max_tokens or want <= max_tokens:  # the data of a user's own trainer are not counted
        return ""
    return (
        f"gate data: the main run will need about {format_count(want)} tokens and the corpus has "
        f"{format_count(max_tokens)}, so `forerun freeze` will refuse, whatever the runs find. Use "
        "a larger corpus (data.path), or target.budget_flops of at most about "
        f"{max_tokens * max_tokens * _BUDGET_OF_TOKENS:.2g}; or repeat the data, by `forerun "
        "freeze --accept data` in the end"
    )


_BUDGET_OF_TOKENS = 6 / 20
"""FLOPs (6ND) of a main run with 20 tokens per parameter, divided by the square of its tokens."""
_NEEDS = {
    "coordinates": "a model whose layers keep their size: fix what the check names (a factory in "
    "this study while no "
    'run is recorded), or sweep it as it is with proxy.parametrization = "sp", in a new study '
    "otherwise",
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


def needs_text(gates: Iterable[Any]) -> str:
    """Return one line per failed gate with what it needs. `gates` are records or JSON."""
    failed = [
        gate for each in gates if (gate := cast(Any, canon.to_json(each)))["outcome"] == "failed"
    ]
    return "\n".join(
        f"gate {gate['name']} needs {_NEEDS[gate['name']]}"
        for gate in failed
        if gate["name"] in _NEEDS
    )


def failed_text(ledger: Ledger, study_dir: Path) -> str:
    """Return all runs that failed, with their reasons and the command that runs them again; empty
    if there are none.

    The command starts a child study, because later suggestions of this one counted the run as
    failed.
    """
    from launcher.plan.study import PLAN_FILE  # here, because `--help` must not load pydantic

    failed = [result for result in ledger.results().values() if result.status == "failed"]
    if not failed:
        return ""
    descriptions = [f"{result.id[:12]} ({result.reason})" for result in failed[:_MAX_FAILED_NAMED]]
    descriptions += (
        [f"{len(failed) - _MAX_FAILED_NAMED} more"] if len(failed) > _MAX_FAILED_NAMED else []
    )
    subject = (
        "1 run failed for good, and counts for"
        if len(failed) == 1
        else f"{counted(len(failed), 'run')} failed for good, and count for"
    )
    return (
        f"{subject} nothing: {'; '.join(descriptions)}. `forerun run {study_dir / PLAN_FILE} "
        f"--study ANOTHER --fork {study_dir}` runs the failed ones again and keeps the others"
    )


def failed_gates(ledger: Ledger, study_dir: Path) -> tuple[Gate, ...]:
    """Return the gate of the runs that failed; empty if none failed."""
    reason = failed_text(ledger, study_dir)
    return (Gate(name=RUNS_ENDED, outcome="cannot_tell", reason=reason),) if reason else ()


_ORDER = ("blows_up", "vanishes", "cannot_tell", "passes")
NUM_NAMED = 4
"""Number of layers that are named in a sentence; the table lists all."""


def beside(layer: Any) -> float:
    """Return how far a layer's slope lies outside its expected range."""
    low, high = layer["expected"]
    return float(max(low - layer["slope"], layer["slope"] - high, 0.0))


def worst_first(layers: list[Any]) -> list[Any]:
    """Return layers sorted by outcome, worst first, then by distance from the expected range."""
    return sorted(layers, key=lambda layer: (_ORDER.index(layer["outcome"]), -beside(layer)))


def by_role(check: Any) -> list[tuple[str, list[Any]]]:
    """Return each role with its layers, worst first; roles are in the order of their first
    calls.
    """
    roles: dict[str, list[Any]] = {}
    for layer in check["layers"]:
        roles.setdefault(layer["role"], []).append(layer)
    return [(role, worst_first(layers)) for role, layers in roles.items()]


def points(check: Any) -> list[int]:
    """Return the widths or depths that a check compared."""
    return list(check[f"{check['axis']}s"])


def findings(check: Any) -> list[str]:
    """Return the reasons why a check does not pass, as sentences; empty if it passes."""
    notes = list(check["mistakes"])
    if not notes and check["not_finite_step"] is not None:
        axis = check["axis"]
        notes.append(
            f"{axis} {check[f'not_finite_{axis}']} became non-finite at step "
            f"{check['not_finite_step']}"
        )
    flagged = [layer for layer in check["layers"] if layer["outcome"] != "passes"]
    for layer in worst_first(flagged)[:NUM_NAMED] if not check["mistakes"] else ():
        cause = f": {layer['cause']}" if layer["cause"] else ""
        notes.append(
            f"{layer['layer']} {layer['outcome'].replace('_', ' ')} (slope "
            f"{layer['slope']:+.2f}){cause}"
        )
    if len(flagged) > NUM_NAMED or (flagged and check["mistakes"]):
        notes.append(f"layers that do not pass: {len(flagged)} of {len(check['layers'])}")
    return notes
