"""The verb that runs the drills before a launch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from forerun._launcher.cli.frozen_config import find_corpus, find_user_code, read_sound_config
from forerun._launcher.cli.names import frozen_argument
from forerun._launcher.cli.options import PATH, json_option, print_result
from forerun._launcher.main_run import event_log
from forerun._launcher.main_run.frozen.config_names import shorten_config_name
from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._launcher.main_run.frozen.frozen_folder import find_study
from forerun._launcher.main_run.logbook.logbook import write_logbook
from forerun._launcher.main_run.rehearsal.registry import DRILLS, USER_DRILLS, RehearsalAttestation
from forerun._launcher.main_run.rehearsal.user_drills import UserRehearsal, set_up_user_rehearsal
from forerun._launcher.main_run.supervisor.user_launch import UserRunFolders
from forerun._launcher.main_run.terminal_layout import format_table
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_counted, format_duration
from forerun._sweeps.store.lock import DriverLock

if TYPE_CHECKING:
    from forerun._launcher.main_run.rehearsal.rehearsal_folder import RehearsalFolder


@click.command()
@frozen_argument
@click.option(
    "--data",
    "data_dir",
    type=PATH,
    help="Corpus folder; default: the study's.",
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([*DRILLS, *USER_DRILLS]),
    help="Run only this drill, and sign nothing; repeatable.",
)
@click.option(
    "--full", is_flag=True, help="Use the real shape, not a small copy; needs the real run's GPUs."
)
@json_option
def rehearse(
    frozen: Path, data_dir: Path | None, only: tuple[str, ...], full: bool, as_json: bool
) -> None:
    """Run the drills before a launch on a FROZEN config: kills, cuts, corruption, NaN, a full disk,
    a hang.

    The drills take minutes on a CPU, on a scaled-down copy; your own trainer's command runs at the
    base width. The result is attestations/rehearsal.json, which `verify` and `launch` read. Exit 3:
    a drill failed; 75: this config is being rehearsed already; 130: interrupted, the same command
    starts over.
    """
    decision, folder = read_sound_config(frozen)
    drills = DRILLS if decision.own is None else USER_DRILLS
    if unknown := [name for name in only if name not in drills]:
        raise click.UsageError(f"--only {unknown[0]}: this config's drills are {', '.join(drills)}")
    if full and decision.own is not None:
        raise click.UsageError("--full: the drills of your own trainer are at the base width")
    from forerun._launcher.main_run.rehearsal.run import SCRATCH
    from forerun._launcher.main_run.rehearsal.run import rehearse as run_drills

    corpus = find_corpus(folder, data_dir) if decision.own is None else data_dir
    (folder / SCRATCH).mkdir(exist_ok=True)
    with DriverLock(folder / SCRATCH):  # a second rehearsal would delete the runs of the first
        attestation = run_drills(_set_up_drills(folder, decision, corpus, full=full), only)
    if not only:
        _record_rehearsal(folder, decision.digest, attestation)
    body = cast(dict[str, Json], canon.to_json(attestation))
    print_result(
        as_json,
        {"digest": decision.digest, **body},
        _format_rehearsal(attestation, folder, is_complete=not only),
    )
    if attestation.exit_code:
        raise SystemExit(attestation.exit_code)


def _set_up_drills(
    folder: Path, decision: Decision, corpus: Path | None, *, full: bool
) -> RehearsalFolder | UserRehearsal:
    """Return the folder and settings in which the drills of a config run."""
    from forerun._launcher.main_run.rehearsal.run import SCRATCH, set_up_rehearsal
    from forerun._launcher.study.stages.study_folder import read_recorded_study

    if decision.own is None:
        assert corpus is not None
        return set_up_rehearsal(
            folder, decision, corpus, full=full, code_dir=find_user_code(folder, decision)
        )
    study = read_recorded_study(folder.resolve().parent.parent)
    places = UserRunFolders(run_dir=folder, code_dir=study.code_dir, corpus=corpus or study.corpus)
    return set_up_user_rehearsal(
        folder, decision, places, study.plan.proxy.num_steps, folder / SCRATCH
    )


def _record_rehearsal(folder: Path, digest: str, attestation: RehearsalAttestation) -> None:
    """Add the rehearsal to the event log and the logbook of the study. Without a study, add it to
    the event log of the config's own run.
    """
    failed = attestation.list_drills("failed")
    text = f"Rehearsed: {attestation.outcome}, {format_counted(len(attestation.drills), 'drill')}"
    text += f"; failed: {', '.join(failed)}" if failed else ""
    data: dict[str, Json] = {"outcome": attestation.outcome, "failed": [*failed]}
    study_dir = find_study(folder)
    event_log.append_event(study_dir or folder / "run", "rehearsed", text, digest=digest, data=data)
    if study_dir is not None:
        write_logbook(study_dir)


def _format_rehearsal(attestation: RehearsalAttestation, folder: Path, *, is_complete: bool) -> str:
    """Format the result for people: a line per drill, and the next step."""
    rows = []
    for result in attestation.drills:
        lines = [result.said]
        if result.outcome == "failed":
            lines += [f"must: {result.limit}", f"do: {result.advice}"]
        took = format_duration(result.seconds)
        rows.append((result.outcome, result.name, took, "\n".join(lines)))
    config, failed = shorten_config_name(folder), attestation.list_drills("failed")
    lines = [
        format_table(("outcome", "drill", "took", "found"), rows, left=(0, 1, 3)),
        f"rehearsal {attestation.outcome} in {format_duration(attestation.seconds)}",
    ]
    if failed:
        lines.append(f"the runs are kept in {folder / 'rehearsal'}")
        next_step = f"rehearse {config} --only {failed[0]}"
    else:
        next_step = f"launch {config}" if is_complete else f"rehearse {config}"
    return "\n".join([*lines, f"next: forerun {next_step}"])
