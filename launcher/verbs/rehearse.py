"""The verb that runs the drills before a launch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from launcher.base.study_names import shown_name
from launcher.cli.names import frozen_argument
from launcher.cli.options import answer, code_of, corpus_of, json_option, sound_config, table
from launcher.rehearsal.registry import DRILLS, OWN_DRILLS, RehearsalAttestation
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.notation import counted

if TYPE_CHECKING:
    from launcher.frozen.frozen import Decision
    from launcher.rehearsal.own_drills import OwnRehearsal
    from launcher.rehearsal.stage import RehearsalFolder


@click.command()
@frozen_argument
@click.option(
    "--data",
    "data_dir",
    type=click.Path(path_type=Path),
    help="Corpus folder; default: the study's.",
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice([*DRILLS, *OWN_DRILLS]),
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

    Minutes on a CPU, on a scaled-down copy; your own trainer's command at the base width. Writes
    attestations/rehearsal.json, which `verify` and `launch` look for. Exit 3: a drill failed; 75:
    this config is being rehearsed already; 130: interrupted, the same command starts over.
    """
    decision, folder = sound_config(frozen)
    drills = DRILLS if decision.own is None else OWN_DRILLS
    if unknown := [name for name in only if name not in drills]:
        raise click.UsageError(f"--only {unknown[0]}: this config's drills are {', '.join(drills)}")
    if full and decision.own is not None:
        raise click.UsageError("--full: the drills of your own trainer are at the base width")
    from launcher.rehearsal.run import SCRATCH
    from launcher.rehearsal.run import rehearse as hold
    from sweeps.store.lock import DriverLock

    corpus = corpus_of(folder, data_dir) if decision.own is None else data_dir
    (folder / SCRATCH).mkdir(exist_ok=True)
    with DriverLock(folder / SCRATCH):  # a second rehearsal would delete the runs of the first
        attestation = hold(_set_up_drills(folder, decision, corpus, full=full), only)
    if not only:
        _record_rehearsal(folder, decision.digest, attestation)
    body = cast(dict[str, Json], canon.to_json(attestation))
    answer(
        as_json,
        {"digest": decision.digest, **body},
        _format_rehearsal(attestation, folder, is_complete=not only),
    )
    if attestation.exit_code:
        raise SystemExit(attestation.exit_code)


def _set_up_drills(
    folder: Path, decision: Decision, corpus: Path | None, *, full: bool
) -> RehearsalFolder | OwnRehearsal:
    """Return the folder and settings in which the drills of a config run."""
    from launcher.rehearsal.own_drills import set_up_own
    from launcher.rehearsal.run import SCRATCH, set_up
    from launcher.study.study_folder import recorded_study
    from launcher.supervisor.own_launch import OwnPlaces

    if decision.own is None:
        assert corpus is not None
        return set_up(folder, decision, corpus, full=full, code_dir=code_of(folder, decision))
    study = recorded_study(folder.resolve().parent.parent)
    places = OwnPlaces(run_dir=folder, code_dir=study.code_dir, corpus=corpus or study.corpus)
    return set_up_own(folder, decision, places, study.plan.proxy.num_steps, folder / SCRATCH)


def _record_rehearsal(folder: Path, digest: str, attestation: RehearsalAttestation) -> None:
    """Add the rehearsal to the event log and logbook of the study; without a study, to the event
    log of the config's own run.
    """
    from launcher.base import chronicle
    from launcher.frozen.frozen_folder import study_of
    from launcher.logbook.logbook import write_logbook

    failed = attestation.named("failed")
    text = f"Rehearsed: {attestation.outcome}, {counted(len(attestation.drills), 'drill')}"
    text += f"; failed: {', '.join(failed)}" if failed else ""
    data: dict[str, Json] = {"outcome": attestation.outcome, "failed": [*failed]}
    study_dir = study_of(folder)
    chronicle.record(study_dir or folder / "run", "rehearsed", text, digest=digest, data=data)
    if study_dir is not None:
        write_logbook(study_dir)


def _format_rehearsal(attestation: RehearsalAttestation, folder: Path, *, is_complete: bool) -> str:
    """Format the result for people: a line per drill, and the next step."""
    from proxies.core.notation import format_duration

    rows = []
    for result in attestation.drills:
        advice = (
            [f"must: {result.limit}", f"do: {result.advice}"] if result.outcome == "failed" else []
        )
        rows.append(
            (
                result.outcome,
                result.name,
                format_duration(result.seconds),
                "\n".join([result.said, *advice]),
            )
        )
    lines = [table(("outcome", "drill", "took", "found"), rows, left=(0, 1, 3))]
    lines.append(f"rehearsal {attestation.outcome} in {format_duration(attestation.seconds)}")
    config = shown_name(folder)
    next_verb = f"launch {config}" if is_complete else f"rehearse {config}"
    if failed := attestation.named("failed"):
        lines.append(f"the runs are kept in {folder / 'rehearsal'}")
        next_verb = f"rehearse {config} --only {failed[0]}"
    return "\n".join([*lines, f"next: forerun {next_verb}"])
