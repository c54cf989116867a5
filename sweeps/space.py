"""What a search varies: learning rate, warmup and clipping, each within a range."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from proxies.checks import Checks

Params = dict[str, float]
"""One sampled point: `learning_rate`, `warmup_fraction`, `clip_norm`."""

Range = tuple[float, float]
"""Lowest and highest value, both included; equal ends fix the value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """The ranges of a search. Equal ends hold that value fixed.

    Raises:
        SpecError: every range that is not one, all at once.
    """

    learning_rate: Range
    """Absolute, at the base shape; searched evenly in log2."""
    warmup_fraction: Range
    """Share of the run's steps; searched evenly."""
    clip_norm: Range
    """Largest global gradient norm; searched evenly in log2."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        for name in NAMES:
            checks.that(*_range_check(name, getattr(self, name), positive=name in LOG_NAMES))
        if checks.fine:
            high = self.warmup_fraction[1]
            checks.that(high < 1, f"warmup_fraction = {list(self.warmup_fraction)}: both ends < 1 are wanted")
        checks.done()

    def at(self, unit: Sequence[float]) -> Params:
        """The point at coordinates `unit` (one in [0, 1] per name, in the order of `NAMES`), as values."""
        point = {}
        for name, share in zip(NAMES, unit, strict=True):
            low, high = getattr(self, name)
            if name in LOG_NAMES:
                value = 2.0 ** (math.log2(low) + share * (math.log2(high) - math.log2(low)))
            else:
                value = low + share * (high - low)
            point[name] = min(max(value, low), high)  # rounding must not leave the range
        return point


NAMES = ("learning_rate", "warmup_fraction", "clip_norm")
LOG_NAMES = frozenset({"learning_rate", "clip_norm"})


def _range_check(name: str, value: object, *, positive: bool) -> tuple[bool, str]:
    """Whether `value` is a range, and what to say if not."""
    ends = list(value) if isinstance(value, tuple | list) else []
    fine = len(ends) == 2 and all(type(end) in (int, float) and math.isfinite(end) for end in ends)
    if fine:
        low, high = ends
        fine = low <= high and (low > 0 if positive else low >= 0)
    kind = "two finite numbers > 0" if positive else "two finite numbers >= 0"
    return fine, f"{name} = {ends or value!r}: [low, high], {kind}, low <= high, is wanted"
