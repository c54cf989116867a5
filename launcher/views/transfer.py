"""A transfer test's record as people read it: names of tests, sizes and values. Plain JSON in;
loads nothing heavy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from proxies.core.hyperparameters import hyperparameter_named
from proxies.core.notation import NONE, counted, format_interval, format_number
from transfer.question import Axis, at_size, written

Test = Mapping[str, Any]
"""One entry of `body["transfer"]["tests"]`."""

_SIZE: dict[Axis, str] = {
    "width": "width {}",
    "depth": "{} layers",
    "batch": "{} tokens a step",
    "duration": "{} tokens",
    "params": "{} params",
}
_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def hyperparameter_name(hyperparameter: str) -> str:
    """A hyperparameter in words, everywhere that people read one: `weight decay`."""
    return hyperparameter_named(hyperparameter).label


def name_of(test: Test) -> str:
    """A test, or its verdict, in words: `learning rate over width`."""
    return f"{hyperparameter_name(test['hyperparameter'])} over {test['axis']}"


def anchor(test: Test) -> str:
    """The same where only letters and hyphens may stand."""
    return f"{test['hyperparameter']}-{test['axis']}".replace("_", "-")


def axis_name(axis: Axis) -> str:
    """What an axis counts: `tokens` for the duration."""
    return {
        "duration": "tokens",
        "batch": "tokens a step",
        "depth": "layers",
        "params": "parameters",
    }.get(axis, axis)


def size_name(axis: Axis, size: int) -> str:
    """A size as one says it: `width 64`, `205k tokens`."""
    return _SIZE[axis].format(short_size(size))


def short_size(size: int) -> str:
    """Below ten thousand as it is, above in three digits and a suffix: `205k`."""
    if size < 10_000:
        return str(size)
    unit, suffix = next((unit, suffix) for unit, suffix in _SUFFIXES if size >= 0.9995 * unit)
    return f"{float(f'{size / unit:.3g}'):g}{suffix}"


def exponent(power: float) -> str:
    """A rule's exponent, signed: `-0.28`."""
    return f"{power:+.3g}" if power else "0"


def estimate(found: Any, spec: str = ".4f") -> str:
    """An estimate with its interval, each end of it a number, or that it is more than so much."""
    if found is None or found["value"] is None:
        return NONE
    most = found.get("more_than", math.inf)
    value, *ends = (
        f"more than {format_number(most, spec)}" if end >= most else format_number(end, spec)
        for end in (found["value"], *(found["interval"] or ()))
    )
    return f"{value} [{', '.join(ends)}]" if ends else f"{value} {format_interval(None)}"


def verdicts_by_arm(test: Test, main_arm: str) -> dict[str, Any]:
    """The verdict of every arm of a test by the arm's name as in its runs, the study's own
    first.
    """
    verdict = test["verdict"]
    return {main_arm: verdict} | ({"sp": verdict["control"]} if verdict["control"] else {})


def judged(transfer: Any, *, controls: bool = True) -> list[tuple[str, Any]]:
    """Every verdict of a study with its name: the learning rate over all axes first, each control
    after its test.
    """
    found = [("learning rate over all axes", transfer["together"])]
    for test in transfer["tests"]:
        found.append((name_of(test), test["verdict"]))
        if controls and test["verdict"]["control"]:
            found.append((f"{name_of(test)}, control", test["verdict"]["control"]))
    pairs = transfer.get("pairs", ())
    return found + [
        (" with ".join(map(hyperparameter_name, pair["hyperparameters"])), pair) for pair in pairs
    ]


def wanted(verdict: Any) -> list[str]:
    """What would decide a verdict, in sentences: values asked for at one size for one reason stand
    together.
    """
    groups: dict[tuple[int, int, str], list[float]] = {}
    for item in verdict.get("what_to_run", ()):
        groups.setdefault((item["size"], item["num_seeds"], item["reason"]), []).append(
            item["log2_value"]
        )
    name = verdict.get("hyperparameter", "learning_rate")
    what = "" if name == "learning_rate" else f"{hyperparameter_name(name)} "
    return [
        f"run {at_size(verdict['axis'], size)} at "
        f"{what}{', '.join(written(name, x) for x in sorted(values))} "
        f"({counted(num_seeds, 'seed')}{' each' if len(values) > 1 else ''}): {why}"
        for (size, num_seeds, why), values in groups.items()
    ]


def runs_of(test: Test, arm: str | None = None) -> list[Any]:
    """Runs of one arm, or of all, that say something: a diverged run does, a failed one does
    not.
    """
    return [run for run in test["runs"] if run["status"] != "failed" and arm in (None, run["arm"])]
