"""What was worked out of a study's records, kept beside them in `findings.json`: seconds of work,
once.

This protects against accidents and stale versions, not against someone who may write in the study
folder: a file forged with its hash is used (acceptances are read from the ledger all the same).
`freeze` computes anew, and is what counts.

The file is read only if it holds its own sha256 and the key of what is asked now: the head of the
chain, which the caller has just recomputed from every record, the plan, and what computes (our
sources, Python, the libraries). The files that were read besides must have the bytes they had.
Anything else is worked out anew and written over it; where nothing can be written, nothing is kept,
and nothing fails.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.plain_files import read_plain, require_plain

if TYPE_CHECKING:
    from launcher.plan.study import Study
    from sweeps.store.ledger import Ledger

FINDINGS_FILE = "findings.json"
_LIBRARIES = ("forerun", "mup", "numpy", "scipy", "torch")
_OURS = ("launcher", "proxies", "scaling_fits", "sweeps", "transfer")


def key_of(study: Study, ledger: Ledger) -> str:
    """Name what findings are a function of, beside the files that `cached` is given; the ledger as
    just read.
    """
    return canon.content_id(
        {
            "head": ledger.head_hash,
            "plan": study.plan.model_dump_json(),
            "manifest": canon.to_json(study.manifest),
            # messages name them
            "places": [str(place) for place in (study.study_dir, study.corpus, study.code_dir)],
            "computes": _computes(),
        }
    )


@functools.cache
def _computes() -> str:
    """Hash of everything that computes; some hundred small files of ours, in hundredths of a
    second.
    """
    root = Path(__file__).parents[2]
    sources = sorted(path for name in _OURS for path in (root / name).rglob("*.py"))
    hashes = {str(path.relative_to(root)): canon.file_sha256(path) for path in sources}
    return canon.content_id([hashes, [*map(_version, _LIBRARIES)], sys.version, platform.machine()])


def _version(name: str) -> str:
    """Of a distribution; empty where it is not installed, as forerun's own run from its sources."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cached(
    study_dir: Path,
    key: str,
    compute: Callable[[], tuple[dict[str, Json], Iterable[Path] | None]],
    *,
    anew: bool,
) -> dict[str, Json]:
    """What `compute` gives, or gave earlier for the same key; the same value either way, to the
    order of its keys.

    Args:
        study_dir: where the file lies.
        key: of `key_of`.
        compute: gives the findings, and which files in `study_dir` they were made of; None: they
            are not to be kept.
        anew: compute whatever is kept.

    Raises:
        OSError: the file is a pipe, socket, device or folder.
    """
    path = study_dir / FINDINGS_FILE
    with contextlib.suppress(FileNotFoundError):
        require_plain(path)
    kept = None if anew else _read(path, key)
    if kept is not None:
        return kept
    findings, files = compute()
    plain = cast(dict[str, Json], canon.to_json(findings))
    if files is not None:
        with contextlib.suppress(OSError):
            _write(
                path,
                key,
                {str(file.relative_to(study_dir)): canon.file_sha256(file) for file in files},
                plain,
            )
    return plain


def _write(path: Path, key: str, files: dict[str, str], findings: dict[str, Json]) -> None:
    """Raises OSError."""
    entry = {"key": key, "files": files, "findings": findings}
    # The findings' keys in their own order, which what people read follows.
    content = json.dumps(
        {"sha256": canon.content_id(entry), **entry}, ensure_ascii=False, allow_nan=False
    )
    canon.write_atomic(path, content.encode())


def _read(path: Path, key: str) -> dict[str, Json] | None:
    """The findings in a file; None where it is not wholly what was written for this key."""
    try:
        entry = canon.parse(read_plain(path))
        if not isinstance(entry, dict) or entry.get("key") != key:
            return None
        if entry.pop("sha256", None) != canon.content_id(entry):
            return None
        files, findings = entry.get("files"), entry.get("findings")
        if not isinstance(files, dict) or not isinstance(findings, dict):
            return None
        if any(canon.file_sha256(path.parent / name) != digest for name, digest in files.items()):
            return None
    except (OSError, ValueError, RecursionError, canon.CanonError):
        return None
    return findings
