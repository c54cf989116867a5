"""The verb that trains the main run: launch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

import click

from forerun._launcher.cli.frozen_config import (
    find_config_folder,
    find_corpus,
    find_user_code,
    read_sound_config,
)
from forerun._launcher.cli.names import frozen_argument
from forerun._launcher.cli.options import (
    PATH,
    get_typed_options,
    json_option,
    print_result,
    refuse_options,
    write_job,
)
from forerun._launcher.cli.verbs.freeze import check_reason, rewrite_report
from forerun._launcher.main_run import event_log
from forerun._launcher.main_run.frozen.config_checks import accept_problems
from forerun._launcher.main_run.frozen.config_names import shorten_config_name
from forerun._launcher.main_run.frozen.frozen import Decision, OwnTrainer
from forerun._launcher.main_run.frozen.frozen_folder import check_files, find_study
from forerun._launcher.main_run.frozen.launch_file import (
    CHECKS,
    RUN_FILE,
    attest,
    format_accepted_failures,
    name_accepted_failures,
    read_launch,
)
from forerun._launcher.main_run.logbook.logbook import get_author, write_logbook
from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.main_run.rehearsal.status import read_rehearsal_status
from forerun._launcher.main_run.supervisor.attempt import Signals, listen_to_signals
from forerun._launcher.main_run.supervisor.hang_detector import START_SECONDS, SilenceLimits
from forerun._launcher.main_run.supervisor.launch import LaunchOutcome, Nodes, format_launch_line
from forerun._launcher.main_run.supervisor.launch import launch as start_job
from forerun._launcher.main_run.supervisor.slurm import format_launch_script
from forerun._launcher.main_run.supervisor.user_launch import (
    UserRunFolders,
    build_command_words,
    launch_user_trainer,
)
from forerun._launcher.main_run.wandb_client import Mode
from forerun._launcher.report.answers.option_problems import OptionProblems
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_counted, format_loss

if TYPE_CHECKING:
    from forerun._launcher.report.dashboards.log_sink import LogSink, SinkOutcome

_ENDPOINT = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
"""HOST:PORT, where HOST is a name, an IPv4 address, or an IPv6 address in brackets."""
_EXPORT_OPTIONS = {"study", "data_dir", "dry_run", "trainer", "accepts", "reason", "as_json"}
"""Parameter names of the options that have an effect with `--trainer`."""
_USER_TRAINER_OPTIONS = (_EXPORT_OPTIONS - {"trainer"}) | {
    "out_dir",
    "max_restarts",
    "hang_seconds",
}
"""Parameter names of the options that also apply to a user's own trainer."""


