"""Frozen configs for other trainers: `export` writes a trainer's own files, and `verify` proves the
files in a config's folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import click

from forerun._launcher.cli.frozen_config import (
    find_config_folder,
    find_user_code,
    read_sound_config,
)
from forerun._launcher.cli.names import frozen_argument
from forerun._launcher.cli.options import PATH, full_option, json_option, print_result
from forerun._launcher.main_run.checkpoint_folders import list_file_kinds
from forerun._launcher.main_run.exporters.comparison import PREDICTED_MARK, choose_proof_steps
from forerun._launcher.main_run.exporters.export_checks import ExportError
from forerun._launcher.main_run.exporters.fidelity import FidelityReport
from forerun._launcher.main_run.exporters.registry import (
    EXPORTER_MODULES,
    ProvableExporter,
    load_exporter,
)
from forerun._launcher.main_run.exporters.trainers.megatron_lm_remedies import list_plan_remedies
from forerun._launcher.main_run.frozen.config_checks import check_ledger
from forerun._launcher.main_run.frozen.config_names import shorten_config_name
from forerun._launcher.main_run.frozen.frozen import Decision, TamperedError
from forerun._launcher.main_run.frozen.frozen_folder import Exported, check_files, find_study
from forerun._launcher.main_run.frozen.launch_file import (
    RUN_FILE,
    attest,
    format_accepted_failures,
    get_attestation_path,
    read_attestation,
    read_launch,
)
from forerun._launcher.main_run.progress_output import print_progress
from forerun._launcher.main_run.rehearsal.status import read_rehearsal_status
from forerun._launcher.main_run.supervisor.user_launch import UserRunFolders
from forerun._launcher.study.stages.gates import GateError
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.errors import ExitCode
from forerun._proxies.core.notation import format_counted

FIDELITY_FILE = "fidelity.json"
"""Name of the fidelity report in an export's folder."""


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

    If an export's trainer is installed (`make trainers`), it reads the files, and every parameter's
    numbers and the learning rate of every step are compared (of a long run, some 4,200 steps). The
    answers of trainers are saved as attestations in the config's folder. Exit 5: something was
    changed by hand; 3: a trainer would run something else, or another version of forerun wrote the
    files (export again).
    """
    from forerun._launcher.main_run.exporters.trainers import native

    decision, folder = read_launch(frozen), find_config_folder(frozen)
    if prove and decision.own is None:
        raise click.BadParameter(
            "--prove: only for a command of your own (proxy.command); exports are asked anyway"
        )
    done = [f"digest {decision.digest}"]
    if decision.own is None:
        if mismatches := native.find_mismatches(decision, find_user_code(folder, decision)):
            head = f"{folder}: the embedded trainer's groups are not the frozen ones:"
            raise GateError("\n".join([head, *mismatches]))
        done.append(
            "the embedded trainer builds the frozen optimizer groups, each parameter in exactly one"
        )
    files = check_files(folder, decision.digest)
    proven, unproven = _prove_exports(decision, folder, files.exports)
    if prove:
        own_proven, own_unproven = _prove_own_trainer(decision, folder)
        proven, unproven = proven + own_proven, unproven + own_unproven
    elif decision.own is not None:
        unproven.append(_NOT_ASKED)
    done += [*files.unchanged, *_check_study_ledger(folder, decision.digest), *proven]
    standing = read_rehearsal_status(folder, decision.digest)
    summary = f"all {format_counted(len(done), 'check')} hold"
    if unproven:
        names = ", ".join(line.partition(":")[0] for line in unproven)
        summary += f", {len(unproven)} not proven: {names}"
    lines = [
        summary,
        *(f"ok  {line}" for line in done if full),
        *(f"not proven  {line}" for line in unproven),
        *format_accepted_failures(folder, decision.digest),
        standing.sentence,
        (
            f"next: forerun {'launch' if standing.rehearsed else 'rehearse'} "
            f"{shorten_config_name(folder)}"
        ),
    ]
    body: dict[str, Json] = {
        "digest": decision.digest,
        "verified": [*done],
        "not_proven": [*unproven],
        "rehearsed": standing.body,
    }
    print_result(as_json, body, "\n".join(lines))


def _check_study_ledger(folder: Path, digest: str) -> list[str]:
    """Check that the ledger of the config's study, if there is one, holds the config's evidence.

    Raises:
        TamperedError: The ledger lacks it.
    """
    if find_study(folder) is None:
        return []
    if problem := check_ledger(folder, digest):
        raise TamperedError(str(folder), [problem])
    return ["the study's ledger holds the record at which this config was frozen, and its runs"]


def _prove_exports(
    decision: Decision, folder: Path, exports: tuple[Exported, ...]
) -> tuple[list[str], list[str]]:
    """Ask the trainer of each export how it reads the files. Return sentences about what is proven,
    and about what is not proven and why.

    Raises:
        GateError: A trainer would run something else.
        ProofError: A trainer could not be asked.
    """
    from forerun._launcher.main_run.exporters import proof

    proven, unproven, failures = list[str](), list[str](), list[str]()
    for export in exports:
        name, version = export.trainer, export.version
        if name in ("native", "command"):
            continue  # `verify` proves these without an export's files
        python = None
        if name not in EXPORTER_MODULES:
            reason = "this version of forerun has no exporter of that name"
        elif not isinstance(load_exporter(name), ProvableExporter):
            reason = "this export has no program that asks the trainer"
        elif (python := proof.find_interpreter(name)) is None:
            reason = f"{proof.describe_installation(name)}; then verify again"
        if python is None:
            unproven.append(f"parity of {name} {version}: {reason}")
            continue
        print_progress(f"forerun: asking {name} how it reads the export")
        try:
            problems = proof.prove(decision, name, version, python, export.out)
        except (proof.ProofError, ExportError) as error:  # the other trainers are asked anyway
            failures.append(str(error))
            continue
        proven.append(_record_proof(decision, folder, export, problems))
    if failures:
        raise proof.ProofError("verify", failures)
    return proven, unproven


def _record_proof(
    decision: Decision, folder: Path, export: Exported, problems: Sequence[str]
) -> str:
    """Attest how a trainer reads its export, and return a sentence about what that proves.

    Raises:
        GateError: The trainer would run something else.
    """
    name, version = export.trainer, export.version
    try:
        body: dict[str, Json] = {"version": version, "problems": [*problems]}
        attest(folder, f"parity-{name}", decision.digest, body)
    except OSError as error:  # the config may be in a folder that is not writable
        print_progress(
            f"forerun: {error.filename}: {error.strerror}: the answer of {name} is not saved"
        )
    if broken := [problem for problem in problems if not problem.endswith(PREDICTED_MARK)]:
        head = f"{export.out}: {name} would run something else, or the files are stale:"
        raise GateError("\n".join([head, *broken]))
    schedule = decision.learning_rate.schedule
    num_steps, num_read = schedule.num_steps, len(choose_proof_steps(schedule))
    steps = "every step"
    if num_read != num_steps:
        steps = f"{num_read:,} of {format_counted(num_steps, 'step')}"
    if problems:
        differences = format_counted(len(problems), "difference")
        steps += f", except for {differences} listed in its fidelity report"
    return f"parity of {name} {version}: every parameter's numbers, the learning rate of {steps}"


_NOT_ASKED = (
    "your own trainer: call forerun.hook.prove in its script, then `forerun verify --prove` starts "
    "it for five steps"
)


def _prove_own_trainer(decision: Decision, folder: Path) -> tuple[list[str], list[str]]:
    """Start the user's own script, and return the sentences about what that has proven and about
    what it could not prove.

    Raises:
        GateError: The script does something else than is frozen.
        ProofError: The script could not be started or did not report.
    """
    from forerun._launcher.main_run.supervisor import user_proof
    from forerun._launcher.study.stages.study_folder import read_recorded_study

    study = read_recorded_study(folder.resolve().parent.parent)
    print_progress(
        "forerun: starting your own trainer twice: up to its first step at a reference width, then "
        "for five steps"
    )
    places = UserRunFolders(run_dir=folder, code_dir=study.code_dir, corpus=study.corpus)
    problems, notes, report = user_proof.prove(decision, places)
    attest(folder, "parity-command", decision.digest, {"problems": [*problems], "notes": [*notes]})
    if problems:
        head = "your own trainer does something else than is frozen:"
        raise GateError("\n".join([head, *problems]))
    tensors = format_counted(len(report.parameters), "parameter tensor")
    seen = (
        f"{tensors} of {format_counted(report.num_params, 'number')}, "
        f"{format_counted(len(report.observed), 'step')}"
    )
    sentence = "rates, decay, initial spread, batch and clipping as frozen"
    return [f"your own trainer: {seen}: {sentence}"], [*notes]


@click.command()
@frozen_argument
@click.option(
    "--to",
    "trainer",
    required=True,
    metavar="TRAINER[@VERSION]",
    help=f"One of: {', '.join(EXPORTER_MODULES)}.",
)
@click.option("--out", type=PATH, help="Default: exports/TRAINER beside the config.")
@click.option(
    "--weights",
    type=PATH,
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
    """Write a FROZEN config as a trainer's own files, with a fidelity report.

    The folder --out must be empty, or hold an earlier export. Exit 3 if the trainer cannot express
    everything.
    """
    name, _, version = trainer.partition("@")
    if name not in EXPORTER_MODULES:
        raise click.BadParameter(f"--to {trainer}: must be one of {', '.join(EXPORTER_MODULES)}")
    if weights is not None and (full or allow_lossy):
        raise click.UsageError("--full and --allow-lossy: only without --weights")
    decision, folder = read_sound_config(frozen)
    folder = folder.resolve()
    if weights is not None:
        if name != "huggingface" or version:
            raise click.BadParameter(f"--to {trainer}: weights are written for huggingface only")
        print_result(as_json, *_export_weights(decision, folder, weights, out))
        return
    target = _choose_target(folder, name, out)
    report, num_files = _write_export(decision, folder, target, name, version, allow_lossy)
    body = {
        "trainer": name,
        "version": report.version,
        "out": str(target) if num_files else None,
        "entries": cast(list[Json], canon.to_json(report.entries)),
    }
    if not num_files:
        print_result(
            as_json, body, "\n".join(_format_fidelity(report, "nothing written", full=full))
        )
        _advise_on_loss(report)
        raise SystemExit(ExitCode.GATE)
    shown_path = target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target
    done = f"{format_counted(num_files, 'file')} in {shown_path}"
    check = "(verify checks only exports beside the config) "
    if target.is_relative_to(folder):
        check = f"forerun verify {shorten_config_name(frozen)}, then "
    lines = [
        *_format_fidelity(report, done, full=full),
        f"there: {FIDELITY_FILE}, field by field; {RUN_FILE}, whose first lines say what it needs",
        f"next: {check}{RUN_FILE} there",
    ]
    print_result(as_json, body, "\n".join(lines))


def _write_export(
    decision: Decision, folder: Path, target: Path, name: str, version: str, allow_lossy: bool
) -> tuple[FidelityReport, int]:
    """Write an export to `target`, and attest it if it is next to the config.

    Returns:
        The fidelity report, and the number of files; 0 if something is lost, which `allow_lossy`
        does not allow.
    """
    from forerun._launcher.main_run.exporters.export_writer import make_scratch, replace_folder

    is_beside, writer = target.is_relative_to(folder), load_exporter(name)
    with make_scratch(target) as scratch:  # a refused export leaves no files behind
        report = writer.export(decision, scratch, version or writer.VERSIONS[-1])
        if report.lost and not allow_lossy:
            return report, 0
        canon.write_atomic(scratch / FIDELITY_FILE, canon.to_pretty_json(report))
        files = {file: canon.hash_file(scratch / file) for file in list_file_kinds(scratch)}
        attested = _list_attested_files(folder, name, decision.digest)
        _check_room(target, {*files, *attested} if is_beside else set())
        replace_folder(scratch, target)
    if is_beside:
        body: dict[str, Json] = {
            "trainer": name,
            "version": report.version,
            "out": f"exports/{name}",
            "files": {**files},
        }
        attest(folder, f"export-{name}", decision.digest, body)
    return report, len(files)


def _advise_on_loss(report: FidelityReport) -> None:
    """Print how to change the plan so that the trainer can express everything."""
    lost, trainer = [entry.field for entry in report.lost], report.trainer
    advice = "Add"
    if trainer == "megatron-lm" and (remedies := "; ".join(list_plan_remedies(lost))):
        advice = f"Set in the plan of a new study (--fork keeps what it can): {remedies}; or add"
    print_progress(
        f"forerun: {trainer} cannot express {_name_some(lost)}. {advice} --allow-lossy to train "
        f"with {trainer}'s own numbers"
    )


def _export_weights(
    decision: Decision, folder: Path, place: Path, out: Path | None
) -> tuple[dict[str, Json], str]:
    """Write a checkpoint as a model that transformers loads; return the answer."""
    from forerun._launcher.main_run.exporters.trainers.huggingface_weights import (
        find_checkpoint,
        write_weights,
    )
    from forerun._launcher.study.stages.study_folder import read_recorded_study

    checkpoint = find_checkpoint(place)
    target = out or checkpoint.parent.parent / f"huggingface-{checkpoint.name}"
    study_dir = find_study(folder)
    corpus = None if study_dir is None else read_recorded_study(study_dir).corpus
    num_params, left_out = write_weights(decision, checkpoint, target, corpus)
    text = f"{format_counted(num_params, 'weight')} of {checkpoint.name} in {target}"
    text += f"; {left_out}" if left_out else ""
    body: dict[str, Json] = {
        "trainer": "huggingface",
        "out": str(target),
        "checkpoint": str(checkpoint),
        "num_params": num_params,
        "without": left_out,
    }
    load = f'transformers.AutoModelForCausalLM.from_pretrained("{target}")'
    return body, f"{text}\nnext: in Python, {load}"


def _format_fidelity(report: FidelityReport, done: str, *, full: bool) -> list[str]:
    """Format how faithful an export is, and what is lost.

    Args:
        report: Fidelity report of the export.
        done: Text on the number of files that were written, and their folder.
        full: Whether to list the conditions of equivalent fields.
    """
    counts = Counter(entry.verdict for entry in report.entries)
    head = (
        f"{report.trainer} {report.version}: {done}; fields exact: {counts['exact']}; equivalent: "
        f"{counts['equivalent']}; not expressible: {counts['not_expressible']}"
    )
    lines = [head]
    if full:
        fields_by_condition: dict[str, list[str]] = {}
        for entry in report.entries:
            if entry.verdict == "equivalent":
                fields_by_condition.setdefault(entry.note, []).append(entry.field)
        lines += [
            f"  equivalent: {_name_some(fields)}: {note}"
            for note, fields in fields_by_condition.items()
        ]
    return [*lines, *(f"  lost: {entry.field}: {entry.note}" for entry in report.lost)]


def _name_some(names: list[str], max_shown: int = 1) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - max_shown} more" if len(names) > max_shown else ""
    return ", ".join(names[:max_shown]) + more


def _choose_target(folder: Path, trainer: str, out: Path | None) -> Path:
    """Return the folder of an export: `exports/TRAINER` in the config's folder, or a folder outside
    of it.

    Raises:
        click.BadParameter: The folder is elsewhere in the config's folder, or is a file.
    """
    default = folder / "exports" / trainer
    target = (out or default).resolve()
    if target != default and (target.is_relative_to(folder) or out is None):
        raise click.BadParameter(
            f"--out {target}: an export in the config's folder must be in {default}; choose that, "
            "or a folder elsewhere"
        )
    if target.exists() and not target.is_dir():
        raise click.BadParameter(f"--out {target}: must be a folder, empty or new")
    return target


def _list_attested_files(folder: Path, trainer: str, digest: str) -> set[str]:
    """Return the files of the present export, from its attestation; empty if that cannot be
    read.
    """
    try:
        files = read_attestation(get_attestation_path(folder, f"export-{trainer}"), digest).get(
            "files"
        )
    except TamperedError:
        return set()
    return set(files) if isinstance(files, dict) else set()


def _check_room(target: Path, export_files: set[str]) -> None:
    """Check that every file in `target` may be replaced.

    Args:
        target: Folder of an export.
        export_files: Files that an export has written or will write there; empty if the folder is
            not in the config's folder, so that it must be empty too.

    Raises:
        click.BadParameter: The folder holds other files, such as the output of a run; some are
            named.
    """
    if strangers := sorted(set(list_file_kinds(target)) - export_files):
        raise click.BadParameter(
            f"--out {target}: it holds files that no export wrote: "
            f"{_name_some(strangers, max_shown=8)}; choose an empty folder"
        )
