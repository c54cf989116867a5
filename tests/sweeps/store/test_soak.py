"""Tests of a search with 300 trivial trials, while workers and drivers are killed.

`benchmarks/cpu/soak.py` runs 10,000 trials.
"""

import json

import pytest
import soak_case
from soak_case import ACKNOWLEDGED, count_faults, soak

from forerun._sweeps.store.ledger import Ledger

NUM_TRIALS = 300


@pytest.fixture(scope="module")
def soaked_study(tmp_path_factory):
    """The study's folder and the counts of its kills."""
    folder = tmp_path_factory.mktemp("soak") / "study"
    counts = soak(
        folder,
        num_trials=NUM_TRIALS,
        num_workers=2,
        kill_worker_every=40,
        num_driver_kills=2,
        seed=3,
    )
    return folder, counts


def test_no_result_is_lost_or_acknowledged_twice(soaked_study):
    folder, counts = soaked_study
    faults = count_faults(folder, NUM_TRIALS)
    # A driver that was killed before it opened the ledger is not recorded
    assert faults.pop("drivers") <= 3
    del faults["attempts_lost"]  # not a fault: a killed worker costs an attempt
    assert not any(faults.values()), faults
    assert counts["kills"]["drivers"] == 2 and counts["kills"]["workers"] >= 2
    assert len(Ledger.read(folder).get_results()) == NUM_TRIALS


def test_lost_or_repeated_acknowledgment_is_detected(soaked_study, monkeypatch):
    folder, _ = soaked_study
    acknowledged = (folder / ACKNOWLEDGED).read_text()
    first = acknowledged.splitlines()[0]
    try:
        (folder / ACKNOWLEDGED).write_text(f"{acknowledged}{first}\n{'0' * 64}\n")
        faults = count_faults(folder, NUM_TRIALS + 1)
    finally:
        (folder / ACKNOWLEDGED).write_text(acknowledged)
    assert (faults["told_twice"], faults["told_and_gone"], faults["suggestions_missing"]) == (
        1,
        1,
        1,
    )
    monkeypatch.setattr(
        soak_case, "make_run", lambda point: soak_case.make_spec(seed=len(json.dumps(point)))
    )
    assert count_faults(folder, NUM_TRIALS)["outcomes_missing"] > 0
