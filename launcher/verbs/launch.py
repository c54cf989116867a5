"""The verb that trains the main run: launch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import click
from click.core import ParameterSource

from launcher.base.study_names import shown_name
from launcher.base.talk import say
from launcher.base.wandb_calls import Mode
from launcher.cli.names import frozen_argument
from launcher.cli.options import (
    OptionProblems,
    answer,
    code_of,
    corpus_of,
    folder_of,
    json_option,
    sound_config,
)
from launcher.frozen.launch_file import CHECKS
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.notation import counted, format_loss

if TYPE_CHECKING:
    from launcher.base.watchdog import Limits
    from launcher.dashboards.log_sink import LogSink, SinkOutcome
    from launcher.frozen.frozen import Decision, OwnTrainer
    from launcher.supervisor.attempt import Signals
    from launcher.supervisor.launch import LaunchOutcome, Nodes

_ENDPOINT = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}")
_path = click.Path(path_type=Path)


@click.command()
@frozen_argument
@click.option("--data", "data_dir", type=_path, help="Corpus folder; default: the study's.")
@click.option("--out", "out_dir", type=_path, help="Run folder; default: run/ beside the config.")
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
    help="Most restarts in a row when the job dies; a new checkpoint resets the count.",
)
@click.option(
    "--hang-seconds",
    type=click.IntRange(0, 10**6),
    default=600,
    show_default=True,
    help="Restart a job that logs nothing for so long and for 20 median steps; 0: never.",
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
    type=_path,
    help="Write this as a SLURM job, run nothing.",
)
@click.option(
    "--wandb", type=click.Choice(get_args(Mode)), help="Log the metrics to a W&B run too."
)
@click.option(
    "--accept",
    "accepts",
    multiple=True,
    type=click.Choice(CHECKS),
    help="Use the config even though this check refuses it.",
)
@click.option("--reason", default="", help="Why you accept it; recorded beside the config.")
@json_option
def launch(
    frozen: Path,
    data_dir: Path | None,
    out_dir: Path | None,
    stop_after: int | None,
    dry_run: bool,
    trainer: str | None,
    max_restarts: int,
    hang_seconds: int,
    num_nodes: int,
    node_rank: int,
    endpoint: str | None,
    srun: bool,
    sbatch_file: Path | None,
    wandb: Mode | None,
    accepts: tuple[str, ...],
    reason: str,
    as_json: bool,
) -> None:
    """Train a FROZEN config with the embedded trainer under torchrun, or print the launch line of
    an exported one.

    Resumes from the newest good checkpoint and restarts a job that dies or hangs. Ctrl-C saves and
    ends, a second Ctrl-C ends at once. Exit 3: the run stopped itself, by its limits; 130:
    interrupted, the same command resumes.
    """
    from launcher.frozen.launch_file import format_accepted_failures
    from launcher.rehearsal.status import rehearsal_of
    from launcher.supervisor.launch import Nodes, launch_line
    from launcher.supervisor.launch import launch as start
    from launcher.trainer.assembly import unfit

    _record_acceptance(frozen, accepts, reason)
    decision, folder = sound_config(frozen)
    if decision.own is not None:
        return _launch_own(decision, decision.own, click.get_current_context())
    corpus = corpus_of(folder, data_dir)
    reasons = unfit(decision)
    if reasons or trainer is not None:
        return _print_export_line(folder, decision, corpus, trainer, reasons, as_json)
    out, code_dir = out_dir or folder / "run", code_of(folder, decision)
    nodes = Nodes(
        num_nodes=num_nodes, rank=node_rank, rendezvous=endpoint or Nodes().rendezvous, srun=srun
    )
    _check_nodes(decision, nodes, endpoint, sbatch_file)
    if sbatch_file is not None:
        given = {
            "--data": corpus.resolve(),
            "--out": out.resolve(),
            "--steps": stop_after,
            "--max-restarts": max_restarts,
            "--hang-seconds": hang_seconds,
            "--wandb": wandb,
        }
        return _write_script(sbatch_file, frozen, given, num_nodes, as_json)
    line = launch_line(frozen, corpus, out, stop_after, nodes, code_dir)
    standing = rehearsal_of(folder, decision.digest)
    for sentence in (standing.sentence, *format_accepted_failures(folder, decision.digest)):
        say(f"forerun: {sentence}")
    if dry_run:
        return answer(as_json, {"line": line, "rehearsed": standing.body}, line)
    # The first machine mirrors the run for all.
    mirror = _open_wandb_page(folder, decision, out, wandb) if wandb and not node_rank else None

    def begin(signals: Signals) -> LaunchOutcome:
        return start(
            frozen,
            corpus,
            out,
            stop_after,
            max_restarts,
            nodes=nodes,
            limits=_choose_limits(hang_seconds),
            beside=mirror,
            signals=signals,
            code_dir=code_dir,
        )

    is_first = node_rank == 0
    return _supervise(begin, frozen, decision, (out, out_dir), line, mirror, is_first, as_json)


def _supervise(
    begin: Callable[[Signals], LaunchOutcome],
    frozen: Path,
    decision: Decision,
    places: tuple[Path, Path | None],
    line: str,
    mirror: LogSink | None,
    is_first: bool,
    as_json: bool,
) -> None:
    """Run a job to its end, record the launch, and print the answer.

    `places`: the run folder, and the value of `--out`. `is_first`: whether this is the first
    machine, which records the launch.
    """
    from launcher.frozen.launch_file import format_accepted_failures
    from launcher.rehearsal.status import rehearsal_of
    from launcher.supervisor.attempt import Signals, hearing

    folder = folder_of(frozen)
    standing = rehearsal_of(folder, decision.digest)
    failures = format_accepted_failures(folder, decision.digest)
    signals = Signals()
    with hearing(signals.hear):  # until the answer is printed: a signal must not lose it
        outcome = begin(signals)
        if is_first:
            _record_launch(folder, decision, outcome, line)
        page = mirror.outcome if mirror else None
        body = {
            **cast(dict[str, Json], canon.to_json(outcome)),
            "out": str(places[0]),
            "rehearsed": standing.body,
            "wandb": page and canon.to_json(page),
        }
        text = "\n".join([_format_outcome(decision, outcome, page), *failures])
        answer(as_json, body, text + _suggest_next(outcome, frozen, places[1]))
    if outcome.exit_code:
        raise SystemExit(outcome.exit_code)


def _open_wandb_page(folder: Path, decision: Decision, out: Path, mode: Mode) -> LogSink:
    """Return a mirror of the run in W&B, which names the gates that failed and were accepted."""
    from launcher.dashboards.log_sink import LogSink
    from launcher.frozen.launch_file import name_accepted_failures

    return LogSink(out, decision, mode, name_accepted_failures(folder, decision.digest))


def _choose_limits(hang_seconds: int) -> Limits:
    """Return the limits for the silence of a job; 0 turns them off."""
    from launcher.base.watchdog import START_SECONDS, Limits

    if not hang_seconds:
        return Limits(floor_seconds=None, start_seconds=None)
    return Limits(floor_seconds=hang_seconds, start_seconds=max(START_SECONDS, hang_seconds))


def _record_acceptance(frozen: Path, accepts: tuple[str, ...], reason: str) -> None:
    """Record that a person uses a config although some of its checks refuse it."""
    from launcher.base import chronicle
    from launcher.frozen.config_checks import accept_problems
    from launcher.frozen.frozen_folder import study_of
    from launcher.frozen.launch_file import read_launch
    from launcher.logbook.logbook import author
    from launcher.verbs.freeze import check_reason

    check_reason(accepts, reason)
    if not accepts:
        return
    decision, folder = read_launch(frozen), folder_of(frozen)
    problems = accept_problems(folder, decision.digest, accepts, reason.strip(), author())
    if not problems:
        raise click.UsageError(
            f"--accept {', '.join(accepts)}: the config passes, there is nothing to accept"
        )
    text = (
        f"checks of the config ({', '.join(accepts)}): {reason.strip()}; refused were: "
        f"{'; '.join(problems)}"
    )
    folder_of_log = study_of(folder) or folder / "run"
    chronicle.record(
        folder_of_log, "accepted", text, digest=decision.digest, data={"author": author()}
    )


_USER_TRAINER_OPTIONS = (
    "frozen",
    "data_dir",
    "out_dir",
    "dry_run",
    "max_restarts",
    "hang_seconds",
    "accepts",
    "reason",
    "as_json",
)
"""Options of this command that also apply to a user's own trainer."""


