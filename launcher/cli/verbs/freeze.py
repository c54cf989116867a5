"""Verbs that freeze the decision and write the report: freeze, report.

`launch` uses `check_reason` and `rewrite_report`.
"""

from __future__ import annotations

import importlib.metadata
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import click
from click.core import ParameterSource

from forerun._launcher.cli.names import get_study_option, study_argument
from forerun._launcher.cli.options import PATH, full_option, json_option, print_result
from forerun._launcher.main_run import event_log
from forerun._launcher.main_run.estimates.layout import LayoutError, find_layout_problems
from forerun._launcher.main_run.frozen.config_names import NUM_SHOWN, shorten_config_name
from forerun._launcher.main_run.frozen.frozen import Decision, ParameterGroup
from forerun._launcher.main_run.frozen.frozen_folder import find_edited, write_frozen
from forerun._launcher.main_run.frozen.launch_file import format_acceptance
from forerun._launcher.main_run.logbook.logbook import get_author
from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.main_run.rehearsal.status import read_rehearsal_status
from forerun._launcher.report.explanations.field_provenance import pack_records
from forerun._launcher.report.views.wording import to_words
from forerun._launcher.study.stages.gates import Gate, GateError, build_forecast_warnings
from forerun._proxies.core.canon import Json
from forerun._proxies.core.errors import ExitCode, InputError
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS
from forerun._proxies.core.notation import format_counted, format_learning_rate, format_loss
from forerun._proxies.core.optimizers import RECIPES
from forerun._proxies.core.redaction import find_secret
from forerun._sweeps.store.ledger import Ledger
from forerun._sweeps.store.live_state import read_live
from forerun._sweeps.store.lock import is_held

if TYPE_CHECKING:
    from forerun._launcher.report.views.report_model import Report
    from forerun._launcher.study.plan.study import Study
    from forerun._launcher.study.stages.next_runs import NextRuns
    from forerun._launcher.study.stages.study_findings import StudyFindings

GATES = ("coordinates", "transfer", "fit", "data", "ladder_tuned", "replays_agree", "runs_ended")
"""Names of all gates, as choices of `--accept`. `forerun._launcher.study.stages.gates` has no list
of them; a test compares these names with the gates of a study.
"""
MAX_REASON = 2000
"""Maximum number of characters of a reason, which is shown in full wherever the config is."""


class CannotTellError(InputError):
    """A gate could not be decided, and nobody accepted that."""

    exit_code = ExitCode.CANNOT_TELL


@click.command()
@study_argument
@click.option(
    "--accept",
    "accepts",
    multiple=True,
    type=click.Choice(GATES),
    help="Freeze although this gate did not pass; repeatable, and needs --reason.",
)
@click.option("--reason", default="", help="Why you accept it; recorded and shown with the config.")
@full_option
@json_option
def freeze(
    study_dir: Path, accepts: tuple[str, ...], reason: str, full: bool, as_json: bool
) -> None:
    """Write the frozen launch config of STUDY, and its report.

    It needs a study whose stages have ended. The config goes to frozen/DIGEST/ in the study. Exit 3
    if a gate failed, 4 if one cannot tell, unless --accept names it.
    """
    from forerun._launcher.report.page.report_builder import PROGRESS_LABEL
    from forerun._launcher.study.calibration.procedure import apply_calibrations
    from forerun._launcher.study.stages.study_findings import gather_findings
    from forerun._launcher.study.stages.study_folder import open_ledger, read_recorded_study

    check_reason(accepts, reason)
    acceptance = Acceptance(tuple(dict.fromkeys(accepts)), reason.strip())
    Ledger.read(study_dir)  # refuses a folder that holds no study, before anything is written
    study = read_recorded_study(study_dir)
    with open_ledger(study) as ledger:
        study = apply_calibrations(study, ledger)
        print_progress(PROGRESS_LABEL)
        frozen = _freeze_study(study, ledger, gather_findings(study, ledger), acceptance)
    standing = read_rehearsal_status(frozen.path.parent, frozen.decision.digest)
    report = frozen.report
    assert report.transfer is not None and report.search is not None
    carried = (value.carry for value in report.transfer.values)
    doubts = build_forecast_warnings(frozen.gates)
    body: dict[str, Json] = {
        "digest": frozen.decision.digest,
        "path": str(frozen.path),
        "accepted": cast(Json, frozen.accepted),
        "rehearsed": standing.body,
        "warnings": [*doubts],
        "ties": [tie.to_json() for tie in report.search.ties],
        "warmup": next(filter(None, carried), None),
    }
    lines = [
        *_format_decision(frozen.decision, frozen.path, doubts, full=full),
        *(
            "  "
            + format_acceptance(
                gate.name, frozen.accepted[gate.name], failed=gate.outcome == "failed"
            )
            for gate in frozen.gates
            if gate.name in frozen.accepted
        ),
        standing.sentence,
        _suggest_next(frozen, study_dir),
    ]
    print_result(as_json, body, "\n".join(lines))


