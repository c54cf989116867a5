"""Validation of records, and `Interval`, a record that many others contain.

Each record checks itself when it is made, and reports all problems at once.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

from forerun._proxies.core.errors import ProblemsError


class SpecError(ProblemsError):
    """A record with invalid values."""


class Checks:
    """A collector of the problems of one record. `raise_problems` ends the checks."""

    def __init__(self, record: object) -> None:
        self.record = record
        self.problems: list[str] = []

    def require_whole(self, *names: str, least: int = 1) -> None:
        """Check that fields are whole numbers, and not too small."""
        for name in names:
            value = getattr(self.record, name)
            if type(value) is not int or value < least:
                self.problems.append(
                    f"{name} = {value!r}: must be a whole number, at least {least}"
                )

    def require_number(
        self,
        name: str,
        *,
        above: float | None = None,
        least: float | None = None,
        below: float | None = None,
        most: float | None = None,
    ) -> None:
        """Check that a field is a finite number within bounds, and convert an int to a float."""
        given = value = getattr(self.record, name)
        if type(given) is int:
            with contextlib.suppress(OverflowError):
                value = float(given)
        if (
            type(value) is float
            and math.isfinite(value)
            and (above is None or value > above)
            and (least is None or value >= least)
            and (below is None or value < below)
            and (most is None or value <= most)
        ):
            # 1 and 1.0 are the same number, but have two content ids. Keep the float.
            object.__setattr__(self.record, name, value)
            return
        bounds = {"above": above, "at least": least, "below": below, "at most": most}
        limits = [f"{word} {bound}" for word, bound in bounds.items() if bound is not None]
        requirement = "a finite number" + (f", {' and '.join(limits)}" if limits else "")
        self.problems.append(f"{name} = {given!r}: must be {requirement}")

    def require_one_of(self, name: str, choices: tuple[str, ...]) -> None:
        """Check that a field is one of some words."""
        value = getattr(self.record, name)
        if value not in choices:
            self.problems.append(f"{name} = {value!r}: must be one of {', '.join(choices)}")

    def require(self, holds: bool, problem: str) -> None:
        """Add a problem unless a condition holds."""
        if not holds:
            self.problems.append(problem)

    @property
    def has_no_problem(self) -> bool:
        """Whether there is no problem so far, so that several fields can be checked together."""
        return not self.problems

    def raise_problems(self, name: str = "") -> None:
        """Finish the checks.

        Args:
            name: Name of the record for the message; empty for the name of its class.

        Raises:
            SpecError: There are problems.
        """
        if self.problems:
            raise SpecError(name or type(self.record).__name__, self.problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """An estimate with the bounds of its interval."""

    estimate: float
    low: float
    high: float
    level: float
    """Probability that the interval holds the true value, such as 0.9."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require_number("level", above=0, below=1)
        checks.require(
            -math.inf < self.low <= self.estimate <= self.high < math.inf,
            f"{self.estimate} must be finite, and within {self.low} ... {self.high}",
        )
        checks.raise_problems()
