"""The verb, with real ranks under torchrun and the real supervisor."""

import json
import signal
import subprocess
import sys
import time

import pytest
from main_run import tiny_decision, write_corpus
from tiny_study import forerun

from launcher import chronicle
from launcher.attestations import attest
from launcher.frozen_folder import ATTESTED, write_frozen
from launcher.launch_file import write_launch
from launcher.rehearsal.results import Attested
from launcher.rehearsal.run import DRILLS
from launcher.rehearsal.standing import rehearsal_of
from proxies import canon
from sweeps.lock import DriverLock

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:torch", "ignore::DeprecationWarning:torch", "ignore::UserWarning:torch"
)


@pytest.fixture
def frozen(tmp_path):
    """A config that lies alone, and its corpus."""
    write_corpus(tmp_path / "corpus")
    corpus = tmp_path / "corpus" / "tokens"
    decision = tiny_decision(corpus, num_ranks=2)
    return write_launch(tmp_path / "alone", decision).parent, corpus, decision


def test_a_rank_is_killed_and_the_rehearsal_says_so(frozen):
    folder, corpus, decision = frozen
    code, out, err = forerun("rehearse", folder, "--data", corpus, "--only", "killed_rank", "--only", "data", "--json")
    assert code == 0, err
    body = json.loads(out)
    killed, windows = body["drills"]
    assert (killed["name"], killed["outcome"], killed["seen"]["num_restarts"], killed["seen"]["struck"]) == (
        "killed_rank", "passed", 1, True,
    )  # fmt: skip
    assert killed["seen"]["num_tensors_differing"] == 0
    assert windows["outcome"] == "passed"
    assert (windows["seen"]["num_runs_compared"], windows["seen"]["num_windows"]) == (3, 128)
    assert body["copy"]["stands_for"] == decision.digest != body["copy"]["digest"]
    assert set(body["not_asked_for"]) == set(DRILLS) - {"killed_rank", "data"}
    assert "rehearsal:" in err
    standing = rehearsal_of(folder, decision.digest)
    assert not standing.rehearsed
    assert "UNREHEARSED in part: 2 of 2 drills passed on a scaled-down copy" in standing.sentence
    assert not (folder / "rehearsal").exists()
    (event,) = [entry for entry in chronicle.entries(folder / "run") if entry.kind == "rehearsed"]
    assert event.text == "Rehearsed, in part: passed, 2 drills"
    code, out, err = forerun("rehearse", folder, "--data", corpus, "--only", "budget", "--json")
    assert code == 0, err
    assert [drill["name"] for drill in json.loads(out)["drills"]] == ["killed_rank", "data", "budget"]  # it adds up


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
    folder = write_frozen(tmp_path / "frozen", decision, {kind: {"of": kind} for kind in ATTESTED}).parent
    (folder / "rehearsal").mkdir()
    code, out, _ = forerun("verify", folder, "--json")
    assert (code, json.loads(out)["rehearsed"]) == (0, None)
    assert json.loads(out)["not_proven"] == []
    code, out, _ = forerun("verify", folder)
    assert out.splitlines()[-1] == (f"UNREHEARSED: no drill was held with this config; forerun rehearse {folder}")
    record = Attested(outcome="passed", not_asked_for=(), copy={"kind": "full"}, machine={}, seconds=1.0, drills=())
    attest(folder, "rehearsal", decision.digest, canon.to_json(record))
    assert "rehearsed: 0 of 0 drills passed on the real shape" in forerun("verify", folder)[1]
    assert json.loads(forerun("verify", folder, "--json")[1])["rehearsed"]["outcome"] == "passed"


@pytest.mark.slow
def test_every_drill_passes_and_an_interrupted_rehearsal_goes_on(frozen):
    folder, corpus, decision = frozen
    command = [sys.executable, "-m", "launcher", "rehearse", str(folder), "--data", str(corpus), "--json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        progress, until = folder / "rehearsal" / "progress.json", time.monotonic() + 200
        while not progress.exists() and time.monotonic() < until:
            time.sleep(0.2)
        time.sleep(1.0)
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 130
    told = json.loads(progress.read_text())["results"]
    assert [result["name"] for result in told] == list(DRILLS)[: len(told)]
    second = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert second.returncode == 0, second.stdout[-3000:]
    body = json.loads(second.stdout)
    found = {drill["name"]: drill["outcome"] for drill in body["drills"]}
    assert {name for name, outcome in found.items() if outcome == "skipped"} <= {"budget", "export"}
    assert list(found) == list(DRILLS)
    assert "failed" not in found.values()
    assert body["drills"][: len(told)] == told  # not held again
    standing = rehearsal_of(folder, decision.digest)
    assert standing.rehearsed, standing.sentence
    line = forerun("launch", folder, "--data", corpus, "--dry-run", "--json")
    assert json.loads(line[1])["rehearsed"]["outcome"] == "passed"
    assert "rehearsed: 13 of 15 drills passed" in line[2]
    assert [path.name for path in (folder / "attestations").iterdir()] == ["rehearsal.json"]
