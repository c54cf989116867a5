"""The folder of a frozen config: written completely or not at all, and checked file by file."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forerun._launcher.main_run.checkpoint_folders import list_file_kinds
from forerun._launcher.main_run.frozen.frozen import Decision, FrozenError, TamperedError
from forerun._launcher.main_run.frozen.launch_file import (
    LAUNCH_FILE,
    RUN_FILE,
    attest,
    get_attestation_path,
    read_attestation,
    read_launch,
    write_launch,
)
from forerun._proxies.core import canon
from forerun._sweeps.store.ledger import LEDGER_NAME

ATTESTED = ("evidence", "provenance", "environment")
"""Kinds of attestations that every frozen config has."""
_PART = ".part"
"""Suffix of a folder that is being written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """An export in the folder of a config, as its attestation describes it."""

    trainer: str
    version: str
    out: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderContents:
    """The files in the folder of a frozen config, all of which have passed their checks."""

    unchanged: tuple[str, ...]
    """A sentence for each check that holds."""
    exports: tuple[Exported, ...]


def write_frozen(
    frozen_dir: Path, decision: Decision, attested: Mapping[str, dict[str, canon.Json]]
) -> Path:
    """Write launch file and attestations to `<frozen_dir>/<digest>/`, and return the launch file.

    An existing folder keeps its other files. Call it in one process only: each call removes the
    unfinished folder that a killed process may have left.

    Args:
        frozen_dir: Folder of all frozen configs of a study.
        decision: The decision.
        attested: Body of each attestation by kind.

    Raises:
        OSError: The disk is full, or the folder is not writable.
    """
    folder, scratch = frozen_dir / decision.digest, frozen_dir / f"freezing{_PART}"
    shutil.rmtree(scratch, ignore_errors=True)
    exists = folder.exists()
    try:
        path = write_launch(frozen_dir if exists else scratch, decision)
        for kind, body in attested.items():
            attest(path.parent, kind, decision.digest, body)
        if not exists:
            path.parent.rename(folder)
            canon.sync_folder(frozen_dir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder / LAUNCH_FILE


def find_study(folder: Path) -> Path | None:
    """Return the study to which a config's folder belongs.

    None if the folder is not in the `frozen/` of a study with a ledger, the file in which a study
    records its runs.
    """
    frozen_dir = (folder if folder.parent.name == "frozen" else folder.resolve()).parent
    has_ledger = (frozen_dir.parent / LEDGER_NAME).is_file()
    return frozen_dir.parent if frozen_dir.name == "frozen" and has_ledger else None


def find_edited(study_dir: Path) -> list[str]:
    """Return the problems of a study's frozen configs: unreadable or edited launch files, and
    missing, edited, or foreign attestations.
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


def check_files(folder: Path, digest: str) -> FolderContents:
    """Check every file of a config except the launch file's content.

    Attestations are checked by their digest and hash, and exports by their attestations.

    Raises:
        TamperedError: Something was changed, removed, added to an export, or is not a plain file.
    """
    bodies, problems = find_attestations(folder, digest, needed=ATTESTED)
    if problems:
        raise TamperedError(str(folder), [*itertools.chain(*problems.values())])
    exports_dir = folder / "exports"
    unchanged, exports = [], []
    for kind, body in bodies.items():
        unchanged.append(f"attestation {kind}")
        if kind.startswith("export-"):
            export, num_files = _check_export(folder, get_attestation_path(folder, kind), body)
            unchanged.append(f"files of {export.trainer}: {num_files} unchanged")
            exports.append(export)
    if exports_dir.exists() and not exports_dir.is_dir():
        raise TamperedError(str(exports_dir), ["it must be a folder: remove it"])
    attested = {export.trainer for export in exports}
    for entry in sorted(exports_dir.iterdir()) if exports_dir.exists() else ():
        # A stopped export may have left a partial folder.
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
        The bodies of sound attestations by kind, and the problems of all others by kind. If the
        launch file is a link, that is a problem under the key `launch`.
    """
    bodies: dict[str, dict[str, canon.Json]] = {}
    problems: dict[str, list[str]] = {}
    if (folder / LAUNCH_FILE).is_symlink():
        advice = "it must be a plain file; copy the file there, or freeze again"
        problems["launch"] = [f"{LAUNCH_FILE} is a link: {advice}"]
    file_kinds = {
        name.removesuffix(".json"): kind
        for name, kind in sorted(list_file_kinds(folder / "attestations").items())
        if name.endswith(".json") and "/" not in name
    }
    for name, file_kind in file_kinds.items():
        place = f"attestations/{name}.json"
        if file_kind != "file":
            advice = "it must be a plain file; remove it and run the verb that wrote it again"
            problems[name] = [f"{place} is a {file_kind}: {advice}"]
            continue
        try:
            bodies[name] = read_attestation(get_attestation_path(folder, name), digest)
        except TamperedError as error:
            problems[name] = [f"{place}: {problem}" for problem in error.problems]
    for name in needed:
        if name not in file_kinds:
            problems[name] = [
                f"attestations/{name}.json is missing: `forerun freeze` writes it again"
            ]
    return bodies, problems


def _check_export(folder: Path, path: Path, body: dict[str, canon.Json]) -> tuple[Exported, int]:
    """Return the export that an attestation describes, and its number of files.

    Raises:
        TamperedError: A file was changed, removed, or added, or the attestation describes no
            export.
    """
    trainer = path.stem.removeprefix("export-")
    version, files = body.get("version"), body.get("files")
    is_named = (body.get("trainer"), body.get("out")) == (trainer, f"exports/{trainer}")
    has_hashes = isinstance(files, dict) and all(isinstance(sha, str) for sha in files.values())
    if not isinstance(version, str) or not isinstance(files, dict) or not (is_named and has_hashes):
        raise TamperedError(
            str(path), ["it does not describe an export: `forerun export` writes both again"]
        )
    out = folder / "exports" / trainer
    kinds = list_file_kinds(out)
    problems = [f"{name} is missing" for name in files if name not in kinds]
    problems += [f"{name} was added" for name in kinds if name not in files]
    for name, kind in kinds.items():
        if name not in files:
            continue
        if kind != "file":
            problems.append(f"{name} is a {kind}: it must be a plain file")
        elif canon.hash_file(out / name) != files[name]:
            problems.append(f"{name} was changed")
        elif name == RUN_FILE and not (out / name).stat().st_mode & 0o100:
            problems.append(
                f"{name} is no longer executable: run chmod +x, or `forerun export` again"
            )
    if problems:
        advice = f"`forerun export --to {trainer}` writes all files again"
        raise TamperedError(str(out), [*problems, advice])
    return Exported(trainer=trainer, version=version, out=out), len(files)
