"""Each test of the verdicts measures anew: one that spoils the statistics must not meet what a sound one remembers."""

import pytest

from transfer.verdict.verdict import _optima


@pytest.fixture(autouse=True)
def nothing_remembered():
    _optima.cache_clear()
