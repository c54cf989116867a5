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
from trainer_venv import interpreter

from launcher.plan.file import load_plan
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
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )


@pytest.mark.parametrize(
    "plan", sorted(EXAMPLES.glob("*/plan.toml")), ids=lambda path: path.parent.name
)
def test_every_plan_is_a_plan(plan):
    load_plan(plan)


@pytest.mark.usefixtures("own_python")
def test_own_trainer(tmp_path):
    """Two runs of the plan for real: both widths learn, and log what they should."""
    study = plan_study(EXAMPLES / "own_trainer" / "plan.toml", tmp_path)
    seconds = study.plan.proxy.timeout_seconds
    host = HostFactory(
        study_dir=str(tmp_path), code_dir=str(study.code_dir), corpus="", timeout_seconds=seconds
    )()
    point = {"learning_rate": 2**-6, "warmup_fraction": 0.1, "clip_norm": 1.0}
    losses = []
    for width in study.plan.transfer.widths:
        spec = study.run(
            shape=study.shape(width), point=point, seed=0, num_steps=study.plan.proxy.num_steps
        )
        call = HostCall(
            bank_key=bank_key(spec), num_slots=1, admit=((0, canon.to_json(spec)),), seconds=60.0
        )
        while not (finished := host.advance(call).finished):
            call = dataclasses.replace(call, admit=())
        result = canon.decode(RunResult, finished[0].result)
        assert (
            result.status == "finished"
            and len(finished[0].curve["grad_norm"]) == spec.schedule.num_steps
        )
        losses.append(result.loss_nats)
    assert max(losses) < 3.5 < math.log(128) and losses[0] != losses[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["own_trainer", "muon_experts", "huggingface"])
@pytest.mark.usefixtures("own_python")
def test_a_trainer_of_ones_own_from_the_plan_to_the_concluded_run(name, tmp_path, monkeypatch):
    """Every command of the example's README, on its own files."""
    folder = tmp_path / name
    if name == "huggingface":
        monkeypatch.setenv(
            "PATH", os.pathsep.join([str(interpreter(name).parent), os.environ["PATH"]])
        )
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("study"))

    def forerun(*words):
        path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "launcher", *words, "--json"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in ((0, 3, 4) if words[0] == "run" else (0,)), (
            done.stdout + done.stderr
        )
        return json.loads(done.stdout)

    gates = forerun("run", "plan.toml")["gates"]
    accept = [
        word for gate in gates if gate["outcome"] != "passed" for word in ("--accept", gate["name"])
    ]
    frozen = "study/frozen/" + forerun("freeze", "study", *accept, "--reason", "a test")["digest"]
    assert any(
        "your own trainer" in done for done in forerun("verify", frozen, "--prove")["verified"]
    )
    if "rehearse" in (folder / "README.md").read_text():
        assert forerun("rehearse", frozen)["outcome"] == "passed"
    assert forerun("launch", frozen)["event"] == "finished"
    score = forerun("watch", frozen, "--conclude")
    assert score["actual_nats"] < math.log(128)


@pytest.mark.slow
def test_the_llama_trains_alike_under_trainer_and_accelerate(tmp_path):
    """Both scripts of the example, and the second stopped short and resumed."""
    python, folder = interpreter("huggingface"), EXAMPLES / "huggingface"
    sizes = {
        "lr": 0.02,
        "warmup-steps": 4,
        "clip-norm": 1.0,
        "num-steps": 120,
        "seed": 0,
        "width": 32,
        "base-width": 16,
        "head-dim": 8,
        "num-layers": 2,
        "seq-len": 32,
        "batch-sequences": 8,
    }
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]

    def losses(script, out, *more):
        out.mkdir(exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
        command = [python, script, *options, "--out", out, *more]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["train_loss"] for line in lines if "train_loss" in line}, lines[
            -1
        ]["val_loss"]

    trainer, held = losses("with_trainer.py", tmp_path / "trainer")
    loop, again = losses("with_accelerate.py", tmp_path / "loop")
    assert trainer == pytest.approx(loop, abs=1e-4) and held == pytest.approx(again, abs=1e-4)
    (tmp_path / "loop" / "metrics.jsonl").unlink()  # its state after 100 steps is there
    resumed, last = losses("with_accelerate.py", tmp_path / "loop", "--resume")
    assert (
        min(resumed) == 101
        and resumed[120] == pytest.approx(loop[120], abs=1e-6)
        and last == pytest.approx(again)
    )
