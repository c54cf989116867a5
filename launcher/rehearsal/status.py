"""Whether a frozen config was rehearsed: what `verify`, `freeze` and `launch` say of it. No
torch.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from launcher.base.study_names import shown_name
from launcher.frozen.launch_file import created_at, path_of, read_attestation
from launcher.rehearsal.registry import RehearsalAttestation
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.notation import counted

_CODE = ("forerun", "torch")
"""What a rehearsal is of, besides the config."""
_COPIES = {"scaled": "a scaled-down copy", "full": "the real shape"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalStatus:
    """What a config's rehearsal says."""

    rehearsed: bool
    """Whether it passed, with the versions that are installed here."""
    sentence: str
    """For people; begins with UNREHEARSED where it was not."""
    body: dict[str, Json] | None
    """When, where and what, for `--json`; None: there is no sound attestation."""


def rehearsal_of(folder: Path, digest: str) -> RehearsalStatus:
    """Whether the config in `folder` was rehearsed."""
    path = path_of(folder, "rehearsal")
    command = f"forerun rehearse {shown_name(folder)}"
    if not path.is_file():
        return RehearsalStatus(
            rehearsed=False,
            body=None,
            sentence=f"UNREHEARSED: no drill was run with this config; {command}",
        )
    try:
        found = canon.decode(RehearsalAttestation, read_attestation(path, digest))
    except ValueError as error:  # tampered with, or of another version
        return RehearsalStatus(
            rehearsed=False, body=None, sentence=f"UNREHEARSED: {error}; {command}"
        )
    passed, failed = found.named("passed"), found.named("failed")
    at, kind = created_at(path), str(found.copy.get("kind"))
    drills = f"{len(passed)} of {counted(len(found.drills), 'drill')}"
    held = f"{drills} passed on {_COPIES.get(kind, kind)}{_where(found)}, {at}"
    stale = _other_versions(found)
    if stale:
        sentence = (
            f"UNREHEARSED with the versions installed here: {held}, with "
            f"{', '.join(stale)}; {command}"
        )
    elif failed:
        sentence = f"UNREHEARSED: {', '.join(failed)} failed ({held}); fix it, then {command}"
    else:
        sentence = f"rehearsed: {held}"
    body: dict[str, Json] = {
        "at": at,
        "outcome": found.outcome,
        "copy": kind,
        "passed": [*passed],
        "failed": [*failed],
        "machine": canon.to_json(found.machine),
        "other_versions": [*stale],
    }
    return RehearsalStatus(rehearsed=not failed and not stale, sentence=sentence, body=body)


def _where(found: RehearsalAttestation) -> str:
    """The devices of the rehearsal's machine, as far as it says."""
    gpus = found.machine.get("gpus")
    if not isinstance(gpus, list):
        return ""
    return f" on {len(gpus)} {gpus[0]}" if gpus else " on a CPU"


def _other_versions(found: RehearsalAttestation) -> list[str]:
    """What would run here in another version than was rehearsed."""
    here = {name: importlib.metadata.version(name) for name in _CODE}
    return [
        f"{name} {theirs} (installed here: {here[name]})"
        for name in _CODE
        if (theirs := found.machine.get(name, here[name])) != here[name]
    ]
