"""Fixtures for tests of the watch: a frozen config and its decision with a forecast."""

import pytest
from main_run import make_tiny_decision, write_attested
from watched_case import add_forecast


@pytest.fixture(scope="module")
def decision(corpus):
    """A tiny decision whose forecast the losses of `watched_case.compute_loss_at` follow."""
    return add_forecast(make_tiny_decision(corpus))


@pytest.fixture
def frozen(decision, tmp_path):
    """The folder of a frozen config; tests write its run line by line."""
    return write_attested(tmp_path / "frozen", decision).parent
