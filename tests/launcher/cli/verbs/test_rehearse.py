"""Tests of `forerun rehearse`: refused options, and what `verify` reports of a rehearsal."""

import pytest
from main_run import QUIET_TORCH, make_tiny_decision, write_attested
from tiny_study import run_forerun, run_json

from forerun._launcher.main_run.frozen.config_names import shorten_config_name
from forerun._launcher.main_run.frozen.frozen_folder import ATTESTED, write_frozen
from forerun._launcher.main_run.frozen.launch_file import attest
from forerun._launcher.main_run.rehearsal.registry import RehearsalAttestation
from forerun._proxies.core import canon
from forerun._sweeps.store.lock import DriverLock

pytestmark = QUIET_TORCH


@pytest.fixture
def frozen(corpus, tmp_path):
    """Folder of a frozen config without a study, its corpus, and its decision."""
    decision = make_tiny_decision(corpus, num_ranks=2)
    return write_attested(tmp_path / "alone", decision).parent, corpus, decision


def test_rehearsal_that_cannot_start_is_refused(frozen, tmp_path):
    folder, corpus, _ = frozen
    code, _, err = run_forerun("rehearse", folder, "--data", tmp_path / "nothing")
    assert code == 2
    assert "nothing" in err
    code, _, err = run_forerun("rehearse", folder, "--data", corpus, "--full")
    assert code == 2
    assert "the real shape is for 2 ranks, this machine has 0 GPUs" in err
    code, _, err = run_forerun("rehearse", folder, "--data", corpus, "--only", "flood")
    assert code == 2
    with DriverLock(folder / "rehearsal"):
        code, _, err = run_forerun("rehearse", folder, "--data", corpus, "--only", "nan")
    assert code == 75


def test_verify_reports_the_rehearsal_and_suggests_a_missing_one(frozen, tmp_path):
    _, _, decision = frozen
    folder = write_frozen(
        tmp_path / "frozen", decision, {kind: {"of": kind} for kind in ATTESTED}
    ).parent
    (folder / "rehearsal").mkdir()
    code, body = run_json("verify", folder)
    assert (code, body["rehearsed"], body["not_proven"]) == (0, None, [])
    assert (
        run_forerun("verify", folder)[1].splitlines()[-1]
        == f"next: forerun rehearse {shorten_config_name(folder)}"
    )
    record = RehearsalAttestation(
        outcome="passed", copy={"kind": "full"}, machine={}, seconds=1.0, drills=()
    )
    attest(folder, "rehearsal", decision.digest, canon.to_json(record))
    assert run_json("verify", folder)[1]["rehearsed"]["outcome"] == "passed"
