"""How every record checks itself: all that is wrong, said at once. Standard library only."""

from __future__ import annotations

import math


class SpecError(ValueError):
    """A record that does not hold together. `problems` lists everything that is wrong with it."""

    def __init__(self, record: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__(f"{record}: " + "; ".join(problems))


class Checks:
    """Collects what is wrong with a record, so that all of it is said at once. For every room's records."""

    def __init__(self, record: object) -> None:
        self.record = record
        self.problems: list[str] = []

    def whole(self, *names: str, least: int = 1) -> None:
        """Fields that must be whole numbers."""
        for name in names:
            value = getattr(self.record, name)
            if type(value) is not int or value < least:
                self.problems.append(f"{name} = {value!r}: a whole number >= {least} is wanted")

    def number(self, name: str, *, above: float | None = None, least: float | None = None,
               below: float | None = None, most: float | None = None) -> None:  # fmt: skip
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
            # 1 and 1.0 are one number to a caller but two content ids: a record holds the float it declares.
            object.__setattr__(self.record, name, value)
        else:
            wanted = [
                text
                for bound, text in (
                    (above, f"> {above}"), (least, f">= {least}"), (below, f"< {below}"), (most, f"<= {most}"),
                )
                if bound is not None
            ]  # fmt: skip
            bounds = " and ".join(wanted)
            self.problems.append(f"{name} = {given!r}: a finite number {bounds} is wanted".replace("  ", " "))

    def one_of(self, name: str, choices: tuple[str, ...]) -> None:
        """A field that must be one of some words."""
        value = getattr(self.record, name)
        if value not in choices:
            self.problems.append(f"{name} = {value!r}: one of {', '.join(choices)} is wanted")

    def that(self, holds: bool, problem: str) -> None:
        """Any condition, with what to say if it does not hold."""
        if not holds:
            self.problems.append(problem)

    @property
    def fine(self) -> bool:
        """Whether nothing is wrong so far: what depends on several fields is checked then."""
        return not self.problems

    def done(self) -> None:
        """Raise SpecError with every problem, if there is one."""
        if self.problems:
            raise SpecError(type(self.record).__name__, self.problems)
