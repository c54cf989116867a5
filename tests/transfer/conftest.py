"""Each test of the verdicts measures anew: one that spoils the statistics must not meet what a
sound one remembers.
"""

import pytest

from transfer.tables.table import read_runs
from transfer.verdict.verdict import _find_cached_optima


@pytest.fixture(autouse=True)
def nothing_remembered():
    _find_cached_optima.cache_clear()


@pytest.fixture
def read(tmp_path):
    """A table of runs, as `forerun transfer --runs` reads it."""

    def read(text, **question):
        path = tmp_path / "runs.csv"
        path.write_text(text)
        return read_runs(path, **question)

    return read
