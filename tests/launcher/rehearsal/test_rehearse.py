"""The verb, with real ranks under torchrun and the real supervisor."""

import pytest
from main_run import QUIET_TORCH, tiny_decision, write_attested
from tiny_study import ask, forerun

from launcher.base.study_names import shown_name
from launcher.frozen.frozen_folder import ATTESTED, write_frozen
from launcher.frozen.launch_file import attest
from launcher.rehearsal.registry import RehearsalAttestation
from proxies.core import canon
from sweeps.store.lock import DriverLock

pytestmark = QUIET_TORCH


@pytest.fixture
def frozen(corpus, tmp_path):
    """A config that lies alone, and its corpus."""
    decision = tiny_decision(corpus, num_ranks=2)
    return write_attested(tmp_path / "alone", decision).parent, corpus, decision


def test_a_config_that_cannot_be_rehearsed_is_refused_in_words(frozen, tmp_path):
    folder, corpus, _ = frozen
    code, _, err = forerun("rehearse", folder, "--data", tmp_path / "nothing")
    assert code == 2
    assert "nothing" in err
    code, _, err = forerun("rehearse", folder, "--data", corpus, "--full")
    assert code == 2
    assert "the real shape is for 2 ranks, this machine has 0 GPUs" in err
    code, _, err = forerun("rehearse", folder, "--data", corpus, "--only", "flood")
    assert code == 2
    with DriverLock(folder / "rehearsal"):
        code, _, err = forerun("rehearse", folder, "--data", corpus, "--only", "nan")
    assert code == 75


def test_verify_says_whether_it_was_rehearsed_and_minds_no_run_under_way(frozen, tmp_path):
    _, _, decision = frozen
    folder = write_frozen(
        tmp_path / "frozen", decision, {kind: {"of": kind} for kind in ATTESTED}
    ).parent
    (folder / "rehearsal").mkdir()
    code, body = ask("verify", folder)
    assert (code, body["rehearsed"], body["not_proven"]) == (0, None, [])
    assert (
        forerun("verify", folder)[1].splitlines()[-1]
        == f"next: forerun rehearse {shown_name(folder)}"
    )
    record = RehearsalAttestation(
        outcome="passed", copy={"kind": "full"}, machine={}, seconds=1.0, drills=()
    )
    attest(folder, "rehearsal", decision.digest, canon.to_json(record))
    assert ask("verify", folder)[1]["rehearsed"]["outcome"] == "passed"
