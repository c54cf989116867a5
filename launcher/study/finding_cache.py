"""A cache of the findings of a study, `findings.json`, because computing them takes seconds.

The cache protects against accidents and stale versions, not against a person who may write in the
study folder: a forged file with a matching hash is used (acceptances are still read from the
ledger). `freeze` always computes anew, and its result counts.

The file is used only if it holds its own sha256 and the key of the current question: the head of
the hash chain, which the caller has just recomputed from every record, the plan, and everything
that computes (our sources, Python, the libraries). The other files that were read must have the
bytes they had. Otherwise the findings are computed anew and the file is overwritten. If the file
cannot be written, nothing is kept, and nothing fails.
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
_PACKAGES = ("launcher", "proxies", "scaling_fits", "sweeps", "transfer")


def key_of(study: Study, ledger: Ledger) -> str:
    """Return the key of everything that the findings depend on, except the files that `cached` is
    given. The ledger must have been read just now.
    """
    return canon.content_id(
        {
            "head": ledger.head_hash,
            "plan": study.plan.model_dump_json(),
            "manifest": canon.to_json(study.manifest),
            # Messages in the findings name these paths.
            "places": [str(place) for place in (study.study_dir, study.corpus, study.code_dir)],
            "computes": _hash_software(),
        }
    )


@functools.cache
def _hash_software() -> str:
    """Return a hash of everything that computes. It reads some hundred small files of ours in
    hundredths of a second.
    """
    root = Path(__file__).parents[2]
    sources = sorted(path for name in _PACKAGES for path in (root / name).rglob("*.py"))
    hashes = {str(path.relative_to(root)): canon.file_sha256(path) for path in sources}
    return canon.content_id(
        [hashes, [*map(_find_version, _LIBRARIES)], sys.version, platform.machine()]
    )


def _find_version(name: str) -> str:
    """Return the version of a distribution; empty if it is not installed, as forerun itself when it
    runs from its sources.
    """
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
    """Return what `compute` returns, or returned earlier for the same key. Both ways give the same
    value, including the order of its keys.

    Args:
        study_dir: Folder of the cache file.
        key: Key from `key_of`.
        compute: Returns the findings, and the files in `study_dir` that they depend on; None for
            the files if the findings must not be kept.
        anew: Whether to compute even if the cache has an entry.

    Raises:
        OSError: The cache file is a pipe, socket, device, or folder.
    """
    path = study_dir / FINDINGS_FILE
    with contextlib.suppress(FileNotFoundError):
        require_plain(path)
    kept = None if anew else _read_cache(path, key)
    if kept is not None:
        return kept
    findings, files = compute()
    plain = cast(dict[str, Json], canon.to_json(findings))
    if files is not None:
        with contextlib.suppress(OSError):
            _write_cache(
                path,
                key,
                {str(file.relative_to(study_dir)): canon.file_sha256(file) for file in files},
                plain,
            )
    return plain


def _write_cache(path: Path, key: str, files: dict[str, str], findings: dict[str, Json]) -> None:
    """Write the cache file.

    Raises:
        OSError: The file cannot be written.
    """
    entry = {"key": key, "files": files, "findings": findings}
    # Keys keep their order, because text for people follows it.
    content = json.dumps(
        {"sha256": canon.content_id(entry), **entry}, ensure_ascii=False, allow_nan=False
    )
    canon.write_atomic(path, content.encode())


def _read_cache(path: Path, key: str) -> dict[str, Json] | None:
    """Return the findings in a file; None if it is not exactly what was written for this key."""
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
