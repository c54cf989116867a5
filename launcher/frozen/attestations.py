"""What lies beside a frozen config: evidence, exports, launches. Each names the digest and carries its own hash."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Literal

from launcher.base.plain_files import read_plain
from launcher.frozen.frozen import TamperedError
from proxies.core import canon

CheckOutcome = Literal["passed", "failed", "cannot_tell"]
"""What a gate or a rehearsal found."""


def path_of(folder: Path, kind: str) -> Path:
    """Where a config's attestation of that kind lies, if there is one."""
    return folder / "attestations" / f"{kind}.json"


def attest(folder: Path, kind: str, digest: str, body: dict[str, canon.Json]) -> Path:
    """Put an attestation beside a launch config: `attestations/<kind>.json`."""
    created_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    content: dict[str, canon.Json] = {"kind": kind, "digest": digest, "created_at": created_at, "body": body}
    path = path_of(folder, kind)
    canon.make_folder(path.parent)
    canon.write_atomic(path, canon.pretty({**content, "sha256": canon.content_id(content)}))
    return path


def read_attestation(path: Path, digest: str) -> dict[str, canon.Json]:
    """The body of an attestation for `digest`.

    Raises:
        TamperedError: it was edited, or is for another config.
    """
    try:
        value = canon.parse(read_plain(path))
        claimed = value.pop("sha256", None) if isinstance(value, dict) else None
        actual = canon.content_id(value)
    except OSError as error:
        raise _tampered(path, f"cannot be read: {error.strerror}") from error
    except (canon.CanonError, RecursionError) as error:
        raise _tampered(path, str(error)) from error
    if not isinstance(value, dict) or not isinstance(value.get("body"), dict):
        raise _tampered(path, "not an attestation")
    if actual != claimed:
        raise _tampered(path, "its content does not have its hash")
    if value.get("kind") != path.stem:
        raise _tampered(path, f"it is of the kind {value.get('kind')!r:.40}")
    if value.get("digest") != digest:
        raise _tampered(path, f"it is for the digest {str(value.get('digest'))[:16]}...")
    body = value["body"]
    assert isinstance(body, dict)
    return body


def created_at(path: Path) -> str:
    """When a sound attestation was made: UTC, ISO 8601; empty where it does not say."""
    value = canon.parse(read_plain(path))
    return str(value.get("created_at", "")) if isinstance(value, dict) else ""


def _tampered(path: Path, what: str) -> TamperedError:
    return TamperedError(str(path), [f"{what}; restore it from a copy, or remove it: the verb that wrote it can again"])
