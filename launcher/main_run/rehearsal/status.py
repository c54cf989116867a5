"""The rehearsal status of a frozen config, which `verify`, `freeze` and `launch` report.

This module does not import torch, which takes seconds.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

from forerun._launcher.main_run.frozen.config_names import shorten_config_name
from forerun._launcher.main_run.frozen.launch_file import (
    get_attestation_path,
    read_attestation,
    read_creation_time,
)
from forerun._launcher.main_run.rehearsal.registry import RehearsalAttestation
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_counted

# Description of the config that the drills trained, by `kind` of the attestation's copy
_COPIES = {"scaled": "a scaled-down copy", "full": "the real shape"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalStatus:
    """The rehearsal status of a config."""

    rehearsed: bool
    """Whether the config's rehearsal passed, with the versions that are installed here."""
    sentence: str
    """The status for people; begins with UNREHEARSED if it was not rehearsed."""
    body: dict[str, Json] | None
    """The status for `--json`; None if there is no valid attestation."""


def read_rehearsal_status(folder: Path, digest: str) -> RehearsalStatus:
    """Return the rehearsal status of the config in `folder`."""
    path = get_attestation_path(folder, "rehearsal")
    advice = f"forerun rehearse {shorten_config_name(folder)}"
    reason = "no drill was run with this config"
    attestation = None
    if path.is_file():
        try:
            attestation = canon.decode(RehearsalAttestation, read_attestation(path, digest))
        except ValueError as error:  # tampered with, or of another version
            reason = str(error)
    if attestation is None:
        sentence = f"UNREHEARSED: {reason}; {advice}"
        return RehearsalStatus(rehearsed=False, sentence=sentence, body=None)
    passed, failed = attestation.list_drills("passed"), attestation.list_drills("failed")
    stale = _find_other_versions(attestation)
    at, kind = read_creation_time(path), str(attestation.copy.get("kind"))
    summary = (
        f"{len(passed)} of {format_counted(len(attestation.drills), 'drill')} passed on "
        f"{_COPIES.get(kind, kind)}{_describe_devices(attestation)}, {at}"
    )
    sentence = f"rehearsed: {summary}"
    if failed:
        sentence = f"UNREHEARSED: {', '.join(failed)} failed ({summary}); fix it, then {advice}"
    if stale:
        sentence = (
            f"UNREHEARSED with the versions installed here: {summary}, with {', '.join(stale)}; "
            f"{advice}"
        )
    body: dict[str, Json] = {
        "at": at,
        "outcome": attestation.outcome,
        "copy": kind,
        "passed": [*passed],
        "failed": [*failed],
        "machine": canon.to_json(attestation.machine),
        "other_versions": [*stale],
    }
    return RehearsalStatus(rehearsed=not failed and not stale, sentence=sentence, body=body)


def _describe_devices(attestation: RehearsalAttestation) -> str:
    gpus = attestation.machine.get("gpus")
    if not isinstance(gpus, list):
        return ""
    return f" on {len(gpus)} {gpus[0]}" if gpus else " on a CPU"


def _find_other_versions(attestation: RehearsalAttestation) -> list[str]:
    """Return the packages that are installed here in another version than the rehearsal had."""
    here = {name: importlib.metadata.version(name) for name in ("forerun", "torch")}
    rehearsed = {name: attestation.machine.get(name, version) for name, version in here.items()}
    return [
        f"{name} {rehearsed[name]} (installed here: {version})"
        for name, version in here.items()
        if rehearsed[name] != version
    ]
