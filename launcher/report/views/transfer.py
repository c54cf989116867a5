"""A transfer test in words: names of tests, sizes, estimates, and the runs that would decide it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forerun._proxies.core.hyperparameters import get_hyperparameter
from forerun._proxies.core.notation import NONE, format_counted, format_interval, format_number
from forerun._transfer.question import Axis, format_size, format_value

if TYPE_CHECKING:
    from forerun._launcher.report.views.finding import Estimate
    from forerun._launcher.report.views.transfer_findings import BaseVerdict, NamedTest, Transfer

_SIZE: dict[Axis, str] = {
    "width": "width {}",
    "depth": "{} layers",
    "batch": "{} tokens a step",
    "duration": "{} tokens",
    "params": "{} params",
}
_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def format_hyperparameter(hyperparameter: str) -> str:
    """Return a hyperparameter's name in words, the same everywhere: `weight decay`."""
    return get_hyperparameter(hyperparameter).label


def format_test(test: NamedTest) -> str:
    """Return the name of a test, or of its verdict, in words: `learning rate over width`."""
    return f"{format_hyperparameter(test.hyperparameter)} over {test.axis}"


def format_anchor(test: NamedTest) -> str:
    """Return the name of a test with letters and hyphens only, for ids in HTML."""
    return f"{test.hyperparameter}-{test.axis}".replace("_", "-")


def format_axis(axis: Axis) -> str:
    """Return the name of the unit that an axis counts: `tokens` for the duration."""
    return {
        "duration": "tokens",
        "batch": "tokens a step",
        "depth": "layers",
        "params": "parameters",
    }.get(axis, axis)


def format_axis_size(axis: Axis, size: int) -> str:
    """Return a size with its unit: `width 64`, `205k tokens`."""
    return _SIZE[axis].format(format_short_size(size))


def format_short_size(size: int) -> str:
    """Format a size: exactly below ten thousand, else with three digits and a suffix: `205k`."""
    if size < 10_000:
        return str(size)
    # A size that three digits round up to a unit has that unit: 999,700 is `1M`.
    unit, suffix = next((unit, suffix) for unit, suffix in _SUFFIXES if size >= 0.9995 * unit)
    return f"{float(f'{size / unit:.3g}'):g}{suffix}"


def format_estimate(record: Estimate | None, spec: str = ".4f") -> str:
    """Format an estimate with its interval.

    A number that is only known to be above a bound is shown as "more than" the bound.
    """
    if record is None or record.value is None:
        return NONE
    bound = record.more_than
    value, *ends = (
        f"more than {format_number(bound, spec)}"
        if bound is not None and end >= bound
        else format_number(end, spec)
        for end in (record.value, *(record.interval or ()))
    )
    return f"{value} [{', '.join(ends)}]" if ends else f"{value} {format_interval(None)}"


def list_verdicts(transfer: Transfer, *, controls: bool = True) -> list[tuple[str, BaseVerdict]]:
    """Return every verdict of a study with its name.

    The learning rate over all axes comes first, and each control after its test.
    """
    verdicts: list[tuple[str, BaseVerdict]] = [("learning rate over all axes", transfer.together)]
    for test in transfer.tests:
        verdicts.append((format_test(test), test.verdict))
        if controls and test.verdict.control:
            verdicts.append((f"{format_test(test)}, control", test.verdict.control))
    return verdicts


def describe_deciding_runs(verdict: BaseVerdict) -> list[str]:
    """Return the runs that would decide a verdict, in sentences.

    Values that are needed at one size for the same reason share a sentence.
    """
    groups: dict[tuple[int, int, str], list[float]] = {}
    for item in verdict.what_to_run:
        groups.setdefault((item.size, item.num_seeds, item.reason), []).append(item.log2_value)
    name = verdict.hyperparameter
    label = "" if name == "learning_rate" else f"{format_hyperparameter(name)} "
    return [
        f"run {format_size(verdict.axis, size)} at "
        f"{label}{', '.join(format_value(name, x) for x in sorted(values))} "
        f"({format_counted(num_seeds, 'seed')}{' each' if len(values) > 1 else ''}): {reason}"
        for (size, num_seeds, reason), values in groups.items()
    ]
