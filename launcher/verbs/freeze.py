"""Verbs of the decision: freeze, report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from click.core import ParameterSource

from launcher.base.study_names import NUM_SHOWN, shown_name
from launcher.cli.names import study_argument, study_of_line
from launcher.cli.options import answer, full_option, json_option
from launcher.frozen.launch_file import format_accepted_gates
from launcher.study.gates import GateError, forecast_warnings
from proxies.core.canon import Json
from proxies.core.errors import ExitCode, InputError
from proxies.core.hyperparameters import HYPERPARAMETERS
from proxies.core.notation import counted, format_learning_rate, format_loss
from proxies.core.optimizers import RECIPES

if TYPE_CHECKING:
    from launcher.frozen.frozen import Decision, ParameterGroup
    from launcher.study.gates import Gate
    from sweeps.store.ledger import Ledger

GATES = ("coordinates", "transfer", "fit", "data", "ladder_tuned", "replays_agree", "runs_ended")
MOST_REASON = 2000
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
    help="Freeze even though this gate is closed.",
)
@click.option("--reason", default="", help="Why you accept it; recorded and shown with the config.")
@full_option
@json_option
def freeze(
    study_dir: Path, accepts: tuple[str, ...], reason: str, full: bool, as_json: bool
) -> None:
    """Write the frozen launch config of STUDY. Exit 3 if a gate failed, 4 if one cannot tell,
    unless accepted.
    """
    from launcher.base.talk import say
    from launcher.calibration.procedure import calibrated
    from launcher.explanations.context import known_of
    from launcher.explanations.provenance import records_of
    from launcher.explanations.record import packed
    from launcher.frozen.frozen_folder import write_frozen
    from launcher.rehearsal.status import rehearsal_of
    from launcher.report.about import about, next_line
    from launcher.report.body import FINDING, accepted, body_and_next
    from launcher.report.page import write_report
    from launcher.study.evidence import decision_of, gather
    from launcher.study.next_runs import next_runs
    from launcher.study.study_folder import open_ledger, recorded_study
    from launcher.trainer.assembly import unfit
    from sweeps.store.ledger import Ledger
    from sweeps.store.live import read_live

    check_reason(accepts, reason)
    Ledger.read(study_dir)  # refuses a folder that holds no study, before anything is written
    study = recorded_study(study_dir)
    with open_ledger(study) as ledger:
        study = calibrated(study, ledger)
        say(FINDING)
        found = gather(study, ledger)
        _check_accepts(
            found.gates, accepts, study.command_line("run"), ended=found.choice is not None
        )
        # `run` stopped at these gates, and continues once they are accepted.
        if accepts and found.choice is None:
            _record(ledger, study_dir, found.gates, accepts, reason.strip())
        decision = decision_of(study, found)
        _check_layout(decision)
        given = {**accepted(ledger, found.gates), **dict.fromkeys(accepts, reason.strip())}
        _refuse(found.gates, given, study_dir, lambda: next_runs(study, ledger, found, given))
        _record(ledger, study_dir, found.gates, accepts, reason.strip())
        body, after = body_and_next(study, ledger, found)  # computed anew, whatever is cached
        evidence: dict[str, Json] = {
            key: body[key] for key in ("gates", "accepted", "spend", "ledger_head")
        }
        evidence["run_ids"] = cast(list[Json], sorted(ledger.results()))
        evidence["transfer"], evidence["fit"] = body["transfer"], body["fit"]
        attested = {
            "evidence": evidence,
            "environment": _environment(),
            "provenance": packed(records_of(known_of(study, found, decision, body))),
        }
        path = write_frozen(study_dir / "frozen", decision, attested)
        write_report(study_dir, body, about(study, ledger, body, after, read_live(study_dir)))
    doubts = forecast_warnings(found.gates)
    lines = _decision_lines(decision, path, doubts, full=full)
    lines += [f"  {line}" for line in format_accepted_gates(found.gates, given)]
    standing = rehearsal_of(path.parent, decision.digest)
    after_this = next_line(body, after, study_dir)
    # The embedded trainer cannot run this config.
    if decision.own is None and decision.model is None and unfit(decision):
        after_this = f"next: forerun export {shown_name(path)} --to torchtitan"
    lines += [standing.sentence, after_this]
    # Rule that carries the warmup over duration
    carried = (row["carry"] for row in cast(Any, body["transfer"])["values"])
    told: dict[str, Json] = {
        "digest": decision.digest,
        "path": str(path),
        "accepted": cast(Json, given),
        "rehearsed": standing.body,
        "warnings": [*doubts],
        "ties": cast(Any, body["search"])["ties"],
        "warmup": next(filter(None, carried), None),
    }
    answer(as_json, told, "\n".join(lines))


def check_reason(accepts: tuple[str, ...], reason: str) -> None:
    """Refuse `--accept` without a reason, and a reason that cannot be kept."""
    from proxies.core.redaction import secret_in

    if bool(accepts) != bool(reason.strip()):
        raise click.UsageError("--accept GATE and --reason TEXT go together")
    if len(reason) > MOST_REASON:
        raise click.UsageError(
            f"--reason: {counted(len(reason), 'character')}; the limit is {MOST_REASON}: name a "
            "document"
        )
    if said := secret_in(reason):
        raise click.UsageError(
            f"--reason holds what looks like {said}: it would be recorded and shown: leave it out"
        )


def _check_layout(decision: Decision) -> None:
    """Check that the decision's parallel degrees divide its shape and its batch.

    Raises:
        LayoutError: They do not.
    """
    from launcher.estimates.layout import LayoutError, layout_problems

    if problems := layout_problems(decision.parallelism, decision.shape, decision.batch_tokens):
        raise LayoutError(problems)


def _environment() -> dict[str, Json]:
    """Return the versions of the software with which the config is frozen."""
    import importlib.metadata
    import platform

    names = ("forerun", "torch", "numpy", "scipy", "optuna", "ray", "mup")
    versions: dict[str, Json] = {name: importlib.metadata.version(name) for name in names}
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "versions": versions,
    }


def _check_accepts(
    gates: tuple[Gate, ...], accepts: tuple[str, ...], resume: str, *, ended: bool
) -> None:
    unknown = [name for name in accepts if name not in {gate.name for gate in gates}]
    if unknown and not ended:
        raise click.UsageError(
            f"--accept {', '.join(unknown)}: before the study has ended, only gates that failed "
            "can be accepted; "
            f"`{resume}` continues the study"
        )
    passed = {gate.name for gate in gates if gate.outcome == "passed"}
    if idle := [name for name in accepts if name in passed]:
        raise click.UsageError(
            f"--accept {', '.join(idle)}: the gate passed, there is nothing to accept"
        )


def _record(
    ledger: Ledger, study_dir: Path, gates: tuple[Gate, ...], accepts: tuple[str, ...], reason: str
) -> None:
    """Record that a person accepts the outcome of these gates. This accepts only the present
    outcome and reason, not later ones.

    The ledger keeps what is accepted; the event log also keeps who accepted it, and when.
    """
    from launcher.base import chronicle
    from launcher.logbook.logbook import author

    by_name = {gate.name: gate for gate in gates}
    for name in dict.fromkeys(accepts):
        gate = by_name[name]
        body = {"gate": name, "outcome": gate.outcome, "found": gate.reason, "reason": reason}
        key = f"{name}/{len(ledger.records('accepted'))}"
        ledger.append("accepted", key, body)
        text = f"gate {name}, which {gate.outcome.replace('_', ' ')}: {reason}"
        chronicle.record(study_dir, "accepted", text, data={"author": author(), "record": key})


def _refuse(
    gates: tuple[Gate, ...],
    given: dict[str, Json],
    study_dir: Path,
    deciding: Callable[[], dict[str, Json] | None],
) -> None:
    """Check that every gate passed or is accepted.

    Args:
        gates: All gates.
        given: Reasons by name of accepted gates.
        study_dir: Folder of the study.
        deciding: Returns the runs that would decide gates that cannot tell.

    Raises:
        GateError, CannotTellError: Some gates are closed.
    """
    from launcher.answers.outcome import decide_line

    closed = [gate for gate in gates if gate.outcome != "passed" and gate.name not in given]
    if not closed:
        return
    after = deciding()
    if after is not None and not {gate.name for gate in closed} & set(
        cast(list[str], after["gates"])
    ):
        after = None
    outcomes = ", ".join(f"{gate.name} {gate.outcome.replace('_', ' ')}" for gate in closed)
    lines = [
        f"not frozen: gate{'s' * (len(closed) > 1)} {outcomes}",
        decide_line(after, study_dir, closed),
    ]
    lines += [
        f"gate {gate.name} {gate.outcome.replace('_', ' ')}: {gate.reason}" for gate in closed
    ]
    accept = " ".join(f"--accept {gate.name}" for gate in closed)
    failed = any(gate.outcome == "failed" for gate in closed)
    first = "fix what failed" if failed else "decide what cannot tell"
    lines.append(f"{first}, or freeze anyway: forerun freeze {study_dir} {accept} --reason TEXT")
    raise (GateError if failed else CannotTellError)("\n".join(filter(None, lines)))


def _start(group: ParameterGroup) -> str:
    return {"gain": "1", "bias": "0"}.get(group.kind[-4:], f"std {group.init_std:.4g}")


def _decision_lines(
    decision: Decision, path: Path, doubts: tuple[str, ...], *, full: bool
) -> list[str]:
    """Return lines for people: the decision in one sentence, its path, how it trains, and with
    `full` every group of parameters.
    """
    shape, schedule, predicted = decision.shape, decision.learning_rate.schedule, decision.predicted
    own = decision.own
    main = RECIPES[decision.optimizer].main.name
    rated = [g for g in decision.groups if g.optimizer == main] or decision.groups
    rate = max(g.learning_rate for g in rated) if own is None else cast(float, own.values["lr"])
    return [
        (
            f"frozen {decision.digest[:NUM_SHOWN]}: learning rate {format_learning_rate(rate)}, "
            f"width {shape.width}, "
            f"{counted(shape.num_layers, 'layer')}, expected loss "
            f"{format_loss(predicted.loss_nats)} nats "
            f"[{predicted.low_nats:.4f}, {predicted.high_nats:.4f}] at level {predicted.level:g}"
        ),
        f"  {path}",
        (
            f"  {counted(schedule.num_steps, 'step')} of {decision.batch_tokens} tokens, "
            f"{schedule.kind}, warmup "
            f"{counted(schedule.warmup_steps, 'step')}, "
            + ", ".join(
                f"{HYPERPARAMETERS[name].short or name} {value}"
                for name, value in decision.run_wide.items()
            )
        ),
        *(
            []
            if own is None
            else ["  your own trainer gets " + ", ".join(f"{k}={v}" for k, v in own.named.items())]
        ),
        *(
            f"  {g.kind}: lr {format_learning_rate(g.learning_rate)}, init {_start(g)}"
            for g in decision.groups
            if full
        ),
        *(f"  {sentence}" for sentence in doubts),
    ]


@click.command()
@study_argument
@click.option(
    "--compare",
    "compared",
    nargs=2,
    type=click.Path(path_type=Path),
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

    With --compare A B: compare.html and compare.json, which say what differs between two studies,
    with intervals.
    """
    if compared is not None:
        if context.get_parameter_source(
            "study_dir"
        ) is ParameterSource.COMMANDLINE or study_of_line(context):
            raise click.UsageError(f"--compare names both studies; leave out STUDY {study_dir}")
        _compare(compared, out or Path(), as_json)
        return
    if out is not None:
        raise click.UsageError(
            "--out works only with --compare A B: a study's report is written to its own folder"
        )
    body, following = write_current_report(study_dir)
    answer(
        as_json,
        body,
        f"wrote {study_dir / 'report.html'} and {study_dir / 'report.json'}\n{following}",
    )


