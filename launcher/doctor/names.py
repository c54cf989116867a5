"""Do the rooms' names lead to our own code? `sweeps` is also a package of W&B's, and a folder of yours may shadow any.

pip installs `wandb[sweeps]` over ours without a word, and uninstalling it deletes ours; under an editable install
theirs comes first on the path instead.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from launcher.doctor.findings import Finding, fail, ok

ROOMS = ("proxies", "sweeps", "transfer", "scaling_fits", "launcher")
HOME = Path(__file__).resolve().parents[2]
"""Where our rooms lie."""
_REINSTALL = "pip install --force-reinstall --no-deps forerun"


@dataclass(frozen=True, kw_only=True, slots=True)
class NameFacts:
    """Where each room's name leads."""

    found: dict[str, str]
    """Of `found`."""
    beside: tuple[str, ...]
    """Files and packages of such a name in the working folder that are not ours: `python -m` looks there first."""
    has_wandb_sweeps: bool
    """The distribution `sweeps` is installed."""
    changed: tuple[str, ...]
    """Files of ours that are not as they were installed, or gone."""


def look_at_names(here: Path) -> NameFacts:
    """The facts, as this process would import; `here`: the working folder."""
    return NameFacts(
        found=found(),
        beside=tuple(str(path) for path in _beside(here)),
        has_wandb_sweeps=_installed("sweeps"),
        changed=_changed(),
    )


class NamesError(ValueError):
    """Imports find another package under one of our names."""

    def __init__(self, wrong: dict[str, str]) -> None:
        """`wrong`: the rooms that are not found in our own place, and what is."""
        super().__init__(f"another package hides ours{_told(wrong)}: `forerun doctor` says how to mend it")


def found() -> dict[str, str]:
    """Room -> the folder or file that an import takes; empty where there is none."""
    return {room: _found(room) for room in ROOMS}


def foreign(found: dict[str, str], home: Path = HOME) -> dict[str, str]:
    """The rooms whose name leads elsewhere than to `home`, and where to."""
    return {room: where for room, where in found.items() if where != str(home / room)}


def judge_names(facts: NameFacts, home: Path = HOME) -> Finding:
    """Whether they are ours alone."""
    name = "names"
    wrong = foreign(facts.found, home)
    if facts.has_wandb_sweeps:
        said = "W&B's package `sweeps` (the extra wandb[sweeps]) is installed: one name, two packages"
        return fail(name, said + _told(wrong), f"pip uninstall -y sweeps && {_REINSTALL}")
    if wrong:
        said = "another package hides ours" + _told(wrong)
        return fail(name, said, "rename or remove what is there, or take its folder out of PYTHONPATH")
    if facts.changed:
        said = f"{len(facts.changed)} files of ours are not as installed, {facts.changed[0]} for one"
        return fail(name, said, _REINSTALL)
    if facts.beside:
        said = f"{', '.join(facts.beside)} would hide ours from what is started here by `python -m`"
        return fail(name, said, "run forerun from another folder, or rename it")
    return ok(name, f"{', '.join(ROOMS)} are ours, in {home}")


def _told(wrong: dict[str, str]) -> str:
    return "".join(f"; `import {room}` takes {where or 'nothing'}" for room, where in wrong.items())


def _found(room: str) -> str:
    try:
        spec = importlib.util.find_spec(room)
    except (ImportError, ValueError):
        return ""
    if spec is None:
        return ""
    if spec.submodule_search_locations:
        return str(Path(next(iter(spec.submodule_search_locations))).resolve())
    return str(spec.origin)


def _beside(here: Path) -> list[Path]:
    """A folder without `__init__.py` hides nothing: packages elsewhere come before it."""
    there = [path for room in ROOMS for path in (here / room / "__init__.py", here / f"{room}.py") if path.is_file()]
    return [path for path in there if HOME not in path.resolve().parents]


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _changed() -> tuple[str, ...]:
    """Of a wheel's files, by the hashes that pip keeps; an editable install has none.

    pip's record itself is read: from Python 3.12 on, `importlib.metadata.files` leaves out files that are gone.
    """
    try:
        installed = importlib.metadata.distribution("forerun")
    except importlib.metadata.PackageNotFoundError:
        return ()
    changed = []
    for name, kept, *_ in csv.reader((installed.read_text("RECORD") or "").splitlines()):
        if name.partition("/")[0] in ROOMS and name.endswith(".py") and kept.startswith("sha256="):
            path = Path(str(installed.locate_file(name)))
            content = path.read_bytes() if path.is_file() else b""
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            if kept != f"sha256={digest}":
                changed.append(name)
    return tuple(changed)
