"""Problems of options, collected so that a person gets all of them at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from forerun._launcher.main_run.estimates.reference_tables import UnknownNameError
from forerun._proxies.core.checks import SpecError


class OptionProblems(click.UsageError):
    """Some options are wrong; `problems` has one message each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(dict.fromkeys(problems))
        super().__init__("; ".join(self.problems))


class ProblemCollector:
    """A collector of problems, so that the problems of several records are raised together."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Catch what a record or a table refuses within the block, keep its problems, and
        continue.
        """
        try:
            yield
        except SpecError as error:
            self.problems += error.problems
        except UnknownNameError as error:
            self.problems.append(str(error))

    def raise_problems(self) -> None:
        """Raise `OptionProblems` with all problems, each once, if there are any."""
        if self.problems:
            raise OptionProblems(self.problems)
