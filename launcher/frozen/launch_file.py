"""A decision on disk: `frozen/<digest>/launch.json`, which has the digest it claims, and the
attestations beside it.
"""

from __future__ import annotations

import datetime
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from launcher.frozen.frozen import SCHEMA_VERSION, Decision, FrozenError, TamperedError
from proxies.core import canon
from proxies.core.plain_files import read_plain

# What lies beside a frozen config: evidence, exports, launches. Each names the digest and carries
# its own hash.

CheckOutcome = Literal["passed", "failed", "cannot_tell"]
"""What a gate or a rehearsal found."""


CHECKS = ("evidence", "attestations")
"""Checks of a frozen config, in addition to its digest, whose problems `forerun launch --accept`
can accept."""


def list_accepted_failures(gates: Iterable[Any], accepted: Container[str]) -> list[str]:
    """Return the names of failed gates that a person accepted. Gates may be records or JSON."""
    return [
        gate["name"]
        for gate in map(_to_json, gates)
        if gate["outcome"] == "failed" and gate["name"] in accepted
    ]


def format_accepted_gates(gates: Iterable[Any], accepted: Mapping[str, Any]) -> list[str]:
    """Return one line with the reason for each accepted gate, which says whether the gate failed or
    cannot tell.
    """
    outcomes = {gate["name"]: gate["outcome"] for gate in map(_to_json, gates)}
    return [
        f"accepted failure: gate {name} failed, accepted with the reason: {reason}"
        if outcomes.get(name) == "failed"
        else f"gate {name} cannot tell, accepted with the reason: {reason}"
        for name, reason in accepted.items()
    ]


def _to_json(gate: Any) -> dict[str, str]:
    return cast(dict[str, str], canon.to_json(gate))


def format_accepted_failures(folder: Path, digest: str) -> list[str]:
    """Return one line for each gate that had failed and was accepted at the freeze."""
    try:
        failures = read_accepted_failures(folder, digest)
    except TamperedError as error:  # `verify` and `launch` refuse it, unless somebody accepts that
        return [f"which gates failed and were accepted is not known: {error}"]
    return format_accepted_gates(
        [{"name": name, "outcome": "failed"} for name in failures], failures
    )


def name_accepted_failures(folder: Path, digest: str) -> list[str]:
    """Return the names of those gates, without what a person wrote; "not known" for bad
    evidence.
    """
    try:
        return [*read_accepted_failures(folder, digest)]
    except TamperedError:
        return ["not known"]


def read_accepted_failures(folder: Path, digest: str) -> dict[str, str]:
    """Return the reason for each gate that had failed and was accepted at the freeze.

    Raises:
        TamperedError: the evidence is missing, was edited, or is for another config.
    """
    body: dict[str, Any] = read_attestation(path_of(folder, "evidence"), digest)
    accepted = body.get("accepted", {})
    return {
        name: accepted[name] for name in list_accepted_failures(body.get("gates", []), accepted)
    }


def path_of(folder: Path, kind: str) -> Path:
    """Where a config's attestation of that kind lies, if there is one."""
    return folder / "attestations" / f"{kind}.json"


def attest(folder: Path, kind: str, digest: str, body: dict[str, canon.Json]) -> Path:
    """Put an attestation beside a launch config: `attestations/<kind>.json`."""
    created_at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    content: dict[str, canon.Json] = {
        "kind": kind,
        "digest": digest,
        "created_at": created_at,
        "body": body,
    }
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
        raise _tampered(path, "its content does not match its hash")
    if value.get("kind") != path.stem:
        raise _tampered(path, f"its kind is {value.get('kind')!r:.40}")
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
    return TamperedError(
        str(path),
        [f"{what}; restore it from a copy, or remove it and run the verb that wrote it again"],
    )


LAUNCH_FILE = "launch.json"
RUN_FILE = "run.sh"
"""What starts an export."""
_READERS = {5: "181fb6e"}
"""Commits that read older launch files, by schema version."""
_OLDEST_READER = "7aa3a7b"
"""Commit that reads those before."""
MOST_CHARS = 2000
"""Characters of what is wrong with a decision."""
_FIX = "restore it from a copy, or freeze again"


def write_launch(frozen_dir: Path, decision: Decision) -> Path:
    """Write `<frozen_dir>/<digest>/launch.json`; the same decision always gives the same bytes."""
    folder = frozen_dir / decision.digest
    canon.make_folder(folder)
    path = folder / LAUNCH_FILE
    canon.write_atomic(path, canon.pretty({"digest": decision.digest, "decision": decision}))
    return path


def read_launch(path: Path) -> Decision:
    """The decision of a launch file, or of the folder it lies in.

    Raises:
        FrozenError: there is none, or it is not a launch config of a known schema.
        TamperedError: its content is not the one its digest names.
    """
    file = path / LAUNCH_FILE if path.is_dir() else path
    try:
        value = canon.parse(read_plain(file))
        body = value.get("decision") if isinstance(value, dict) else None
        actual = canon.content_id(body)
    except OSError as error:
        raise FrozenError(str(file), [f"cannot be read: {error.strerror}"]) from error
    except (canon.CanonError, RecursionError) as error:
        raise TamperedError(str(file), [f"{error}; {_FIX}"]) from error
    if not isinstance(value, dict) or set(value) != {"digest", "decision"}:
        raise FrozenError(
            str(file), ["a launch config must hold `digest` and `decision`, nothing else"]
        )
    digest = value["digest"]
    if actual != digest:  # before the version, which may be what was edited
        raise TamperedError(
            str(file),
            [
                (
                    f"the content has the digest {actual[:16]}..., the file says "
                    f"{str(digest)[:16]}...; {_FIX}"
                )
            ],
        )
    version = body.get("schema_version") if isinstance(body, dict) else None
    if version != SCHEMA_VERSION:
        what = f"schema_version = {version!r}: this version reads {SCHEMA_VERSION}"
        if type(version) is int and version < SCHEMA_VERSION:
            commit = _READERS.get(version, _OLDEST_READER)
            what += (
                f"; git commit {commit} of forerun reads it, and `forerun freeze STUDY` "
                "freezes the study anew"
            )
        raise FrozenError(str(file), [what])
    named = file.parent.name
    if file.parent.parent.name == "frozen" and len(named) == canon.ID_LENGTH and named != digest:
        raise TamperedError(
            str(file),
            [f"it has the digest {actual[:16]}..., but its folder is named after another; {_FIX}"],
        )
    try:
        decision = canon.decode(Decision, body, "decision")
    except ValueError as error:  # whose words may hold a value of megabytes
        said = str(error)
        if len(said) > MOST_CHARS:
            said = f"{said[: MOST_CHARS // 2]} ... {said[-MOST_CHARS // 2 :]}"
        raise FrozenError(str(file), [said]) from error
    # 1 for 1.0: read as it stands, it would be another decision than its digest names
    if decision.digest != digest:
        raise TamperedError(
            str(file), [f"its numbers are not in the form that `forerun freeze` writes; {_FIX}"]
        )
    return decision
