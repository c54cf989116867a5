"""A frozen config in other hands: `export` writes a trainer's own files, `verify` proves what lies in its folder."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from launcher.exporters.fidelity import MODULES
from launcher.exporters.refused import REFUSED
from launcher.gates import GateError
from launcher.talk import say
from launcher.verbs.options import answer, folder_of, frozen_argument, json_option
from proxies import canon
from proxies.canon import Json

if TYPE_CHECKING:
    from launcher.exporters.fidelity import FidelityReport
    from launcher.frozen import Decision

FIDELITY_FILE = "fidelity.json"


@click.command()
@frozen_argument
@json_option
def verify(frozen: Path, as_json: bool) -> None:
    """Check a FROZEN config (its folder, or launch.json): digest, attestations, exports, optimizer groups.

    Where an export's trainer is installed (`make trainers`), it is asked what it makes of the files: every parameter's
    numbers, the learning rate of every step. Exit 5 if anything was changed, 3 if a trainer would run something else.
    """
    from launcher.attestations import read_attestation
    from launcher.exporters import native
    from launcher.frozen import TamperedError
    from launcher.launch_file import read_launch

    decision = read_launch(frozen)
    folder = folder_of(frozen)
    done: list[Json] = [f"digest {decision.digest}"]
    if mismatches := native.parity(decision):
        raise GateError("\n".join([f"{folder}: the embedded trainer's groups are not the frozen ones:", *mismatches]))
    done.append("the embedded trainer builds the frozen optimizer groups, each parameter in exactly one")
    if not (folder / "attestations" / "evidence.json").is_file():
        raise TamperedError(str(folder), ["attestations/evidence.json is missing: `forerun freeze` writes it again"])
    exports: list[dict[str, Json]] = []
    for path in sorted((folder / "attestations").glob("*.json")):
        body = read_attestation(path, decision.digest)
        done.append(f"attestation {path.stem}")
        if isinstance(body.get("files"), dict):
            done.append(_verify_export(folder, body))
            exports.append(body)
    attested = {path.stem for path in (folder / "attestations").glob("export-*.json")}
    for export_dir in sorted((folder / "exports").glob("*")):
        if f"export-{export_dir.name}" not in attested:
            raise TamperedError(str(export_dir), ["no attestation names it: `forerun export` makes it anew"])
    proven, open_ = _proofs(decision, folder, exports)
    done += proven
    lines = [*(f"ok  {line}" for line in done), *(f"not proven  {line}" for line in open_)]
    answer(as_json, {"digest": decision.digest, "verified": done, "not_proven": open_}, "\n".join(lines))


def _verify_export(folder: Path, body: dict[str, Json]) -> str:
    """The export an attestation names, file by file: none changed, missing or added."""
    from launcher.frozen import TamperedError

    files, out = body["files"], folder / str(body.get("out"))
    assert isinstance(files, dict)
    there = {
        str(path.relative_to(out)) for path in out.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    wrong = [f"{name} is missing" for name in files if name not in there]
    wrong += [f"{name} was added" for name in sorted(there) if name not in files]
    wrong += [f"{name} was changed" for name in files if name in there and canon.file_sha256(out / name) != files[name]]
    if wrong:
        raise TamperedError(str(out), wrong)
    return f"files of {out.name}: {len(files)} unchanged"


def _proofs(decision: Decision, folder: Path, exports: list[dict[str, Json]]) -> tuple[list[Json], list[Json]]:
    """What each export's own trainer makes of it: proven, and not proven for want of the trainer.

    Raises:
        GateError: a trainer would run something else.
        ProofError: a trainer could not be asked.
    """
    from launcher.attestations import attest
    from launcher.exporters import proof
    from launcher.exporters.view import TOLD

    proven: list[Json] = []
    open_: list[Json] = []
    silent: list[str] = []
    for body in exports:
        name, version = str(body["trainer"]), str(body["version"])
        if name == "native":
            continue  # proven above, and again by every rank that trains
        unreleased = version.startswith("main")
        python = proof.interpreter(f"{name}-main" if unreleased else name)
        if python is None:
            variable = f"FORERUN_{name.upper().replace('-', '_')}_MAIN_PYTHON names a Python that has it"
            mend = variable if unreleased else f"`make trainers TRAINERS={name}` installs it"
            open_.append(f"parity of {name} {version}: {mend}; then verify again")
            continue
        say(f"forerun: asking {name} what it makes of the export")
        try:
            problems = proof.prove(decision, name, version, python, folder / str(body["out"]))
        except proof.ProofError as error:  # the others are asked all the same
            silent.append(str(error))
            continue
        broken = [problem for problem in problems if not problem.endswith(TOLD)]
        attest(folder, f"parity-{name}", decision.digest, {"version": version, "problems": [*problems]})
        if broken:
            raise GateError("\n".join([f"{folder / str(body['out'])}: {name} would run something else:", *broken]))
        but = f", but for {len(problems)} differences that its fidelity report tells of" if problems else ""
        proven.append(f"parity of {name} {version}: every parameter's numbers, the learning rate of every step{but}")
    if silent:
        raise proof.ProofError("verify", silent)
    return proven, open_


@click.command()
@frozen_argument
@click.option("--to", "trainer", required=True, metavar="TRAINER[@VERSION]", help=f"One of: {', '.join(MODULES)}.")
@click.option("--out", type=click.Path(path_type=Path), help="Default: exports/TRAINER beside the config.")
@click.option("--allow-lossy", is_flag=True, help="Export although something cannot be expressed.")
@json_option
def export(frozen: Path, trainer: str, out: Path | None, allow_lossy: bool, as_json: bool) -> None:
    """A FROZEN config as a trainer's own files, with a fidelity report. Exit 3 if something cannot be expressed."""
    from launcher.attestations import attest
    from launcher.exporters.fidelity import exporter
    from launcher.launch_file import read_launch

    name, _, version = trainer.partition("@")
    if name in REFUSED:
        raise click.BadParameter(f"--to {trainer}: there is no export to {name}: {REFUSED[name]}")
    if name not in MODULES:
        raise click.BadParameter(f"--to {trainer}: one of {', '.join(MODULES)} is wanted")
    decision = read_launch(frozen)
    folder = folder_of(frozen).resolve()
    target = _target(folder, name, out)
    write = exporter(name)
    wanted = version or write.VERSIONS[-1]
    with tempfile.TemporaryDirectory(prefix="forerun-export-") as scratch:  # what is refused leaves nothing behind
        report = write.export(decision, Path(scratch), wanted)
        names = _files_in(Path(scratch)) | {FIDELITY_FILE}
    refused = bool(report.lost) and not allow_lossy
    if not refused:
        beside = target.is_relative_to(folder)
        _make_room(target, names, _attested_files(folder, name, decision.digest) if beside else None)
        write.export(decision, target, wanted)
        canon.write_atomic(target / FIDELITY_FILE, canon.pretty(report))
        files: dict[str, Json] = {file: canon.file_sha256(target / file) for file in sorted(names)}
        if beside:
            body: dict[str, Json] = {
                "trainer": name, "version": report.version, "out": str(target.relative_to(folder)), "files": files,
            }  # fmt: skip
            attest(folder, f"export-{name}", decision.digest, body)
    entries = cast(list[Json], canon.to_json(report.entries))
    answered = {"trainer": name, "version": report.version, "out": None if refused else str(target), "entries": entries}
    answer(as_json, answered, "\n".join(_told_of(report, target, len(names), refused)))
    if refused:
        say(f"forerun: {len(report.lost)} fields cannot be expressed in {name}: --allow-lossy accepts that")
        raise SystemExit(3)  # the answer is out already


