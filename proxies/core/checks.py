"""How every record checks itself: it reports everything that is wrong at once. Standard library
only.
"""

from __future__ import annotations

import math

from proxies.core.errors import InputError


class SpecError(InputError):
    """A record with invalid values. `problems` lists everything that is wrong with it."""

    def __init__(self, record: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__(f"{record}: " + "; ".join(problems))


class Checks:
    """Collects what is wrong with a record, so that all of it is reported at once."""

    def __init__(self, record: object) -> None:
        self.record = record
        self.problems: list[str] = []

    def whole(self, *names: str, least: int = 1) -> None:
        """Fields that must be whole numbers."""
        for name in names:
            value = getattr(self.record, name)
            if type(value) is not int or value < least:
                self.problems.append(
                    f"{name} = {value!r}: must be a whole number, at least {least}"
                )

    def number(
        self,
        name: str,
        *,
        above: float | None = None,
        least: float | None = None,
        below: float | None = None,
        most: float | None = None,
    ) -> None:
        """A field that must be a finite number within bounds; a whole number becomes a float."""
        given = getattr(self.record, name)
        try:
            value = float(given) if type(given) is int else given
        except OverflowError:
            value = math.inf
        fine = (
            type(value) is float
            and math.isfinite(value)
            and (above is None or value > above)
            and (least is None or value >= least)
            and (below is None or value < below)
            and (most is None or value <= most)
        )
        if fine:
            # 1 and 1.0 are one number to a caller but two content ids: a record holds the float it
            # declares.
            object.__setattr__(self.record, name, value)
        else:
            limits = (("above", above), ("at least", least), ("below", below), ("at most", most))
            bounds = " and ".join(f"{word} {bound}" for word, bound in limits if bound is not None)
            self.problems.append(
                f"{name} = {given!r}: must be a finite number" + (f", {bounds}" if bounds else "")
            )

    def one_of(self, name: str, choices: tuple[str, ...]) -> None:
        """A field that must be one of some words."""
        value = getattr(self.record, name)
        if value not in choices:
            self.problems.append(f"{name} = {value!r}: must be one of {', '.join(choices)}")

    def that(self, holds: bool, problem: str) -> None:
        """Any condition, with the message for when it does not hold."""
        if not holds:
            self.problems.append(problem)

    @property
    def fine(self) -> bool:
        """Whether nothing is wrong so far, so that checks across several fields make sense."""
        return not self.problems

    def done(self, name: str = "") -> None:
        """Raise SpecError with every problem, if there is one; `name` replaces that of the record's
        class.
        """
        if self.problems:
            raise SpecError(name or type(self.record).__name__, self.problems)