class Acceptance(NamedTuple):
    """Gates that a person accepts although they did not pass, and the reason."""

    gates: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class FrozenStudy:
    """A decision that was frozen, and the findings on which it is based."""

    decision: Decision
    path: Path
    """Path of `launch.json`."""
    gates: tuple[Gate, ...]
    accepted: dict[str, str]
    """Reasons by name of accepted gates."""
    report: Report
    next_runs: NextRuns | None
    """Runs that would decide the gates that cannot tell."""


def _freeze_study(
    study: Study, ledger: Ledger, findings: StudyFindings, acceptance: Acceptance
) -> FrozenStudy:
    """Write the config and the report, if every gate passed or is accepted.

    Raises:
        GateError, CannotTellError: Some gates did not pass, and nobody accepted them.
        LayoutError: The decision's parallel degrees do not divide its shape and its batch.
    """
    from forerun._launcher.report.explanations.context import collect_context
    from forerun._launcher.report.explanations.provenance import build_provenance
    from forerun._launcher.report.page.header import build_header
    from forerun._launcher.report.page.page import write_report
    from forerun._launcher.report.page.report_builder import (
        build_report_and_next_runs,
        list_accepted_gates,
    )
    from forerun._launcher.study.stages.next_runs import find_next_runs
    from forerun._launcher.study.stages.study_findings import build_decision_from_findings

    gates, study_dir = findings.gates, study.study_dir
    has_ended = findings.choice is not None
    _check_accepts(gates, acceptance.gates, study.format_command("run"), has_ended=has_ended)
    # `run` stopped at these gates, and continues once they are accepted.
    if not has_ended:
        _record_acceptance(ledger, study_dir, gates, acceptance)
    decision = build_decision_from_findings(study, findings)
    if problems := find_layout_problems(
        decision.parallelism, decision.shape, decision.batch_tokens
    ):
        raise LayoutError(problems)
    reasons = {
        **list_accepted_gates(ledger, gates),
        **dict.fromkeys(acceptance.gates, acceptance.reason),
    }
    unsettled = [gate for gate in gates if gate.outcome != "passed" and gate.name not in reasons]
    if unsettled:
        next_runs = find_next_runs(study, ledger, findings, reasons)
        raise _build_refusal(unsettled, next_runs, study_dir)
    _record_acceptance(ledger, study_dir, gates, acceptance)
    # With the findings given, the report is built anew and not read from the cache.
    report, next_runs = build_report_and_next_runs(study, ledger, findings)
    keys = {"gates", "accepted", "spend", "ledger_head", "transfer", "fit"}
    evidence: dict[str, Json] = report.model_dump(include=keys, exclude_unset=True)
    attested = {
        "evidence": {**evidence, "run_ids": cast(list[Json], sorted(ledger.get_results()))},
        "environment": _list_versions(),
        "provenance": pack_records(
            build_provenance(collect_context(study, findings, decision, report))
        ),
    }
    path = write_frozen(study_dir / "frozen", decision, attested)
    write_report(
        study_dir, report, build_header(study, ledger, report, next_runs, read_live(study_dir))
    )
    return FrozenStudy(decision, path, gates, reasons, report, next_runs)


def _suggest_next(frozen: FrozenStudy, study_dir: Path) -> str:
    """Return the line with the next command: an export, if the embedded trainer cannot run the
    config.
    """
    from forerun._launcher.main_run.trainer.inputs import find_reasons_to_refuse
    from forerun._launcher.report.page.header import format_next_line

    decision = frozen.decision
    if decision.own is None and decision.model is None and find_reasons_to_refuse(decision):
        return f"next: forerun export {shorten_config_name(frozen.path)} --to torchtitan"
    return format_next_line(frozen.report, frozen.next_runs, study_dir)


