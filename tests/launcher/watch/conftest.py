"""A frozen config whose run is written line by line."""

import pytest
from main_run import tiny_decision, write_attested
from watched_case import NUM_STEPS, watched_decision


@pytest.fixture(scope="module")
def decision(corpus):
    return watched_decision(tiny_decision(corpus), NUM_STEPS)


@pytest.fixture
def frozen(decision, tmp_path):
    return write_attested(tmp_path / "frozen", decision).parent
