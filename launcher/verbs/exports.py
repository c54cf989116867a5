"""Frozen configs for other trainers: `export` writes a trainer's own files, and `verify` proves the
files in a config's folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from launcher.base.study_names import shown_name
from launcher.base.talk import say
from launcher.cli.names import frozen_argument
from launcher.cli.options import answer, code_of, folder_of, full_option, json_option, sound_config
from launcher.exporters.fidelity import MODULES, ExportError, exporter
from launcher.study.gates import GateError
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.errors import ExitCode
from proxies.core.notation import counted

if TYPE_CHECKING:
    from launcher.exporters.fidelity import FidelityReport
    from launcher.frozen.frozen import Decision
    from launcher.frozen.frozen_folder import Exported

FIDELITY_FILE = "fidelity.json"


@click.command()
@frozen_argument
@click.option(
    "--prove",
    is_flag=True,
    help="Start your own training script for at most five steps and compare (forerun.hook).",
)
@full_option
@json_option
def verify(frozen: Path, prove: bool, full: bool, as_json: bool) -> None:
    """Check a FROZEN config (its folder, or launch.json): digest, attestations, exports, optimizer
    groups.

    Where an export's trainer is installed (`make trainers`), it reads the files and is compared:
    every parameter's numbers, the learning rate of every step (of a long run, of some 4,200). Exit
    5: something was changed by hand; 3: a trainer would run something else, or another version of
    forerun wrote the files (export again).
    """
    from launcher.exporters.trainers import native
    from launcher.frozen.frozen_folder import look_through
    from launcher.frozen.launch_file import format_accepted_failures, read_launch
    from launcher.rehearsal.status import rehearsal_of

    decision = read_launch(frozen)
    if prove and decision.own is None:
        raise click.BadParameter(
            "--prove: only for a command of your own (proxy.command); exports are asked anyway"
        )
    folder = folder_of(frozen)
    done: list[Json] = [f"digest {decision.digest}"]
    if decision.own is None:
        if mismatches := native.parity(decision, code_of(folder, decision)):
            head = f"{folder}: the embedded trainer's groups are not the frozen ones:"
            raise GateError("\n".join([head, *mismatches]))
        done.append(
            "the embedded trainer builds the frozen optimizer groups, each parameter in exactly one"
        )
    files = look_through(folder, decision.digest)
    proven, open_ = _prove_exports(decision, folder, files.exports)
    if decision.own is not None:
        own_proven, own_open = _prove_own_trainer(decision, folder) if prove else ([], [_NOT_ASKED])
        proven, open_ = proven + own_proven, open_ + own_open
    done += [*files.unchanged, *_check_study_ledger(folder, decision.digest), *proven]
    standing = rehearsal_of(folder, decision.digest)
    after = f"next: forerun {'launch' if standing.rehearsed else 'rehearse'} {shown_name(folder)}"
    lines = [_summarize_checks(done, open_), *(f"ok  {line}" for line in done if full)]
    lines += [
        *(f"not proven  {line}" for line in open_),
        *format_accepted_failures(folder, decision.digest),
    ]
    lines += [standing.sentence, after]
    body = {
        "digest": decision.digest,
        "verified": done,
        "not_proven": open_,
        "rehearsed": standing.body,
    }
    answer(as_json, body, "\n".join(lines))


def _summarize_checks(done: list[Json], open_: list[Json]) -> str:
    """Return how many checks hold; a check that fails has ended the verb before."""
    unproven = ", ".join(str(line).partition(":")[0] for line in open_)
    return f"all {counted(len(done), 'check')} hold" + (
        f", {len(open_)} not proven: {unproven}" if open_ else ""
    )


def _check_study_ledger(folder: Path, digest: str) -> list[Json]:
    """Check that the ledger of the config's study, if there is one, holds the config's evidence.

    Raises:
        TamperedError: The ledger lacks it.
    """
    from launcher.frozen.config_checks import check_ledger
    from launcher.frozen.frozen import TamperedError
    from launcher.frozen.frozen_folder import study_of

    if study_of(folder) is None:
        return []
    if problem := check_ledger(folder, digest):
        raise TamperedError(str(folder), [problem])
    return ["the study's ledger holds the record at which this config was frozen, and its runs"]


def _prove_exports(
    decision: Decision, folder: Path, exports: tuple[Exported, ...]
) -> tuple[list[Json], list[Json]]:
    """Let each export's own trainer read it. Return what is proven, and what is not because the
    trainer is not installed.

    Raises:
        GateError: A trainer would run something else.
        ProofError: A trainer could not be asked.
    """
    from launcher.exporters import proof

    proven: list[Json] = []
    open_: list[Json] = []
    failures: list[str] = []
    for export in exports:
        name, version = export.trainer, export.version
        if name in ("native", "command"):
            continue  # the caller proves these, and every rank that trains
        if name not in MODULES:
            open_.append(
                f"parity of {name} {version}: this version of forerun has no exporter of that name"
            )
            continue
        python = proof.interpreter(name)
        if python is None:
            open_.append(f"parity of {name} {version}: {proof.installing(name)}; then verify again")
            continue
        say(f"forerun: asking {name} how it reads the export")
        try:
            problems = proof.prove(decision, name, version, python, export.out)
        except (proof.ProofError, ExportError) as error:  # the other trainers are asked anyway
            failures.append(str(error))
            continue
        proven.append(_record_proof(decision, folder, export, problems))
    if failures:
        raise proof.ProofError("verify", failures)
    return proven, open_


def _record_proof(
    decision: Decision, folder: Path, export: Exported, problems: Sequence[str]
) -> str:
    """Attest what a trainer made of its export, and return a sentence.

    Raises:
        GateError: The trainer would run something else.
    """
    from launcher.exporters.view import TOLD, proof_steps
    from launcher.frozen.launch_file import attest

    name, version = export.trainer, export.version
    broken = [problem for problem in problems if not problem.endswith(TOLD)]
    body: dict[str, Json] = {"version": version, "problems": [*problems]}
    try:
        attest(folder, f"parity-{name}", decision.digest, body)
    except OSError as error:  # the config may be in a folder that is not writable
        say(f"forerun: {error.filename}: {error.strerror}: the answer of {name} is not saved")
    if broken:
        head = f"{export.out}: {name} would run something else, or the files are stale:"
        raise GateError("\n".join([head, *broken]))
    exceptions = (
        f", except for {counted(len(problems), 'difference')} listed in its fidelity report"
        if problems
        else ""
    )
    schedule = decision.learning_rate.schedule
    num_steps, num_read = schedule.num_steps, len(proof_steps(schedule))
    steps = (
        "every step" if num_read == num_steps else f"{num_read:,} of {counted(num_steps, 'step')}"
    )
    return (
        f"parity of {name} {version}: every parameter's numbers, the learning rate of "
        f"{steps}{exceptions}"
    )


_NOT_ASKED = (
    "your own trainer: call forerun.hook.prove in its script, then `forerun verify --prove` starts "
    "it for five steps"
)


def _prove_own_trainer(decision: Decision, folder: Path) -> tuple[list[Json], list[Json]]:
    """Return what starting the user's own script has proven, and what it could not prove.

    Raises:
        GateError: The script does something else than is frozen.
        ProofError: The script could not be started or did not report.
    """
    from launcher.frozen.launch_file import attest
    from launcher.study.study_folder import recorded_study
    from launcher.supervisor import own_proof
    from launcher.supervisor.own_launch import OwnPlaces

    study = recorded_study(folder.resolve().parent.parent)
    say(
        "forerun: starting your own trainer twice: up to its first step at a reference width, then "
        "for five steps"
    )
    places = OwnPlaces(run_dir=folder, code_dir=study.code_dir, corpus=study.corpus)
    problems, notes, report = own_proof.prove(decision, places)
    attest(folder, "parity-command", decision.digest, {"problems": [*problems], "notes": [*notes]})
    if problems:
        raise GateError(
            "\n".join(["your own trainer does something else than is frozen:", *problems])
        )
    tensors = (
        f"{counted(len(report.parameters), 'parameter tensor')} of "
        f"{counted(report.num_params, 'number')}"
    )
    seen = f"{tensors}, {counted(len(report.observed), 'step')}"
    return [
        f"your own trainer: {seen}: rates, decay, initial spread, batch and clipping as frozen"
    ], [*notes]


@click.command()
@frozen_argument
@click.option(
    "--to",
    "trainer",
    required=True,
    metavar="TRAINER[@VERSION]",
    help=f"One of: {', '.join(MODULES)}.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Default: exports/TRAINER beside the config."
)
@click.option(
    "--weights",
    type=click.Path(path_type=Path),
    metavar="CHECKPOINT",
    help="Write this checkpoint, or a run's newest, as a model that transformers loads (--to "
    "huggingface).",
)
@click.option("--allow-lossy", is_flag=True, help="Export even if something cannot be expressed.")
@full_option
@json_option
def export(
    frozen: Path,
    trainer: str,
    out: Path | None,
    weights: Path | None,
    allow_lossy: bool,
    full: bool,
    as_json: bool,
) -> None:
    """Write a FROZEN config as a trainer's own files, with a fidelity report. Exit 3 if not all can
    be expressed.
    """
    from launcher.base.run_files import kinds_in
    from launcher.exporters.export_writer import put, scratch_for
    from launcher.frozen.launch_file import attest

    name, _, version = trainer.partition("@")
    if name not in MODULES:
        raise click.BadParameter(f"--to {trainer}: must be one of {', '.join(MODULES)}")
    decision, folder = sound_config(frozen)
    folder = folder.resolve()
    if weights is not None:
        if name != "huggingface" or version:
            raise click.BadParameter(f"--to {trainer}: weights are written for huggingface only")
        _export_weights(decision, folder, weights, out, as_json)
        return
    target = _choose_target(folder, name, out)
    beside, write = target.is_relative_to(folder), exporter(name)
    with scratch_for(target) as scratch:  # a refused export leaves no files behind
        report = write.export(decision, scratch, version or write.VERSIONS[-1])
        canon.write_atomic(scratch / FIDELITY_FILE, canon.pretty(report))
        files: dict[str, Json] = {
            file: canon.file_sha256(scratch / file) for file in kinds_in(scratch)
        }
        refused = bool(report.lost) and not allow_lossy
        if not refused:
            known = {*files, *_list_attested_files(folder, name, decision.digest)}
            _check_room(target, known if beside else set())
            body: dict[str, Json] = {
                "trainer": name,
                "version": report.version,
                "out": f"exports/{name}",
                "files": files,
            }
            put(scratch, target)
            if beside:
                attest(folder, f"export-{name}", decision.digest, body)
    answered = {
        "trainer": name,
        "version": report.version,
        "out": None if refused else str(target),
        "entries": cast(list[Json], canon.to_json(report.entries)),
    }
    verified = f"forerun verify {shown_name(frozen)}" if beside else ""
    lines = _format_export(report, target, len(files), refused, verified, full)
    answer(as_json, answered, "\n".join(lines))
    if refused:
        _advise_on_loss(report)
        raise SystemExit(ExitCode.GATE)


def _advise_on_loss(report: FidelityReport) -> None:
    """Print how to change the plan so that the trainer can express everything."""
    from launcher.exporters.fidelity import list_plan_remedies

    lost = [entry.field for entry in report.lost]
    remedies = "; ".join(list_plan_remedies(lost))
    say(
        f"forerun: {report.trainer} cannot express {_name_some(lost)}. Set in the plan of a new "
        f"study (--fork keeps what it can): {remedies}; or add --allow-lossy to train with "
        f"{report.trainer}'s own numbers"
    )


def _export_weights(
    decision: Decision, folder: Path, place: Path, out: Path | None, as_json: bool
) -> None:
    """Write a checkpoint as a model that transformers loads."""
    from launcher.exporters.trainers.huggingface_weights import checkpoint_in, write_weights
    from launcher.frozen.frozen_folder import study_of
    from launcher.study.study_folder import recorded_study

    checkpoint = checkpoint_in(place)
    target = out or checkpoint.parent.parent / f"huggingface-{checkpoint.name}"
    study_dir = study_of(folder)
    corpus = None if study_dir is None else recorded_study(study_dir).corpus
    num_params, left_out = write_weights(decision, checkpoint, target, corpus)
    text = f"{counted(num_params, 'weight')} of {checkpoint.name} in {target}" + (
        f"; {left_out}" if left_out else ""
    )
    body = {
        "trainer": "huggingface",
        "out": str(target),
        "checkpoint": str(checkpoint),
        "num_params": num_params,
        "without": left_out,
    }
    load = f'AutoModelForCausalLM.from_pretrained("{target}")'
    answer(as_json, cast(dict[str, Json], body), f"{text}\nnext: in Python, transformers.{load}")


def _format_export(
    report: FidelityReport, target: Path, num_files: int, refused: bool, verified: str, full: bool
) -> list[str]:
    """Format an export as text: the files, how faithful they are, what is lost, and the next step.

    Args:
        report: Fidelity report of the export.
        target: Folder of the export.
        num_files: Number of files written.
        refused: Whether the export was refused because something is lost.
        verified: Command that verifies the export; empty if it is not next to its config.
        full: Whether to list the conditions of equivalent fields.
    """
    from launcher.frozen.launch_file import RUN_FILE

    counts = Counter(entry.verdict for entry in report.entries)
    shown_path = target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target
    done = "nothing written" if refused else f"{counted(num_files, 'file')} in {shown_path}"
    head = f"{report.trainer} {report.version}: {done}; fields exact: {counts['exact']}; "
    lines = [
        f"{head}equivalent: {counts['equivalent']}; not expressible: {counts['not_expressible']}"
    ]
    if full:
        conditions: dict[str, list[str]] = {}
        for entry in report.entries:
            if entry.verdict == "equivalent":
                conditions.setdefault(entry.note, []).append(entry.field)
        lines += [
            f"  equivalent: {_name_some(fields)}: {note}" for note, fields in conditions.items()
        ]
    lines += [f"  lost: {entry.field}: {entry.note}" for entry in report.lost]
    if refused:
        return lines
    lines.append(
        f"there: {FIDELITY_FILE}, field by field; {RUN_FILE}, whose first lines say what it needs"
    )
    first_step = (
        f"{verified}, then " if verified else "(verify checks only exports beside the config) "
    )
    return [*lines, f"next: {first_step}{RUN_FILE} there"]


def _name_some(fields: list[str]) -> str:
    """Return the first of some names, and how many more there are."""
    return fields[0] + (f" and {len(fields) - 1} more" if len(fields) > 1 else "")


def _choose_target(folder: Path, trainer: str, out: Path | None) -> Path:
    """Return the folder of an export: outside the config's folder, or its own place there."""
    own = folder / "exports" / trainer
    target = (out or own).resolve()
    if target != own and (target.is_relative_to(folder) or out is None):
        raise click.BadParameter(
            f"--out {target}: an export in the config's folder must be in {own}; choose that, or a "
            "folder elsewhere"
        )
    if target.exists() and not target.is_dir():
        raise click.BadParameter(f"--out {target}: must be a folder, empty or new")
    return target


def _list_attested_files(folder: Path, trainer: str, digest: str) -> set[str]:
    """Return the files of the present export, from its attestation; empty if that cannot be
    read.
    """
    from launcher.frozen.frozen import TamperedError
    from launcher.frozen.launch_file import path_of, read_attestation

    try:
        files = read_attestation(path_of(folder, f"export-{trainer}"), digest).get("files")
    except TamperedError:
        return set()
    return set(files) if isinstance(files, dict) else set()


def _check_room(target: Path, export_files: set[str]) -> None:
    """Check that every file in `target` may be replaced: next to the config, files that exports
    wrote; elsewhere, none.

    Raises:
        click.BadParameter: The folder holds other files, such as the output of a run; some are
        named.
    """
    from launcher.base.run_files import kinds_in

    if strangers := sorted(set(kinds_in(target)) - export_files):
        shown = ", ".join(strangers[:8]) + (
            f" and {len(strangers) - 8} more" if len(strangers) > 8 else ""
        )
        raise click.BadParameter(
            f"--out {target}: it holds files that no export wrote: {shown}; choose an empty folder"
        )