def _told_of(report: FidelityReport, target: Path, num_files: int, refused: bool) -> list[str]:
    """An export in words."""
    done = "nothing is written" if refused else f"{num_files} files in {target}"
    lines = [f"{report.trainer} {report.version}: {done}"]
    for verdict in ("exact", "equivalent", "not_expressible"):
        count = sum(entry.verdict == verdict for entry in report.entries)
        lines.append(f"  {count} fields {verdict.replace('_', ' ')}")
    lines += [f"  lost: {entry.field}: {entry.note}" for entry in report.lost]
    return lines if refused else [*lines, f"  field by field: {target / FIDELITY_FILE}"]


def _target(folder: Path, trainer: str, out: Path | None) -> Path:
    """Where an export goes: outside the config's folder, or in its own place there."""
    own = folder / "exports" / trainer
    target = (out or own).resolve()
    if folder.is_relative_to(target):
        raise click.BadParameter(f"--out {target}: it holds the frozen config itself; choose another folder")
    if target != own and (target.is_relative_to(folder) or out is None):
        raise click.BadParameter(f"--out {target}: beside the config an export lies in {own}; choose that, or a folder "
                                 "elsewhere")  # fmt: skip
    return target


def _files_in(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if not path.is_dir() and "__pycache__" not in path.parts
    }


def _attested_files(folder: Path, trainer: str, digest: str) -> set[str]:
    """Files of the export that lies there by its attestation; none if that cannot be read."""
    from launcher.attestations import read_attestation
    from launcher.frozen import TamperedError

    try:
        files = read_attestation(folder / "attestations" / f"export-{trainer}.json", digest).get("files")
    except TamperedError:
        return set()
    return set(files) if isinstance(files, dict) else set()


def _make_room(target: Path, names: set[str], earlier: set[str] | None) -> None:
    """Leave in `target` nothing but what the export will write over.

    Beside the config what an `earlier` export left, whole or in part, goes. Elsewhere (None) nothing is deleted, and
    files are written over only where a fidelity report says that they are an export's.

    Raises:
        click.BadParameter: it holds other files; some are named.
    """
    there = _files_in(target)
    left = set() if earlier is None else {f for f in there - names if f in earlier or re.search(r"\.\d+\.part$", f)}
    ours = names if earlier is not None or FIDELITY_FILE in there else set()
    if strangers := sorted(there - left - ours):
        shown = ", ".join(strangers[:8]) + (f" and {len(strangers) - 8} more" if len(strangers) > 8 else "")
        raise click.BadParameter(f"--out {target}: it holds what no export wrote: {shown}; choose an empty folder")
    for file in left:
        (target / file).unlink()
