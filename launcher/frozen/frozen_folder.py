"""The folder of a frozen config: written whole or not at all, and looked through file by file."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from launcher.base.run_files import kinds_in
from launcher.frozen.frozen import Decision, FrozenError, TamperedError
from launcher.frozen.launch_file import (
    LAUNCH_FILE,
    RUN_FILE,
    attest,
    path_of,
    read_attestation,
    read_launch,
    write_launch,
)
from proxies.core import canon
from sweeps.store.ledger import LEDGER_NAME, Ledger

ATTESTED = ("evidence", "provenance", "environment")
"""What freezing always attests."""
_PART = ".part"
"""How a name ends while what it names is being written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """An export beside a config, as its attestation names it."""

    trainer: str
    version: str
    out: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderContents:
    """What lies in the folder of a frozen config."""

    unchanged: tuple[str, ...]
    """What holds, in words."""
    exports: tuple[Exported, ...]


def write_frozen(
    frozen_dir: Path, decision: Decision, attested: Mapping[str, dict[str, canon.Json]]
) -> Path:
    """Write `<frozen_dir>/<digest>/`, launch file and attestations; returns the launch file.

    A folder that is there already keeps what else lies in it. One process at a time: what a killed
    one left goes.

    Raises:
        OSError: the disk is full, or the folder is not writable.
    """
    folder, scratch = frozen_dir / decision.digest, frozen_dir / f"freezing{_PART}"
    shutil.rmtree(scratch, ignore_errors=True)
    again = folder.exists()
    try:
        path = write_launch(frozen_dir if again else scratch, decision)
        for kind, body in attested.items():
            attest(path.parent, kind, decision.digest, body)
        if not again:
            path.parent.rename(folder)
            canon.sync_folder(frozen_dir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder / LAUNCH_FILE


def study_of(folder: Path) -> Path | None:
    """The study whose `frozen/` a config's folder lies in; None where no ledger lies there."""
    place = folder if folder.parent.name == "frozen" else folder.resolve()
    study = place.parent.parent
    return study if place.parent.name == "frozen" and (study / LEDGER_NAME).is_file() else None


def edited(study_dir: Path) -> list[str]:
    """Return the problems of a study's frozen configs: edited launch files, and missing or foreign
    attestations.
    """
    problems = []
    for path in sorted((study_dir / "frozen").glob(f"*/{LAUNCH_FILE}")):
        try:
            decision = read_launch(path)
        except FrozenError as error:
            problems.append(str(error))
            continue
        _, by_kind = find_attestations(path.parent, decision.digest, needed=ATTESTED)
        problems += [f"{path.parent}: {problem}" for problem in itertools.chain(*by_kind.values())]
    return problems


def since_frozen(folder: Path, digest: str, ledger: Ledger) -> tuple[str, int | None, set[str]]:
    """A config's evidence against a ledger: the record it was frozen at, how many came after it,
    which runs are lost.

    The number is None where the ledger does not hold that record.

    Raises:
        TamperedError: the evidence was edited, or is not there.
    """
    evidence = read_attestation(path_of(folder, "evidence"), digest)
    head, hashes = str(evidence["ledger_head"]), [record.hash for record in ledger.stream()]
    since = len(hashes) - 1 - hashes.index(head) if head in hashes else None
    return head, since, set(cast(list[str], evidence["run_ids"])) - set(ledger.results())


def look_through(folder: Path, digest: str) -> FolderContents:
    """Every file beside a launch file: attestations by digest and hash, exports by their
    attestations.

    Raises:
        TamperedError: something was changed, taken away, added to an export, or is no plain file.
    """
    bodies, problems = find_attestations(folder, digest, needed=ATTESTED)
    if problems:
        raise TamperedError(str(folder), [*itertools.chain(*problems.values())])
    exports_dir = folder / "exports"
    unchanged, exports = [], []
    for kind, body in bodies.items():
        unchanged.append(f"attestation {kind}")
        if kind.startswith("export-"):
            export, num_files = _export(folder, path_of(folder, kind), body)
            unchanged.append(f"files of {export.trainer}: {num_files} unchanged")
            exports.append(export)
    if exports_dir.exists() and not exports_dir.is_dir():
        raise TamperedError(str(exports_dir), ["it must be a folder: remove it"])
    attested = {export.trainer for export in exports}
    for entry in sorted(exports_dir.iterdir()) if exports_dir.exists() else ():
        # which one that was stopped left
        if entry.name not in attested and not entry.name.endswith(_PART):
            raise TamperedError(
                str(entry), ["no attestation names it: `forerun export` writes it again"]
            )
    return FolderContents(unchanged=tuple(unchanged), exports=tuple(exports))


def find_attestations(
    folder: Path, digest: str, *, needed: Sequence[str]
) -> tuple[dict[str, dict[str, canon.Json]], dict[str, list[str]]]:
    """Read the attestations of a frozen config.

    Args:
        folder: Folder of the config.
        digest: Digest of the config, which each attestation must name.
        needed: Kinds of attestations that must exist.

    Returns:
        The bodies of sound attestations by kind, and the problems of the others by kind, or under
        `launch` for the launch file itself.
    """
    problems: dict[str, list[str]] = {}
    if (folder / LAUNCH_FILE).is_symlink():
        text = (
            f"{LAUNCH_FILE} is a link: it must be a plain file; copy the file there, or freeze "
            "again"
        )
        problems["launch"] = [text]
    kinds = {
        name.removesuffix(".json"): kind
        for name, kind in sorted(kinds_in(folder / "attestations").items())
        if name.endswith(".json") and "/" not in name
    }
    bodies = {}
    for name, kind in kinds.items():
        path = path_of(folder, name)
        place = f"attestations/{path.name}"
        if kind != "file":
            text = (
                f"{place} is a {kind}: it must be a plain file; remove it and run the verb that "
                "wrote it again"
            )
            problems.setdefault(name, []).append(text)
            continue
        try:
            bodies[name] = read_attestation(path, digest)
        except TamperedError as error:
            problems.setdefault(name, []).extend(
                f"{place}: {problem}" for problem in error.problems
            )
    for name in needed:
        if name not in kinds:
            text = f"attestations/{name}.json is missing: `forerun freeze` writes it again"
            problems.setdefault(name, []).append(text)
    return bodies, problems


def _export(folder: Path, path: Path, body: dict[str, canon.Json]) -> tuple[Exported, int]:
    """The export an attestation names and the number of its files: none changed, missing or added.

    Raises:
        TamperedError: one was, or the attestation is none of an export.
    """
    trainer, version, files = (
        path.stem.removeprefix("export-"),
        body.get("version"),
        body.get("files"),
    )
    sound = (
        isinstance(version, str)
        and isinstance(files, dict)
        and all(isinstance(sha, str) for sha in files.values())
    )
    if not sound or (body.get("trainer"), body.get("out")) != (trainer, f"exports/{trainer}"):
        raise TamperedError(
            str(path), ["it does not describe an export: `forerun export` writes both again"]
        )
    assert isinstance(version, str) and isinstance(files, dict)
    out = folder / "exports" / trainer
    kinds = kinds_in(out)
    wrong = [f"{name} is missing" for name in files if name not in kinds]
    wrong += [f"{name} was added" for name in kinds if name not in files]
    for name, kind in kinds.items():
        if name in files and kind != "file":
            wrong.append(f"{name} is a {kind}: it must be a plain file")
        elif name in files and canon.file_sha256(out / name) != files[name]:
            wrong.append(f"{name} was changed")
        elif name == RUN_FILE and name in files and not (out / name).stat().st_mode & 0o100:
            wrong.append(f"{name} is no longer executable: run chmod +x, or `forerun export` again")
    if wrong:
        raise TamperedError(
            str(out), [*wrong, f"`forerun export --to {trainer}` writes all files again"]
        )
    return Exported(trainer=trainer, version=version, out=out), len(files)
