"""The files of a frozen config: `frozen/<digest>/launch.json`, and its attestations.

Evidence, exports, and launches are recorded as attestations. Each attestation names the digest and
has a hash of its own. The evidence says which gates failed and were accepted at the freeze.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, Literal

from forerun._launcher.main_run.frozen.frozen import (
    SCHEMA_VERSION,
    Decision,
    FrozenError,
    TamperedError,
)
from forerun._proxies.core import canon
from forerun._proxies.core.plain_files import read_plain

# ---- Attestations ----

CheckOutcome = Literal["passed", "failed", "cannot_tell"]
"""Outcome of a gate or of a rehearsal."""
CHECKS = ("evidence", "attestations")
"""Checks of a frozen config, in addition to its digest, whose problems `forerun launch --accept`
can accept."""


def get_attestation_path(folder: Path, kind: str) -> Path:
    """Return the path of a config's attestation of this kind, whether or not it exists."""
    return folder / "attestations" / f"{kind}.json"


def attest(folder: Path, kind: str, digest: str, body: dict[str, canon.Json]) -> Path:
    """Write an attestation into the folder of a config.

    Args:
        folder: Folder of the config.
        kind: Kind of the attestation, which names its file.
        digest: Digest of the config.
        body: Content of the attestation.

    Returns:
        The path of the attestation.
    """
    content: dict[str, canon.Json] = {
        "kind": kind,
        "digest": digest,
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "body": body,
    }
    path = get_attestation_path(folder, kind)
    canon.make_folder(path.parent)
    canon.write_atomic(
        path, canon.to_pretty_json({**content, "sha256": canon.compute_content_id(content)})
    )
    return path


def read_attestation(path: Path, digest: str) -> dict[str, canon.Json]:
    """Return the body of an attestation.

    Raises:
        TamperedError: The attestation is missing or unreadable, was edited, or is for another
            digest.
    """
    try:
        value = canon.parse(read_plain(path))
        claimed = value.pop("sha256", None) if isinstance(value, dict) else None
        actual = canon.compute_content_id(value)
    except OSError as error:
        raise _make_error(path, f"cannot be read: {error.strerror}") from error
    except (canon.CanonError, RecursionError) as error:
        raise _make_error(path, str(error)) from error
    body = value.get("body") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(body, dict):
        raise _make_error(path, "not an attestation")
    if actual != claimed:
        raise _make_error(path, "its content does not match its hash")
    if value.get("kind") != path.stem:
        raise _make_error(path, f"its kind is {value.get('kind')!r:.40}")
    if value.get("digest") != digest:
        raise _make_error(path, f"it is for the digest {value.get('digest')!s:.16}...")
    return body


def _make_error(path: Path, problem: str) -> TamperedError:
    """Return the error for an attestation with a problem."""
    advice = "restore it from a copy, or remove it and run the verb that wrote it again"
    return TamperedError(str(path), [f"{problem}; {advice}"])


def read_creation_time(path: Path) -> str:
    """Return the time at which an attestation was written, in UTC and ISO 8601; empty if unknown.

    The attestation must have passed `read_attestation`.
    """
    value = canon.parse(read_plain(path))
    return str(value.get("created_at", "")) if isinstance(value, dict) else ""


# ---- Accepted gates ----


def format_acceptance(name: str, reason: str, *, failed: bool) -> str:
    """Return a line about an accepted gate, which either failed or cannot tell."""
    accepted = f"accepted with the reason: {reason}"
    if failed:
        return f"accepted failure: gate {name} failed, {accepted}"
    return f"gate {name} cannot tell, {accepted}"


def format_accepted_failures(folder: Path, digest: str) -> list[str]:
    """Return one line for each gate that had failed and was accepted at the freeze."""
    try:
        failures = read_accepted_failures(folder, digest)
    except TamperedError as error:  # `verify` refuses it, and `launch` unless a person accepts it
        return [f"it is not known which gates failed and were accepted: {error}"]
    return [format_acceptance(name, reason, failed=True) for name, reason in failures.items()]


def name_accepted_failures(folder: Path, digest: str) -> list[str]:
    """Return the names of the gates that had failed and were accepted at the freeze.

    The reasons, which a person wrote, are left out. Damaged evidence gives the name "not known".
    """
    try:
        return [*read_accepted_failures(folder, digest)]
    except TamperedError:
        return ["not known"]


