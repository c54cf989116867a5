"""A transfer test's record in words: names of tests, sizes, and values.

The input is plain JSON, and no heavy library is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from proxies.core.hyperparameters import hyperparameter_named
from proxies.core.notation import NONE, counted, format_interval, format_number
from transfer.question import Axis, at_size, written

Test = Mapping[str, Any]
"""One entry of `body["transfer"]["tests"]`, or its verdict where only the names are read."""

_SIZE: dict[Axis, str] = {
    "width": "width {}",
    "depth": "{} layers",
    "batch": "{} tokens a step",
    "duration": "{} tokens",
    "params": "{} params",
}
_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def hyperparameter_name(hyperparameter: str) -> str:
    """Return a hyperparameter's name in words, the same everywhere: `weight decay`."""
    return hyperparameter_named(hyperparameter).label


def name_of(test: Test) -> str:
    """Return the name of a test, or of its verdict, in words: `learning rate over width`."""
    return f"{hyperparameter_name(test['hyperparameter'])} over {test['axis']}"


def anchor(test: Test) -> str:
    """Return the name of a test with letters and hyphens only, for ids in HTML."""
    return f"{test['hyperparameter']}-{test['axis']}".replace("_", "-")


def axis_name(axis: Axis) -> str:
    """Return the name of the unit that an axis counts: `tokens` for the duration."""
    return {
        "duration": "tokens",
        "batch": "tokens a step",
        "depth": "layers",
        "params": "parameters",
    }.get(axis, axis)


def size_name(axis: Axis, size: int) -> str:
    """Return a size with its unit: `width 64`, `205k tokens`."""
    return _SIZE[axis].format(short_size(size))


def short_size(size: int) -> str:
    """Format a size: exactly below ten thousand, else with three digits and a suffix: `205k`."""
    if size < 10_000:
        return str(size)
    unit, suffix = next((unit, suffix) for unit, suffix in _SUFFIXES if size >= 0.9995 * unit)
    return f"{float(f'{size / unit:.3g}'):g}{suffix}"


def exponent(power: float) -> str:
    """Format the exponent of a rule with its sign: `-0.28`."""
    return f"{power:+.3g}" if power else "0"


def estimate(record: Any, spec: str = ".4f") -> str:
    """Format an estimate with its interval; what is only known to be above a bound says so."""
    if record is None or record["value"] is None:
        return NONE
    bound = record.get("more_than", math.inf)
    value, *ends = (
        f"more than {format_number(bound, spec)}" if end >= bound else format_number(end, spec)
        for end in (record["value"], *(record["interval"] or ()))
    )
    return f"{value} [{', '.join(ends)}]" if ends else f"{value} {format_interval(None)}"


def verdicts_by_arm(test: Test, main_arm: str) -> dict[str, Any]:
    """Return the verdict of every arm of a test by the arm's name, the study's own arm first."""
    verdict = test["verdict"]
    return {main_arm: verdict} | ({"sp": verdict["control"]} if verdict["control"] else {})


def judged(transfer: Any, *, controls: bool = True) -> list[tuple[str, Any]]:
    """Return every verdict of a study with its name.

    The learning rate over all axes comes first, each control after its test, and pairs of
    hyperparameters last.
    """
    verdicts = [("learning rate over all axes", transfer["together"])]
    for test in transfer["tests"]:
        verdicts.append((name_of(test), test["verdict"]))
        if controls and test["verdict"]["control"]:
            verdicts.append((f"{name_of(test)}, control", test["verdict"]["control"]))
    pairs = transfer.get("pairs", ())
    return verdicts + [
        (" with ".join(map(hyperparameter_name, pair["hyperparameters"])), pair) for pair in pairs
    ]


def wanted(verdict: Any) -> list[str]:
    """Return the runs that would decide a verdict, in sentences.

    Values that are asked for at one size for the same reason share a sentence.
    """
    groups: dict[tuple[int, int, str], list[float]] = {}
    for item in verdict.get("what_to_run", ()):
        groups.setdefault((item["size"], item["num_seeds"], item["reason"]), []).append(
            item["log2_value"]
        )
    name = verdict.get("hyperparameter", "learning_rate")
    label = "" if name == "learning_rate" else f"{hyperparameter_name(name)} "
    return [
        f"run {at_size(verdict['axis'], size)} at "
        f"{label}{', '.join(written(name, x) for x in sorted(values))} "
        f"({counted(num_seeds, 'seed')}{' each' if len(values) > 1 else ''}): {reason}"
        for (size, num_seeds, reason), values in groups.items()
    ]


def runs_of(test: Test, arm: str | None = None) -> list[Any]:
    """Return the runs of one arm, or of all arms, except those that failed.

    A diverged run is kept, because its loss says something about its value.
    """
    return [run for run in test["runs"] if run["status"] != "failed" and arm in (None, run["arm"])]
