"""Three hundred trivial trials while workers and drivers are killed; `benchmarks/cpu/soak.py` does
it with 10,000.
"""

import json

import pytest
import soak_case
from soak_case import ACKNOWLEDGED, faults_of, soak

from sweeps.store.ledger import Ledger

NUM_TRIALS = 300


@pytest.fixture(scope="module")
def soaked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak") / "study"
    found = soak(
        folder,
        num_trials=NUM_TRIALS,
        num_workers=2,
        kill_worker_every=40,
        num_driver_kills=2,
        seed=3,
    )
    return folder, found


def test_nothing_is_lost_and_nothing_told_twice(soaked):
    folder, found = soaked
    faults = faults_of(folder, NUM_TRIALS)
    # one may be killed before it began
    assert faults.pop("drivers") <= 3 and faults.pop("attempts_lost") >= 0
    assert not any(faults.values()), faults
    assert found["kills"]["drivers"] == 2 and found["kills"]["workers"] >= 2
    assert len(Ledger.read(folder).results()) == NUM_TRIALS


def test_what_is_lost_or_told_twice_would_be_seen(soaked, monkeypatch):
    folder, _ = soaked
    told = (folder / ACKNOWLEDGED).read_text()
    first = told.splitlines()[0]
    try:
        (folder / ACKNOWLEDGED).write_text(f"{told}{first}\n{'0' * 64}\n")
        faults = faults_of(folder, NUM_TRIALS + 1)
    finally:
        (folder / ACKNOWLEDGED).write_text(told)
    assert (faults["told_twice"], faults["told_and_gone"], faults["suggestions_missing"]) == (
        1,
        1,
        1,
    )
    monkeypatch.setattr(
        soak_case, "make_run", lambda point: soak_case.make_spec(seed=json.dumps(point).__len__())
    )
    assert faults_of(folder, NUM_TRIALS)["outcomes_missing"] > 0
