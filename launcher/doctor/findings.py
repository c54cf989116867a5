"""Findings of the checks, one line of the report each, and the check of the package names.

The names of our packages must lead to our own code: `sweeps` is also a package of W&B's, and any
folder may shadow one. pip installs `wandb[sweeps]` over ours silently, and uninstalling it deletes
ours; under an editable install theirs comes first on the path instead. Standard library only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from proxies.core.errors import InputError

PACKAGES = ("proxies", "sweeps", "transfer", "scaling_fits", "launcher")
HOME = Path(__file__).resolve().parents[2]
"""Folder that holds our packages."""
_REINSTALL = "pip install --force-reinstall --no-deps forerun"


class NamesError(InputError):
    """Another package is imported under one of our names."""

    def __init__(self, wrong: dict[str, str]) -> None:
        """Take the packages that lead elsewhere: package -> the path that an import takes."""
        super().__init__(
            f"another package hides forerun's{_format_wrong_packages(wrong)}: run `forerun doctor` "
            "for a fix"
        )


def found() -> dict[str, str]:
    """Return package -> the folder or file that an import takes; an empty path if there is none."""
    return {name: _locate_package(name) for name in PACKAGES}


def foreign(locations: dict[str, str], home: Path = HOME) -> dict[str, str]:
    """Return the packages whose name leads elsewhere than to `home`: package -> path."""
    return {name: where for name, where in locations.items() if where != str(home / name)}


def judge_names(locations: dict[str, str], wandb_sweeps: bool, home: Path = HOME) -> DoctorFinding:
    """Check that our package names lead to our own code.

    Args:
        locations: Package -> the path that an import takes.
        wandb_sweeps: Whether W&B's distribution `sweeps` is installed.
        home: Folder that must hold our packages.
    """
    wrong = foreign(locations, home)
    if wandb_sweeps:
        sentence = (
            "W&B's package `sweeps` (the extra wandb[sweeps]) is installed: one name, two packages"
        )
        return fail(
            "names",
            sentence + _format_wrong_packages(wrong),
            f"pip uninstall -y sweeps && {_REINSTALL}",
        )
    if wrong:
        sentence = "another package hides forerun's" + _format_wrong_packages(wrong)
        return fail(
            "names",
            sentence,
            "rename or remove the other package, or take its folder out of PYTHONPATH",
        )
    return ok("names", f"{', '.join(PACKAGES)} are forerun's own, in {home}")


def _format_wrong_packages(wrong: dict[str, str]) -> str:
    return "".join(f"; `import {name}` finds {where or 'nothing'}" for name, where in wrong.items())


def _locate_package(name: str) -> str:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return ""
    if spec is None:
        return ""
    if spec.submodule_search_locations:
        return str(Path(next(iter(spec.submodule_search_locations))).resolve())
    return str(spec.origin)


State = Literal["ok", "warn", "fail"]
STATES: tuple[State, ...] = ("ok", "warn", "fail")
"""All states, from best to worst."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorFinding:
    """One line of the report: `warn` may cost time or surprise; `fail` would stop a study or a
    launch.
    """

    name: str
    state: State
    said: str
    """The fact, in words."""
    mend: str = ""
    """The command or action that fixes it; given unless the state is ok."""


def ok(name: str, said: str) -> DoctorFinding:
    """Return a finding that nothing is wrong."""
    return DoctorFinding(name=name, state="ok", said=said)


def warn(name: str, said: str, mend: str) -> DoctorFinding:
    """Return a finding that works but may cause trouble."""
    return DoctorFinding(name=name, state="warn", said=said, mend=mend)


def fail(name: str, said: str, mend: str) -> DoctorFinding:
    """Return a finding that would stop a study or a launch."""
    return DoctorFinding(name=name, state="fail", said=said, mend=mend)


def worst(findings: Sequence[DoctorFinding]) -> State:
    """Return the worst state among findings; ok if there are none."""
    return max((finding.state for finding in findings), key=STATES.index, default="ok")


def body_of(findings: Sequence[DoctorFinding]) -> dict[str, object]:
    """Return the findings as `--json` prints them."""
    counts = {
        f"num_{state}": sum(finding.state == state for finding in findings) for state in STATES
    }
    return {
        "outcome": worst(findings),
        **counts,
        "findings": [asdict(finding) for finding in findings],
    }


def line_of(finding: DoctorFinding) -> str:
    """Return a finding as text for people, with the fix on its own line."""
    line = f"{finding.state:<4}  {finding.name}: {finding.said}"
    return f"{line}\n      fix: {finding.mend}" if finding.mend else line
