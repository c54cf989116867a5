"""Fixtures of the tests of transfer verdicts."""

import pytest

from forerun._transfer.tables.table import read_runs
from forerun._transfer.verdict.verdict import _find_cached_optima


@pytest.fixture(autouse=True)
def empty_optima_cache():
    """Forget fitted optima, because some tests replace parts of the statistics."""
    _find_cached_optima.cache_clear()


@pytest.fixture
def read_table(tmp_path):
    """A function that reads a table of runs from its text, as `forerun transfer --runs` does."""

    def read_text(text, **question):
        path = tmp_path / "runs.csv"
        path.write_text(text)
        return read_runs(path, **question)

    return read_text
