"""Formatting of every number that people read: one form per quantity.

JSON output keeps full precision and does not use this module. A space at which a line must not
break (`85.6 %`, `7.12 M`) is a no-break space.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NONE = "-"
"""Text in the place of a number that is missing."""
_SUFFIXES = ((1e12, "T"), (1e9, "B"), (1e6, "M"))
_MINUTE, _HOUR, _DAY = 60, 3600, 86_400

# ---- Numbers ----


def format_number(value: float | None, spec: str = ".4g") -> str:
    """Return a number by its format spec; four significant digits if it is too large for `f`."""
    if value is None:
        return NONE
    spec = ".4g" if abs(value) >= 1e6 and spec.endswith("f") else spec
    if spec.endswith("g") and "e+" in format(value, spec):
        return format_significant(value, int(spec.strip("+.g") or 6))
    # `z`: a number that rounds to zero has no minus sign
    return format(value, f"+z{spec[1:]}" if spec[0] == "+" else f"z{spec}")


def format_significant(value: float | None, digits: int = 3) -> str:
    """Return a number in significant digits, without an exponent from 0.0001 on.

    Examples: 370, 4,800, 0.012, 3.7 M.
    """
    if value is None or value == 0 or not math.isfinite(value):
        return NONE if value is None else f"{value:g}"
    rounded = float(f"{value:.{digits}g}")
    if abs(rounded) >= 1e6:
        return format_count(rounded)
    if abs(rounded) < 1e-4:
        return f"{rounded:g}"
    return f"{rounded:,}".removesuffix(".0")


def format_factor(value: float, digits: int = 3) -> str:
    """Return a ratio in significant digits: 1.25, 1,350; with an exponent from a million on."""
    # In three digits, 999,500 is a million
    return f"{value:.{digits}g}" if abs(value) >= 999_500 else format_significant(value, digits)


def format_count(value: float | None) -> str:
    """Return a count: whole below a million, then in millions (M), billions (B), trillions (T)."""
    if value is None:
        return NONE
    for size, suffix in _SUFFIXES:
        if abs(value) >= size:
            scaled = value / size
            digits = f"{scaled:.3g}" if abs(scaled) < 999.5 else f"{scaled:,.0f}"
            return f"{digits}\u00a0{suffix}"
    return f"{value:,.0f}"


def format_interval(ends: Sequence[float] | None, spec: str = ".3f") -> str:
    """Return both ends in brackets, or `no interval`."""
    if ends is None:
        return "no interval"
    return f"[{format_number(ends[0], spec)}, {format_number(ends[1], spec)}]"


# ---- Quantities ----


def format_percent(share: float | None, *, is_signed: bool = False, is_whole: bool = False) -> str:
    """Return a share in percent: `7.83 %`, `85.6 %`, `0.0035 %`; signed `+3.15 %`; whole `86 %`."""
    if share is None:
        return NONE
    percent = round(100 * share) if is_whole else float(f"{100 * share:.3g}")
    return f"{percent:{'+' if is_signed else ''}.10g}\u00a0%"


def format_main_run_share(share: float) -> str:
    """Return FLOPs relative to the main run: `85.6 % of the main run's FLOPs`, `1.2 times ...`."""
    factor = format_factor(share)
    amount = f"{factor} times" if share >= 1 and factor != "1" else f"{format_percent(share)} of"
    return f"{amount} the main run's FLOPs"


def format_loss(nats: float | None) -> str:
    """Return a loss in nats, to a thousandth; a loss of 10,000 or more has four digits."""
    return format_number(nats, ".3f" if nats is None or abs(nats) < 1e4 else ".4g")


def format_nats(nats: float | None, *, is_signed: bool = False) -> str:
    """Return a difference of losses in nats, to a ten-thousandth: margins are hundredths."""
    return format_number(nats, "+.4f" if is_signed else ".4f")


def format_learning_rate(rate: float | None) -> str:
    """Return a learning rate in four significant digits, as it is frozen: 0.01783, 3.2e-05."""
    return format_number(rate, ".4g")


def format_flops(value: float | None) -> str:
    """Return FLOPs in three significant digits and a power of ten: `1.23e+18`."""
    return format_number(value, ".2e")


def format_usd(dollars: float | None) -> str:
    """Return an amount of money in three significant digits: `USD 12.3`."""
    return NONE if dollars is None else f"USD {format_significant(dollars)}"


def format_speed(per_second: float | None, unit: str) -> str:
    """Return a speed in three significant digits: `12,300 tokens/s`."""
    return NONE if per_second is None else f"{format_significant(per_second)} {unit}/s"


def format_bytes(num_bytes: float) -> str:
    """Return a size in three significant digits: `25.2 MB`, `4.1 GB`."""
    units = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (0.0, "bytes"))
    size, unit = next((size, unit) for size, unit in units if num_bytes >= size)
    return f"{format_significant(num_bytes / (size or 1))} {unit}"


def format_duration(seconds: float | None) -> str:
    """Return a duration: 0.25 s, 1.4 s, 42 s, 3 min 05 s, 2 h 10 min, 12 d 04 h."""
    if seconds is None:
        return NONE
    if not math.isfinite(seconds):
        return f"{seconds:g} s"
    rounded = round(seconds)
    if rounded < _MINUTE:
        # Two digits, unless they would show as 0.00 s or as a whole second
        return f"{float(f'{seconds:.2g}'):g} s" if 0.005 <= seconds < 9.95 else f"{rounded} s"
    if rounded < _HOUR:
        return f"{rounded // _MINUTE} min {rounded % _MINUTE:02d} s"
    if rounded < 10 * _DAY:
        return f"{rounded // _HOUR} h {rounded % _HOUR // _MINUTE:02d} min"
    return f"{rounded // _DAY} d {rounded % _DAY // _HOUR:02d} h"


def format_rough_duration(seconds: float, *bounds: float) -> tuple[str, ...]:
    """Return durations that are known to two digits, all in the unit of the first.

    Args:
        seconds: The estimate, which is followed by its unit.
        bounds: Bounds of the estimate, without a unit.
    """
    units = (
        (3 * _DAY, _DAY, "d"),
        (1.5 * _HOUR, _HOUR, "h"),
        (1.5 * _MINUTE, _MINUTE, "min"),
        (0, 1, "s"),
    )
    size, unit = next((size, unit) for minimum, size, unit in units if seconds >= minimum)
    numbers = [
        format_significant(value / size, 2 if value < 100 * size else 3)
        for value in (seconds, *bounds)
    ]
    return f"{numbers[0]} {unit}", *numbers[1:]


# ---- Nouns ----


def format_counted(number: float, noun: str) -> str:
    """Return a number of things: `1 run`, `2 runs`, `2 batches`, `1,000 entries`."""
    if number == 1:
        return f"1 {noun}"
    amount = f"{number:,}".removesuffix(".0")
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{amount} {noun[:-1]}ies"
    return f"{amount} {noun}{'es' if noun.endswith(('s', 'x', 'ch', 'sh')) else 's'}"


def add_article(noun: str) -> str:
    """Return a noun with its indefinite article: `a readout`, `an embedding`."""
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"