def _launch_own(decision: Decision, own: OwnTrainer, context: click.Context) -> None:
    """Launch the user's own trainer."""
    from launcher.frozen.launch_file import format_accepted_failures
    from launcher.rehearsal.status import rehearsal_of
    from launcher.study.study_folder import recorded_study
    from launcher.supervisor.own_launch import OwnPlaces, launch_own, words_of

    given = [
        option.opts[0]
        for option in context.command.params
        if option.name not in _USER_TRAINER_OPTIONS
        and context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
    ]
    if given:
        raise OptionProblems(
            [
                f"{name}: is of the embedded trainer, and your own trains this config"
                for name in given
            ]
        )
    frozen, data_dir, out_dir, dry_run, max_restarts, hang_seconds, _, _, as_json = (
        context.params[name] for name in _USER_TRAINER_OPTIONS
    )
    folder = folder_of(frozen)
    study = recorded_study(folder.resolve().parent.parent)
    places = OwnPlaces(
        run_dir=out_dir or folder / "run", code_dir=study.code_dir, corpus=data_dir or study.corpus
    )
    line = shlex.join(words_of(own, places, resume=False))
    if dry_run:
        standing = rehearsal_of(folder, decision.digest)
        return answer(as_json, {"line": line, "rehearsed": standing.body}, line)
    for sentence in format_accepted_failures(folder, decision.digest):
        say(f"forerun: {sentence}")

    def begin(signals: Signals) -> LaunchOutcome:
        return launch_own(decision, places, max_restarts, signals, hang_seconds=hang_seconds)

    run_dirs = (places.run_dir, out_dir)
    return _supervise(begin, frozen, decision, run_dirs, line, None, True, as_json)


