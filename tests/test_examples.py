"""The examples do what they say."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.study.stages import bank_key
from launcher.study.study_folder import plan_study
from launcher.workers.host import HostFactory
from proxies.core import canon
from proxies.core.spec import RunResult
from sweeps.run.pool import HostCall

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def own_python(monkeypatch):
    """The example says `python`: this one."""
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


@pytest.mark.usefixtures("own_python")
def test_own_trainer(tmp_path):
    """Two runs of the plan for real: both widths learn, and log what they should."""
    study = plan_study(EXAMPLES / "own_trainer" / "plan.toml", tmp_path)
    seconds = study.plan.proxy.timeout_seconds
    host = HostFactory(study_dir=str(tmp_path), code_dir=str(study.code_dir), corpus="", timeout_seconds=seconds)()
    point = {"learning_rate": 2**-6, "warmup_fraction": 0.1, "clip_norm": 1.0}
    losses = []
    for width in study.plan.transfer.widths:
        spec = study.run(shape=study.shape(width), point=point, seed=0, num_steps=study.plan.proxy.num_steps)
        call = HostCall(bank_key=bank_key(spec), num_slots=1, admit=((0, canon.to_json(spec)),), max_steps=50)
        while not (finished := host.advance(call).finished):
            call = dataclasses.replace(call, admit=())
        result = canon.decode(RunResult, finished[0].result)
        assert result.status == "finished" and len(finished[0].curve["grad_norm"]) == spec.schedule.num_steps
        losses.append(result.loss_nats)
    assert max(losses) < 3.5 < math.log(128) and losses[0] != losses[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["own_trainer", "muon_experts"])
@pytest.mark.usefixtures("own_python")
def test_a_trainer_of_ones_own_from_the_plan_to_the_concluded_run(name, tmp_path):
    """Every command of the example's README, on its own files."""
    folder = tmp_path / name
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("study"))

    def forerun(*words):
        path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "launcher", *words, "--json"], cwd=folder, env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode in ((0, 3, 4) if words[0] == "run" else (0,)), done.stdout + done.stderr
        return json.loads(done.stdout)

    gates = forerun("run", "plan.toml")["gates"]
    accept = [word for gate in gates if gate["outcome"] != "passed" for word in ("--accept", gate["name"])]
    frozen = "study/frozen/" + forerun("freeze", "study", *accept, "--reason", "a test")["digest"]
    assert any("your own trainer" in done for done in forerun("verify", frozen, "--prove")["verified"])
    if "rehearse" in (folder / "README.md").read_text():
        assert forerun("rehearse", frozen)["outcome"] == "passed"
    assert forerun("launch", frozen)["event"] == "finished"
    score = forerun("watch", frozen, "--conclude")
    assert score["actual_nats"] < math.log(128)
