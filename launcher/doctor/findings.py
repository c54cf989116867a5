"""What a check found: one line of the report. Standard library only."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from proxies.core.errors import InputError

# Whether our packages' names lead to our own code: `sweeps` is also a package of W&B's, and any
# folder may shadow one.
#
# pip installs `wandb[sweeps]` over ours without a word, and uninstalling it deletes ours; under an
# editable install theirs comes first on the path instead.

PACKAGES = ("proxies", "sweeps", "transfer", "scaling_fits", "launcher")
HOME = Path(__file__).resolve().parents[2]
"""Where our packages lie."""
_REINSTALL = "pip install --force-reinstall --no-deps forerun"


class NamesError(InputError):
    """Imports find another package under one of our names."""

    def __init__(self, wrong: dict[str, str]) -> None:
        """`wrong`: the packages that are not found in our own place, and what is."""
        super().__init__(
            f"another package hides forerun's{_told(wrong)}: run `forerun doctor` for a fix"
        )


def found() -> dict[str, str]:
    """Package -> the folder or file that an import takes; empty where there is none."""
    return {name: _found(name) for name in PACKAGES}


def foreign(found: dict[str, str], home: Path = HOME) -> dict[str, str]:
    """The packages whose name leads elsewhere than to `home`, and where to."""
    return {name: where for name, where in found.items() if where != str(home / name)}


def judge_names(found: dict[str, str], wandb_sweeps: bool, home: Path = HOME) -> DoctorFinding:
    """Whether they are ours alone; `wandb_sweeps`: W&B's distribution of that name is installed."""
    wrong = foreign(found, home)
    if wandb_sweeps:
        sentence = (
            "W&B's package `sweeps` (the extra wandb[sweeps]) is installed: one name, two packages"
        )
        return fail("names", sentence + _told(wrong), f"pip uninstall -y sweeps && {_REINSTALL}")
    if wrong:
        sentence = "another package hides forerun's" + _told(wrong)
        return fail(
            "names",
            sentence,
            "rename or remove the other package, or take its folder out of PYTHONPATH",
        )
    return ok("names", f"{', '.join(PACKAGES)} are forerun's own, in {home}")


def _told(wrong: dict[str, str]) -> str:
    return "".join(f"; `import {name}` finds {where or 'nothing'}" for name, where in wrong.items())


def _found(name: str) -> str:
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
"""From the best to the worst."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorFinding:
    """One line: `warn` is what may cost time or surprise, `fail` is what a study or a launch would
    stop at.
    """

    name: str
    state: State
    said: str
    mend: str = ""
    """What to type, or to do; there for all that is not ok."""


def ok(name: str, said: str) -> DoctorFinding:
    """All is well."""
    return DoctorFinding(name=name, state="ok", said=said)


def warn(name: str, said: str, mend: str) -> DoctorFinding:
    """It works, but."""
    return DoctorFinding(name=name, state="warn", said=said, mend=mend)


def fail(name: str, said: str, mend: str) -> DoctorFinding:
    """It does not work."""
    return DoctorFinding(name=name, state="fail", said=said, mend=mend)


def worst(found: Sequence[DoctorFinding]) -> State:
    """The worst state among them; ok where there are none."""
    return max((each.state for each in found), key=STATES.index, default="ok")


def body_of(found: Sequence[DoctorFinding]) -> dict[str, object]:
    """As `--json` prints them."""
    counts = {f"num_{state}": sum(each.state == state for each in found) for state in STATES}
    return {"outcome": worst(found), **counts, "findings": [asdict(each) for each in found]}


def line_of(finding: DoctorFinding) -> str:
    """As people read it: the fix on a line of its own."""
    line = f"{finding.state:<4}  {finding.name}: {finding.said}"
    return f"{line}\n      fix: {finding.mend}" if finding.mend else line