def check_reason(accepts: tuple[str, ...], reason: str) -> None:
    """Refuse `--accept` without a reason, and a reason that cannot be kept."""
    if bool(accepts) != bool(reason.strip()):
        raise click.UsageError("--accept GATE and --reason TEXT go together")
    if len(reason) > MAX_REASON:
        raise click.UsageError(
            f"--reason: {format_counted(len(reason), 'character')}; the limit is {MAX_REASON}: "
            "name a document"
        )
    if secret := find_secret(reason):
        raise click.UsageError(
            f"--reason seems to contain a secret ({secret}). Remove it: reasons are recorded and "
            "shown"
        )


def _list_versions() -> dict[str, Json]:
    """Return the versions of Python and the libraries with which the config is frozen."""
    names = ("forerun", "torch", "numpy", "scipy", "optuna", "ray", "mup")
    versions: dict[str, Json] = {name: importlib.metadata.version(name) for name in names}
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": versions,
    }


def _check_accepts(
    gates: tuple[Gate, ...], accepts: tuple[str, ...], resume: str, *, has_ended: bool
) -> None:
    """Refuse to accept a gate that passed, or that the study has not come to.

    Raises:
        click.UsageError: `--accept` names such a gate.
    """
    outcomes = {gate.name: gate.outcome for gate in gates}
    unknown = [name for name in accepts if name not in outcomes]
    if unknown and not has_ended:
        raise click.UsageError(
            f"--accept {', '.join(unknown)}: before the study has ended, only gates that failed "
            f"can be accepted; `{resume}` continues the study"
        )
    if passed := [name for name in accepts if outcomes.get(name) == "passed"]:
        raise click.UsageError(
            f"--accept {', '.join(passed)}: the gate passed, there is nothing to accept"
        )


def _record_acceptance(
    ledger: Ledger, study_dir: Path, gates: tuple[Gate, ...], acceptance: Acceptance
) -> None:
    """Record that a person accepts the outcome of these gates. The acceptance holds only for the
    present outcome and reason of a gate, not for later ones.

    The ledger keeps what is accepted. The event log also keeps who accepted it, and when.
    """
    reason, gates_by_name = acceptance.reason, {gate.name: gate for gate in gates}
    for name in acceptance.gates:
        gate = gates_by_name[name]
        body = {"gate": name, "outcome": gate.outcome, "found": gate.reason, "reason": reason}
        key = f"{name}/{len(ledger.read_records('accepted'))}"
        ledger.append("accepted", key, body)
        text = f"gate {name}, which {to_words(gate.outcome)}: {reason}"
        event_log.append_event(
            study_dir, "accepted", text, data={"author": get_author(), "record": key}
        )


def _build_refusal(
    unsettled: list[Gate], next_runs: NextRuns | None, study_dir: Path
) -> GateError | CannotTellError:
    """Return the error that names the gates that did not pass, and what would settle them.

    Args:
        unsettled: Gates that did not pass and that nobody accepted.
        next_runs: Runs that would decide gates that cannot tell.
        study_dir: Folder of the study.
    """
    from forerun._launcher.report.answers.outcome import format_next_decision

    names = {gate.name for gate in unsettled}
    if next_runs is not None and names.isdisjoint(next_runs.gates):
        next_runs = None
    outcomes = ", ".join(f"{gate.name} {to_words(gate.outcome)}" for gate in unsettled)
    accepts = " ".join(f"--accept {gate.name}" for gate in unsettled)
    has_failed = any(gate.outcome == "failed" for gate in unsettled)
    advice = "fix what failed" if has_failed else "decide what cannot tell"
    lines = [
        f"not frozen: gate{'s' * (len(unsettled) > 1)} {outcomes}",
        format_next_decision(next_runs, study_dir, unsettled),
        *(f"gate {gate.name} {to_words(gate.outcome)}: {gate.reason}" for gate in unsettled),
        f"{advice}, or freeze anyway: forerun freeze {study_dir} {accepts} --reason TEXT",
    ]
    return (GateError if has_failed else CannotTellError)("\n".join(filter(None, lines)))