def _check_nodes(
    decision: Decision, nodes: Nodes, endpoint: str | None, sbatch_file: Path | None
) -> None:
    """Check the options for machines against each other and against the config.

    Raises:
        OptionProblems: Some options contradict each other.
    """
    num_ranks, is_multi_node = decision.parallelism.num_ranks, nodes.num_nodes > 1
    ranks = counted(num_ranks, "rank")
    expected = {
        f"--nnodes {nodes.num_nodes} does not divide the config's {ranks}": num_ranks
        % nodes.num_nodes
        == 0,
        (
            f"--node-rank {nodes.rank}: of {counted(nodes.num_nodes, 'machine')} the last is "
            f"{nodes.num_nodes - 1}"
        ): (nodes.rank < nodes.num_nodes),
        (
            "several machines need --rdzv-endpoint HOST:PORT, the same on each: a free port of the "
            "first"
        ): (endpoint is not None or not is_multi_node or sbatch_file is not None),
        f"--rdzv-endpoint {endpoint}: must be HOST:PORT": endpoint is None
        or bool(_ENDPOINT.fullmatch(endpoint)),
        "--srun starts the ranks on every node itself: leave out --node-rank": not (
            nodes.srun and nodes.rank
        ),
        "--srun is for several nodes: give their number with --nnodes": is_multi_node
        or not nodes.srun,
    }
    if problems := [problem for problem, holds in expected.items() if not holds]:
        raise OptionProblems(problems)


def _write_script(
    sbatch_file: Path,
    frozen: Path,
    given: Mapping[str, Path | int | str | None],
    num_nodes: int,
    as_json: bool,
) -> None:
    """Write the SLURM job. `given` are the options of this command for the job; None for an option
    that it does not get.
    """
    from launcher.supervisor.slurm import launch_script

    arguments = [
        word for name, value in given.items() if value is not None for word in (name, str(value))
    ]
    canon.write_atomic(sbatch_file, launch_script(frozen, arguments, num_nodes).encode())
    answer(
        as_json, {"sbatch": str(sbatch_file)}, f"wrote {sbatch_file}\nnext: sbatch {sbatch_file}"
    )