@click.command()
@frozen_argument
@click.option("--data", "data_dir", type=PATH, help="Corpus folder; default: the study's.")
@click.option("--out", "out_dir", type=PATH, help="Run folder; default: run/ beside the config.")
@click.option(
    "--steps",
    "stop_after",
    type=click.IntRange(min=1),
    help="Save and stop after this step of the run.",
)
@click.option("--dry-run", is_flag=True, help="Print the exact launch line and stop.")
@click.option("--trainer", help="Print the launch line of this export beside the config instead.")
@click.option(
    "--max-restarts",
    type=click.IntRange(0, 1000),
    default=3,
    show_default=True,
    help="Maximum number of restarts in a row when the job dies; a new checkpoint resets it.",
)
@click.option(
    "--hang-seconds",
    type=click.IntRange(0, 10**6),
    default=600,
    show_default=True,
    help="Restart a job that logs nothing for this long and for 20 median steps; 0: never.",
)
@click.option(
    "--nnodes",
    "num_nodes",
    type=click.IntRange(1, 10**5),
    default=1,
    show_default=True,
    help="Number of machines; run the same command on each, with its own --node-rank.",
)
@click.option(
    "--node-rank",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="This machine, from 0.",
)
@click.option(
    "--rdzv-endpoint", "endpoint", metavar="HOST:PORT", help="A free port of the first machine."
)
@click.option(
    "--srun",
    is_flag=True,
    help="In a SLURM job: this one command starts the ranks on all its nodes.",
)
@click.option(
    "--sbatch",
    "sbatch_file",
    metavar="FILE",
    type=PATH,
    help="Write this command as a SLURM job; run nothing.",
)
@click.option(
    "--wandb", type=click.Choice(get_args(Mode)), help="Log the metrics to a W&B run too."
)
@click.option(
    "--accept",
    "accepts",
    multiple=True,
    type=click.Choice(CHECKS),
    help="Use the config although this check refuses it; needs --reason.",
)
@click.option("--reason", default="", help="Why you accept it; recorded beside the config.")
@json_option
def launch(
    frozen: Path,
    data_dir: Path | None,
    out_dir: Path | None,
    dry_run: bool,
    trainer: str | None,
    accepts: tuple[str, ...],
    reason: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Train a FROZEN config with the embedded trainer under torchrun, or print the launch line of
    an exported one.

    It needs the corpus, and writes the run to --out. It resumes from the newest good checkpoint,
    and restarts a job that dies or hangs. Ctrl-C saves and ends, a second Ctrl-C ends at once. Exit
    3: the run stopped itself, by its limits; 130: interrupted, the same command resumes.
    """
    _check_export_options(trainer)
    _record_acceptance(frozen, accepts, reason)
    decision, folder = read_sound_config(frozen)
    if decision.own is not None:
        job = _prepare_own_job(decision, decision.own, folder, click.get_current_context())
    else:
        from forerun._launcher.main_run.trainer.inputs import find_reasons_to_refuse

        corpus = find_corpus(folder, data_dir)
        reasons = find_reasons_to_refuse(decision)
        if reasons or trainer is not None:
            print_result(as_json, *_find_export_line(folder, decision, corpus, trainer, reasons))
            return
        job = _prepare_job(frozen, decision, corpus, out_dir or folder / "run", options)
        if path := options["sbatch_file"]:
            write_job(path, _format_script(frozen, job, corpus, options), as_json)
            return
    standing = read_rehearsal_status(folder, decision.digest)
    failures = format_accepted_failures(folder, decision.digest)
    for sentence in (standing.sentence, *failures):
        print_progress(f"forerun: {sentence}")
    if dry_run:
        print_result(as_json, {"line": job.line, "rehearsed": standing.body}, job.line)
        return
    mirror = None if options["node_rank"] else _open_mirror(job, decision, folder, options["wandb"])
    signals = Signals()
    with listen_to_signals(signals.receive):  # until the answer is printed: no signal may lose it
        outcome = job.start(signals, mirror)
        if not options["node_rank"]:  # the first machine mirrors and records the run for all
            _record_launch(folder, decision, outcome, job.line)
        mirror_outcome = mirror.outcome if mirror else None
        body = cast(dict[str, Json], canon.to_json(outcome)) | {
            "out": str(job.run_dir),
            "rehearsed": standing.body,
            "wandb": canon.to_json(mirror_outcome),
        }
        lines = [_format_outcome(decision, outcome, mirror_outcome), *failures]
        lines += _suggest_next(outcome, shorten_config_name(frozen), out_dir)
        print_result(as_json, body, "\n".join(lines))
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)


def _check_export_options(trainer: str | None) -> None:
    """Refuse options that have no effect if `--trainer` names an export."""
    if trainer is not None:
        typed = get_typed_options(click.get_current_context())
        refuse_options(typed, typed.keys() - _EXPORT_OPTIONS, "without --trainer")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job that is ready to start."""

    line: str
    """The exact launch line."""
    run_dir: Path
    start: Callable[[Signals, LogSink | None], LaunchOutcome]
    """Function that runs the job to its end. It takes the signals that end the job in order, and
    the mirror that logs the run to W&B.
    """


def _prepare_job(
    frozen: Path, decision: Decision, corpus: Path, run_dir: Path, options: dict[str, Any]
) -> Job:
    """Prepare a run of the embedded trainer.

    Raises:
        OptionProblems: Options for machines contradict each other.
    """
    endpoint, stop_after = options["endpoint"], options["stop_after"]
    nodes = Nodes(
        num_nodes=options["num_nodes"],
        rank=options["node_rank"],
        rendezvous=endpoint or Nodes().rendezvous,
        srun=options["srun"],
    )
    needs_endpoint = nodes.num_nodes > 1 and options["sbatch_file"] is None
    _check_nodes(decision, nodes, endpoint, needs_endpoint=needs_endpoint)
    code_dir = find_user_code(find_config_folder(frozen), decision)

    def start(signals: Signals, mirror: LogSink | None) -> LaunchOutcome:
        return start_job(
            frozen,
            corpus,
            run_dir,
            stop_after,
            options["max_restarts"],
            nodes=nodes,
            limits=_choose_limits(options["hang_seconds"]),
            beside=mirror,
            signals=signals,
            code_dir=code_dir,
        )

    line = format_launch_line(frozen, corpus, run_dir, stop_after, nodes, code_dir)
    return Job(line=line, run_dir=run_dir, start=start)


def _open_mirror(job: Job, decision: Decision, folder: Path, mode: Mode | None) -> LogSink | None:
    """Return a mirror of the run in W&B, which names the gates that failed and were accepted."""
    from forerun._launcher.report.dashboards.log_sink import LogSink

    if mode is None:
        return None
    return LogSink(job.run_dir, decision, mode, name_accepted_failures(folder, decision.digest))


def _prepare_own_job(
    decision: Decision, own: OwnTrainer, folder: Path, context: click.Context
) -> Job:
    """Prepare a run of the user's own trainer.

    Raises:
        click.UsageError: Options were given that only the embedded trainer has.
    """
    from forerun._launcher.study.stages.study_folder import read_recorded_study

    typed, params = get_typed_options(context), context.params
    embedded_only = typed.keys() - _USER_TRAINER_OPTIONS
    refuse_options(
        typed, embedded_only, "for the embedded trainer; your own trainer trains this config"
    )
    study = read_recorded_study(folder.resolve().parent.parent)
    places = UserRunFolders(
        run_dir=params["out_dir"] or folder / "run",
        code_dir=study.code_dir,
        corpus=params["data_dir"] or study.corpus,
    )
    max_restarts, hang_seconds = params["max_restarts"], params["hang_seconds"]

    def start(signals: Signals, _: LogSink | None) -> LaunchOutcome:
        return launch_user_trainer(
            decision, places, max_restarts, signals, hang_seconds=hang_seconds
        )

    line = shlex.join(build_command_words(own, places, resume=False))
    return Job(line=line, run_dir=places.run_dir, start=start)


def _choose_limits(hang_seconds: int) -> SilenceLimits:
    """Return the limits for the silence of a job; 0 turns them off."""
    if not hang_seconds:
        return SilenceLimits(floor_seconds=None, start_seconds=None)
    return SilenceLimits(floor_seconds=hang_seconds, start_seconds=max(START_SECONDS, hang_seconds))


def _record_acceptance(frozen: Path, accepts: tuple[str, ...], reason: str) -> None:
    """Record that a person uses a config although some of its checks refuse it."""
    check_reason(accepts, reason)
    if not accepts:
        return
    decision, folder = read_launch(frozen), find_config_folder(frozen)
    problems = accept_problems(folder, decision.digest, accepts, reason.strip(), get_author())
    if not problems:
        raise click.UsageError(
            f"--accept {', '.join(accepts)}: the config passes, there is nothing to accept"
        )
    text = (
        f"checks of the config ({', '.join(accepts)}): {reason.strip()}; refused were: "
        f"{'; '.join(problems)}"
    )
    log_dir = find_study(folder) or folder / "run"
    event_log.append_event(
        log_dir, "accepted", text, digest=decision.digest, data={"author": get_author()}
    )


def _check_nodes(
    decision: Decision, nodes: Nodes, endpoint: str | None, *, needs_endpoint: bool
) -> None:
    """Check the options for machines against each other and against the config.

    Raises:
        OptionProblems: Some options contradict each other.
    """
    num_ranks, num_nodes = decision.parallelism.num_ranks, nodes.num_nodes
    problems = []
    if num_ranks % num_nodes:
        ranks = format_counted(num_ranks, "rank")
        problems.append(f"--nnodes {num_nodes} does not divide the config's {ranks}")
    if nodes.rank >= num_nodes:
        machines = format_counted(num_nodes, "machine")
        problems.append(f"--node-rank {nodes.rank}: of {machines} the last is {num_nodes - 1}")
    if needs_endpoint and endpoint is None:
        problems.append(
            "several machines need --rdzv-endpoint HOST:PORT, the same on each: a free port of the "
            "first"
        )
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        problems.append(f"--rdzv-endpoint {endpoint}: must be HOST:PORT")
    if nodes.srun and nodes.rank:
        problems.append("--srun starts the ranks on every node itself: leave out --node-rank")
    if nodes.srun and num_nodes == 1:
        problems.append("--srun is for several nodes: give their number with --nnodes")
    if problems:
        raise OptionProblems(problems)


def _format_script(frozen: Path, job: Job, corpus: Path, options: dict[str, Any]) -> str:
    """Return the SLURM job that runs this command."""
    arguments = {
        "--data": corpus.resolve(),
        "--out": job.run_dir.resolve(),
        "--steps": options["stop_after"],
        "--max-restarts": options["max_restarts"],
        "--hang-seconds": options["hang_seconds"],
        "--wandb": options["wandb"],
    }
    typed = [
        word
        for name, value in arguments.items()
        if value is not None
        for word in (name, str(value))
    ]
    return format_launch_script(frozen, typed, options["num_nodes"])


def _find_export_line(
    folder: Path, decision: Decision, corpus: Path, trainer: str | None, reasons: list[str]
) -> tuple[dict[str, Json], str]:
    """Return the launch line of an export next to the config as data and text, after checking that
    its files are unchanged.

    Raises:
        OptionProblems: There is no export of that name, no export at all, or several and no name is
            given.
        TamperedError: An export was changed.
    """
    exports = check_files(folder, decision.digest).exports if (folder / "exports").is_dir() else ()
    matches = [
        export
        for export in exports
        if trainer in (None, export.trainer) and export.trainer != "native"
    ]
    if len(matches) != 1:
        hint = f"`forerun export {shorten_config_name(folder)} --to TRAINER` writes one"
        if matches:
            hint = "choose one with --trainer NAME"
        names = ", ".join(export.trainer for export in exports) or "none"
        problems = reasons if trainer is None else [f"--trainer {trainer}: no such export"]
        raise OptionProblems([*problems, f"exports beside the config: {names}; {hint}"])
    (export,) = matches
    script = shlex.quote(str((export.out / RUN_FILE).resolve()))
    line = f"FORERUN_DATA={shlex.quote(str(corpus.resolve()))} {script}"
    lines = [
        *(f"# not the embedded trainer: {problem}" for problem in reasons),
        line,
        "# its first lines say what it needs; `forerun verify` asks the trainer what it would run",
    ]
    body: dict[str, Json] = {
        "trainer": export.trainer,
        "version": export.version,
        "line": line,
        "why": [*reasons],
    }
    return body, "\n".join(lines)


def _record_launch(folder: Path, decision: Decision, outcome: LaunchOutcome, line: str) -> None:
    """Attest the launch, and update the study's logbook and, after a finished run, its report."""
    if not folder.is_dir():
        print_progress(
            f"warning: {folder} was removed while the run trained: the launch is not recorded there"
        )
        return
    body = cast(dict[str, Json], canon.to_json(outcome))
    attest(folder, "launch", decision.digest, {"outcome": body, "line": line})
    if (study_dir := find_study(folder)) is not None:
        write_logbook(study_dir)
        if outcome.event == "finished":
            rewrite_report(study_dir)


def _format_outcome(
    decision: Decision, outcome: LaunchOutcome, mirror_outcome: SinkOutcome | None
) -> str:
    loss = outcome.validation_loss_nats
    text = f"{outcome.event} at step {outcome.step} of {decision.learning_rate.schedule.num_steps}"
    if loss is not None:
        text += f", validation loss {format_loss(loss)} nats"
    if outcome.num_restarts:
        text += f" after {format_counted(outcome.num_restarts, 'restart')}"
    if outcome.reason:
        text += f": {outcome.reason}"
    return f"{text}\nwandb: {mirror_outcome.text}" if mirror_outcome else text


def _suggest_next(outcome: LaunchOutcome, name: str, out_dir: Path | None) -> list[str]:
    """Return the line with the next command; no line if the outcome's reason says what to do."""
    if outcome.event == "finished":
        metrics = f" --metrics {out_dir}" if out_dir else ""
        return [f"next: forerun watch {name}{metrics} --conclude"]
    if outcome.event in ("stopped", "interrupted"):
        out = f" --out {out_dir}" if out_dir else ""
        return [f"next: forerun launch {name}{out}, which resumes from there"]
    return []