def _format_decision(
    decision: Decision, path: Path, doubts: tuple[str, ...], *, full: bool
) -> list[str]:
    """Return lines for people: the decision in one sentence, its path, its schedule and settings,
    with `full` every group of parameters, and the doubts about the forecast.
    """
    shape, schedule, predicted = decision.shape, decision.learning_rate.schedule, decision.predicted
    if decision.own is None:
        main = RECIPES[decision.optimizer].main.name
        main_groups = [group for group in decision.groups if group.optimizer == main]
        rate = max(group.learning_rate for group in main_groups or decision.groups)
    else:
        rate = cast(float, decision.own.values["lr"])
    run_wide = ", ".join(
        f"{HYPERPARAMETERS[name].short or name} {value}"
        for name, value in decision.run_wide.items()
    )
    lines = [
        (
            f"frozen {decision.digest[:NUM_SHOWN]}: learning rate {format_learning_rate(rate)}, "
            f"width {shape.width}, {format_counted(shape.num_layers, 'layer')}, expected loss "
            f"{format_loss(predicted.loss_nats)} nats "
            f"[{predicted.low_nats:.4f}, {predicted.high_nats:.4f}] at level {predicted.level:g}"
        ),
        f"  {path}",
        (
            f"  {format_counted(schedule.num_steps, 'step')} of {decision.batch_tokens} tokens, "
            f"{schedule.kind}, warmup {format_counted(schedule.warmup_steps, 'step')}, {run_wide}"
        ),
    ]
    if decision.own is not None:
        values = ", ".join(f"{name}={value}" for name, value in decision.own.named.items())
        lines.append(f"  your own trainer gets {values}")
    if full:
        lines += [
            f"  {group.kind}: lr {format_learning_rate(group.learning_rate)}, init "
            f"{_format_init(group)}"
            for group in decision.groups
        ]
    return [*lines, *(f"  {sentence}" for sentence in doubts)]


def _format_init(group: ParameterGroup) -> str:
    """Format the initial values of a group: a kind that ends in `gain` or `bias` has constants."""
    return {"gain": "1", "bias": "0"}.get(group.kind[-4:], f"std {group.init_std:.4g}")


@click.command()
@study_argument
@click.option(
    "--compare",
    "compared",
    nargs=2,
    type=PATH,
    metavar="A B",
    help="Compare two studies instead, by their last report.json.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for compare.html and compare.json. Default: the current one.",
)
@json_option
@click.pass_context
def report(
    context: click.Context,
    study_dir: Path,
    compared: tuple[Path, Path] | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Write report.html and report.json of STUDY, as far as it has come; works while a driver runs.

    With --compare A B, write compare.html and compare.json, which show what differs between two
    studies, with intervals.
    """
    if compared is None:
        if out is not None:
            raise click.UsageError(
                "--out works only with --compare A B: a study's report is written to its own folder"
            )
        body, following = write_current_report(study_dir)
        files = f"{study_dir / 'report.html'} and {study_dir / 'report.json'}"
        print_result(as_json, body, f"wrote {files}\n{following}")
        return
    from forerun._launcher.report.page.compare import compare_reports, read_reports
    from forerun._launcher.report.page.page import write_comparison

    is_typed = context.get_parameter_source("study_dir") is ParameterSource.COMMANDLINE
    if is_typed or get_study_option(context):
        raise click.UsageError(f"--compare names both studies; leave out STUDY {study_dir}")
    folder = out or Path()
    comparison = compare_reports(*read_reports(*compared), (compared[0].name, compared[1].name))
    write_comparison(folder, comparison)
    lines = [
        f"A: {compared[0]}",
        f"B: {compared[1]}",
        *comparison.summary,
        f"wrote {folder / 'compare.html'} and {folder / 'compare.json'}",
    ]
    print_result(as_json, comparison.to_json(), "\n".join(lines))


def write_current_report(study_dir: Path) -> tuple[dict[str, Json], str]:
    """Write the report of a study as it is now. Return it as JSON, and the line with the next
    step.
    """
    from forerun._launcher.report.page.header import build_header, format_next_line
    from forerun._launcher.report.page.page import write_report
    from forerun._launcher.report.page.report_builder import build_report_and_next_runs
    from forerun._launcher.study.stages.study_folder import open_recorded_study

    live = read_live(study_dir)
    study, ledger = open_recorded_study(study_dir)
    for problem in find_edited(study_dir):
        print_progress(f"forerun: {problem}")
    report, next_runs = build_report_and_next_runs(study, ledger)
    at_work = is_held(study_dir) is not False
    write_report(
        study_dir, report, build_header(study, ledger, report, next_runs, live, at_work=at_work)
    )
    return report.to_json(), format_next_line(report, next_runs, study_dir, at_work=at_work)


def rewrite_report(study_dir: Path) -> None:
    """Update a report that was written before. If the report cannot be made now, print a
    warning.
    """
    page = study_dir / "report.html"
    if not page.is_file():
        return
    try:
        write_current_report(study_dir)
    except Exception as error:  # the main run has ended, whatever is wrong with the study's records
        print_progress(f"warning: {page} is as it was before the main run: {error}")
