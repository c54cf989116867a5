"""Everything wrong with a command's options, said at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click


class OptionProblems(click.UsageError):
    """Bad options; `problems` lists what is wrong with each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("; ".join(problems))


class Collected:
    """Problems of several records, raised together."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep what a record or a table refuses inside the block, and go on."""
        from launcher.base.reference import UnknownNameError
        from proxies.core.checks import SpecError

        try:
            yield
        except SpecError as error:
            self.problems += error.problems
        except UnknownNameError as error:
            self.problems.append(str(error))

    def done(self) -> None:
        """Raise `OptionProblems` with all of them, each once, if there are any."""
        if self.problems:
            raise OptionProblems(list(dict.fromkeys(self.problems)))
