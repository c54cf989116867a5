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


@contextmanager
def collect_problems(problems: list[str]) -> Iterator[None]:
    """Catch the error of a record or a lookup within the block, and add its problems to a list."""
    try:
        yield
    except SpecError as error:
        problems += error.problems
    except UnknownNameError as error:
        problems.append(str(error))