def write_current_report(study_dir: Path) -> tuple[dict[str, Json], str]:
    """Write the report of a study as it is now. Return its data, and the line with the next
    step.
    """
    from launcher.base.talk import say
    from launcher.frozen.frozen_folder import edited
    from launcher.report.about import about, next_line
    from launcher.report.body import body_and_next
    from launcher.report.page import write_report
    from launcher.study.study_folder import recorded
    from sweeps.store.live import read_live
    from sweeps.store.lock import is_held

    live = read_live(study_dir)
    study, ledger = recorded(study_dir)
    for problem in edited(study_dir):
        say(f"forerun: {problem}")
    body, after = body_and_next(study, ledger)
    at_work = is_held(study_dir) is not False
    write_report(study_dir, body, about(study, ledger, body, after, live, at_work=at_work))
    return body, next_line(body, after, study_dir, at_work=at_work)


def rewrite_report(study_dir: Path) -> None:
    """Update a report that was written before. If the report cannot be made now, print a
    warning.
    """
    from launcher.base.talk import say

    if not (study_dir / "report.html").is_file():
        return
    try:
        write_current_report(study_dir)
    except Exception as error:  # the main run has ended, whatever is wrong with the study's records
        say(f"warning: {study_dir / 'report.html'} is as it was before the main run: {error}")


def _compare(compared: tuple[Path, Path], out: Path, as_json: bool) -> None:
    """Compare two studies, or their reports."""
    from launcher.report.compare import compare_body, read_two
    from launcher.report.page import write_comparison

    body = compare_body(*read_two(*compared), (compared[0].name, compared[1].name))
    write_comparison(out, body)
    lines = [f"A: {compared[0]}", f"B: {compared[1]}", *cast(list[str], body["summary"])]
    answer(
        as_json,
        body,
        "\n".join([*lines, f"wrote {out / 'compare.html'} and {out / 'compare.json'}"]),
    )