def _print_export_line(
    folder: Path,
    decision: Decision,
    corpus: Path,
    trainer: str | None,
    reasons: list[str],
    as_json: bool,
) -> None:
    """Print the launch line of an export next to the config, after checking that its files are
    unchanged.

    Raises:
        OptionProblems: There is no export of that name, no export at all, or several and no name is
            given.
        TamperedError: An export was changed.
    """
    from launcher.frozen.frozen_folder import look_through
    from launcher.frozen.launch_file import RUN_FILE

    exports = look_through(folder, decision.digest).exports if (folder / "exports").is_dir() else ()
    matches = [
        export
        for export in exports
        if trainer in (None, export.trainer) and export.trainer != "native"
    ]
    names = ", ".join(export.trainer for export in exports) or "none"
    if len(matches) != 1:
        hint = f"exports beside the config: {names}; "
        hint += (
            "choose one with --trainer NAME"
            if len(matches) > 1
            else f"`forerun export {shown_name(folder)} --to TRAINER` writes one"
        )
        raise OptionProblems(
            [*(reasons if trainer is None else [f"--trainer {trainer}: no such export"]), hint]
        )
    (export,) = matches
    line = (
        f"FORERUN_DATA={shlex.quote(str(corpus.resolve()))} "
        f"{shlex.quote(str((export.out / RUN_FILE).resolve()))}"
    )
    lines = [
        *(f"# not the embedded trainer: {problem}" for problem in reasons),
        line,
        "# its first lines say what it needs; `forerun verify` asks the trainer what it would run",
    ]
    answer(
        as_json,
        {
            "trainer": export.trainer,
            "version": export.version,
            "line": line,
            "why": cast(Json, reasons),
        },
        "\n".join(lines),
    )


def _record_launch(folder: Path, decision: Decision, outcome: LaunchOutcome, line: str) -> None:
    """Attest the launch, and update the study's logbook and, after a finished run, its report."""
    from launcher.frozen.frozen_folder import study_of
    from launcher.frozen.launch_file import attest
    from launcher.logbook.logbook import write_logbook
    from launcher.verbs.freeze import rewrite_report

    if not folder.is_dir():
        say(
            f"warning: {folder} was removed while the run trained: the launch is not recorded there"
        )
        return
    body = cast(dict[str, Json], canon.to_json(outcome))
    attest(folder, "launch", decision.digest, {"outcome": body, "line": line})
    if (study_dir := study_of(folder)) is not None:
        write_logbook(study_dir)
        if outcome.event == "finished":
            rewrite_report(study_dir)


def _format_outcome(decision: Decision, outcome: LaunchOutcome, shown: SinkOutcome | None) -> str:
    loss = outcome.validation_loss_nats
    text = f"{outcome.event} at step {outcome.step} of {decision.learning_rate.schedule.num_steps}"
    text += f", validation loss {format_loss(loss)} nats" if loss is not None else ""
    text += f" after {counted(outcome.num_restarts, 'restart')}" if outcome.num_restarts else ""
    text += f": {outcome.reason}" if outcome.reason else ""
    return f"{text}\nwandb: {shown.text}" if shown else text


def _suggest_next(outcome: LaunchOutcome, frozen: Path, out_dir: Path | None) -> str:
    """Return the next command; empty if the reason of the outcome says what to do."""
    name = shown_name(frozen)
    if outcome.event == "finished":
        return (
            f"\nnext: forerun watch {name}{f' --metrics {out_dir}' if out_dir else ''} --conclude"
        )
    if outcome.event in ("stopped", "interrupted"):
        return (
            f"\nnext: forerun launch {name}{f' --out {out_dir}' if out_dir else ''}, which resumes "
            "from there"
        )
    return ""
