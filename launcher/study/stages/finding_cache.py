"""A cache of the findings of a study, `findings.json`, because computing them takes seconds.

The cache protects against accidents and stale versions, not against a person who may write in the
study folder: a forged file with a matching hash is used (acceptances are still read from the
ledger). `freeze` does not use the cache.

The file is used only if its sha256 is right, and if its key belongs to the present records, plan,
and software (`_build_key`). Otherwise the findings are computed and the file is overwritten. If the
file cannot be written, nothing is kept, and nothing fails.
"""

from __future__ import annotations

import contextlib
import functools
import json
import platform
from collections.abc import Callable
from importlib import metadata
from typing import TYPE_CHECKING, cast

from forerun._launcher.study.stages.worker_pools import find_versions
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json, hash_sources
from forerun._proxies.core.plain_files import read_plain, require_plain
from forerun._sweeps.store.curves import CURVES_DIR

if TYPE_CHECKING:
    from pathlib import Path

    from forerun._launcher.study.plan.study import Study
    from forerun._sweeps.store.ledger import Ledger

FINDINGS_FILE = "findings.json"
"""Name of the cache in a study's folder."""


def load_or_compute(
    study: Study, ledger: Ledger, compute: Callable[[], tuple[dict[str, Json], bool]], *, anew: bool
) -> dict[str, Json]:
    """Return the findings from the cache, or else from `compute`. Both ways give the same value,
    including the order of its keys.

    Args:
        study: Study as it is recorded.
        ledger: Its ledger, read just now.
        compute: Returns the findings, and whether they may be kept.
        anew: Whether to compute even if the cache has an entry.

    Raises:
        OSError: The cache file is a pipe, socket, device, or folder.
    """
    path, key = study.study_dir / FINDINGS_FILE, _build_key(study, ledger)
    with contextlib.suppress(FileNotFoundError):
        require_plain(path)
    if not anew and (kept := _read_cache(path, key)) is not None:
        return kept
    computed, may_be_kept = compute()
    findings = cast(dict[str, Json], canon.to_json(computed))
    if may_be_kept:
        entry: dict[str, Json] = {"key": key, "findings": findings}
        # Keys keep their order, because text for people follows it.
        content = json.dumps(
            {"sha256": canon.compute_content_id(entry), **entry}, ensure_ascii=False
        )
        with contextlib.suppress(OSError):
            canon.write_atomic(path, content.encode())
    return findings


def _build_key(study: Study, ledger: Ledger) -> str:
    """Return the key of everything that the findings depend on.

    These are the head of the ledger's hash chain (just recomputed from every record), the plan, the
    corpus's manifest, the loss curves, and the versions of the software.
    """
    curves = [(path.name, path.stat()) for path in (study.study_dir / CURVES_DIR).glob("*")]
    return canon.compute_content_id(
        {
            "head": ledger.head_hash,
            "plan": study.plan.model_dump_json(),
            "manifest": canon.to_json(study.manifest),
            # Messages in the findings name these paths.
            "places": [str(place) for place in (study.study_dir, study.corpus, study.code_dir)],
            "curves": sorted(f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in curves),
            "computes": _describe_software(),
        }
    )


@functools.cache
def _describe_software() -> list[Json]:
    libraries = {name: metadata.version(name) for name in ("scipy", "mup")}
    return [hash_sources(), canon.to_json(libraries | find_versions()), platform.machine()]


def _read_cache(path: Path, key: str) -> dict[str, Json] | None:
    """Return the findings in a file; None if it is not exactly what was written for this key."""
    try:
        entry = canon.parse(read_plain(path))
        if not isinstance(entry, dict) or entry.pop("sha256", None) != canon.compute_content_id(
            entry
        ):
            return None
    except (OSError, ValueError, RecursionError, canon.CanonError):
        return None
    findings = entry.get("findings")
    return findings if entry.get("key") == key and isinstance(findings, dict) else None