def read_accepted_failures(folder: Path, digest: str) -> dict[str, str]:
    """Return the reason for each gate that had failed and was accepted at the freeze.

    Raises:
        TamperedError: The evidence is missing, was edited, or is for another config.
    """
    body: dict[str, Any] = read_attestation(get_attestation_path(folder, "evidence"), digest)
    accepted = body.get("accepted", {})
    return {
        gate["name"]: accepted[gate["name"]]
        for gate in body.get("gates", [])
        if gate["outcome"] == "failed" and gate["name"] in accepted
    }


# ---- The launch file ----

LAUNCH_FILE = "launch.json"
RUN_FILE = "run.sh"
"""Script that starts an export."""
_READERS = {5: "181fb6e"}
"""Commit that reads launch files of an older schema version."""
_OLDEST_READER = "7aa3a7b"
"""Commit that reads launch files of all schema versions older than the keys of `_READERS`."""
_MAX_MESSAGE_CHARS = 2000
_ADVICE = "restore it from a copy, or freeze again"


def write_launch(frozen_dir: Path, decision: Decision) -> Path:
    """Write `<frozen_dir>/<digest>/launch.json`; the same decision always gives the same bytes."""
    folder = frozen_dir / decision.digest
    canon.make_folder(folder)
    path = folder / LAUNCH_FILE
    canon.write_atomic(
        path, canon.to_pretty_json({"digest": decision.digest, "decision": decision})
    )
    return path


def read_launch(path: Path) -> Decision:
    """Read the decision of a launch file.

    Args:
        path: The launch file, or the folder that has it.

    Raises:
        FrozenError: The file cannot be read, or is not a launch file of the present schema.
        TamperedError: The content of the file does not have the digest that the file names.
    """
    file = path / LAUNCH_FILE if path.is_dir() else path
    digest, body = _read_digested(file)
    _require_present_schema(file, body)
    folder = file.parent
    is_named = folder.parent.name == "frozen" and len(folder.name) == canon.ID_LENGTH
    if is_named and folder.name != digest:
        problem = f"it has the digest {digest[:16]}..., but its folder is named after another"
        raise TamperedError(str(file), [f"{problem}; {_ADVICE}"])
    try:
        decision = canon.decode(Decision, body, "decision")
    except ValueError as error:
        message = str(error)  # The message may contain a value of megabytes.
        if len(message) > _MAX_MESSAGE_CHARS:
            half = _MAX_MESSAGE_CHARS // 2
            message = f"{message[:half]} ... {message[-half:]}"
        raise FrozenError(str(file), [message]) from error
    # A file with 1 instead of 1.0 decodes to the same decision, but has another digest.
    if decision.digest != digest:
        problem = "its numbers are not in the form that `forerun freeze` writes"
        raise TamperedError(str(file), [f"{problem}; {_ADVICE}"])
    return decision


def _read_digested(file: Path) -> tuple[str, canon.Json]:
    """Return the digest of a launch file and its decision as JSON, after a check that they agree.

    Raises:
        FrozenError: The file cannot be read, or is not a launch config.
        TamperedError: The decision has another digest.
    """
    try:
        value = canon.parse(read_plain(file))
        body = value.get("decision") if isinstance(value, dict) else None
        actual = canon.compute_content_id(body)
    except OSError as error:
        raise FrozenError(str(file), [f"cannot be read: {error.strerror}"]) from error
    except (canon.CanonError, RecursionError) as error:
        raise TamperedError(str(file), [f"{error}; {_ADVICE}"]) from error
    if not isinstance(value, dict) or set(value) != {"digest", "decision"}:
        raise FrozenError(
            str(file), ["a launch config must hold `digest` and `decision`, nothing else"]
        )
    if actual != value["digest"]:
        problem = (
            f"the content has the digest {actual[:16]}..., the file says {value['digest']!s:.16}..."
        )
        raise TamperedError(str(file), [f"{problem}; {_ADVICE}"])
    return actual, body


def _require_present_schema(file: Path, body: canon.Json) -> None:
    """Check the schema version of a decision.

    Raises:
        FrozenError: The version is another one. The error names a commit that reads an older one.
    """
    version = body.get("schema_version") if isinstance(body, dict) else None
    if version == SCHEMA_VERSION:
        return
    problem = f"schema_version = {version!r}: this version reads {SCHEMA_VERSION}"
    if type(version) is int and version < SCHEMA_VERSION:
        problem += (
            f"; git commit {_READERS.get(version, _OLDEST_READER)} of forerun reads it, and "
            "`forerun freeze STUDY` freezes the study anew"
        )
    raise FrozenError(str(file), [problem])
