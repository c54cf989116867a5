"""Tests of the examples: valid plans, real runs of a user's trainer, and full studies (slow)."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from trainer_venv import require_interpreter

from forerun._launcher.study.plan.file import load_plan
from forerun._launcher.study.plan.study import build_bank_key
from forerun._launcher.study.stages.study_folder import read_study
from forerun._launcher.study.workers.host import HostFactory
from forerun._proxies.core import canon
from forerun._sweeps.run.pool import HostCall

EXAMPLES = Path(__file__).parents[1] / "examples"
UNIFORM_LOSS_NATS = math.log(128)
"""Loss of a uniform guess among the 128 tokens that the examples' trainers train on."""


@pytest.fixture
def python_on_path(monkeypatch):
    """The interpreter of the tests as `python`, which the examples' commands call."""
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    )


@pytest.mark.parametrize(
    "plan", sorted(EXAMPLES.glob("*/plan.toml")), ids=lambda path: path.parent.name
)
def test_plan_of_the_example_is_valid(plan):
    load_plan(plan)


@pytest.mark.usefixtures("python_on_path")
def test_own_trainer_learns_at_both_widths(tmp_path):
    study = read_study(EXAMPLES / "own_trainer" / "plan.toml", tmp_path)
    seconds = study.plan.proxy.timeout_seconds
    host = HostFactory(
        study_dir=str(tmp_path), code_dir=str(study.code_dir), corpus="", timeout_seconds=seconds
    )()
    point = {"learning_rate": 2**-6, "warmup_fraction": 0.1, "clip_norm": 1.0}
    losses = []
    for width in study.plan.transfer.widths:
        spec = study.build_run(
            shape=study.build_shape(width),
            point=point,
            seed=0,
            num_steps=study.plan.proxy.num_steps,
        )
        call = HostCall(
            bank_key=build_bank_key(spec),
            num_slots=1,
            admit=((0, canon.to_json(spec)),),
            seconds=60.0,
        )
        while not (finished := host.advance(call).finished):
            call = dataclasses.replace(call, admit=())
        result = finished[0].result
        assert result.status == "finished"
        assert len(finished[0].curve.grad_norm) == spec.schedule.num_steps
        losses.append(result.loss_nats)
    # Losses well below a guess, which differ because the widths do
    assert max(losses) < 3.5 < UNIFORM_LOSS_NATS and losses[0] != losses[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["own_trainer", "muon_experts", "huggingface"])
@pytest.mark.usefixtures("python_on_path")
def test_user_trainer_runs_from_the_plan_to_the_concluded_main_run(name, tmp_path, monkeypatch):
    """Run every command of the example's README on the example's files."""
    folder = tmp_path / name
    if name == "huggingface":
        monkeypatch.setenv(
            "PATH", os.pathsep.join([str(require_interpreter(name).parent), os.environ["PATH"]])
        )
    shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("study"))

    def forerun(*words):
        path = os.pathsep.join([str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "forerun", *words, "--json"],
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
    not_passed = [gate["name"] for gate in gates if gate["outcome"] != "passed"]
    accept_options = [word for name in not_passed for word in ("--accept", name)]
    digest = forerun("freeze", "study", *accept_options, "--reason", "a test")["digest"]
    frozen = f"study/frozen/{digest}"
    verified = forerun("verify", frozen, "--prove")["verified"]
    assert any("your own trainer" in line for line in verified)
    if "rehearse" in (folder / "README.md").read_text():
        assert forerun("rehearse", frozen)["outcome"] == "passed"
    assert forerun("launch", frozen)["event"] == "finished"
    score = forerun("watch", frozen, "--conclude")
    assert score["actual_nats"] < UNIFORM_LOSS_NATS


@pytest.mark.slow
def test_llama_has_the_same_losses_under_trainer_and_accelerate_and_resumes(tmp_path):
    python, folder = require_interpreter("huggingface"), EXAMPLES / "huggingface"
    values_by_option = {
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
    options = []
    for name, value in values_by_option.items():
        options += [f"--{name}", str(value)]

    def train(script, out, *more):
        """Run a script and return its training losses by step and its validation loss."""
        out.mkdir(exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
        command = [python, script, *options, "--out", out, *more]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        losses = {line["step"]: line["train_loss"] for line in lines if "train_loss" in line}
        return losses, lines[-1]["val_loss"]

    trainer_losses, trainer_validation_loss = train("with_trainer.py", tmp_path / "trainer")
    losses, validation_loss = train("with_accelerate.py", tmp_path / "accelerate")
    assert trainer_losses == pytest.approx(losses, abs=1e-4)
    assert trainer_validation_loss == pytest.approx(validation_loss, abs=1e-4)

    # The second script saved its state after 100 steps and resumes from there.
    (tmp_path / "accelerate" / "metrics.jsonl").unlink()
    resumed_losses, resumed_validation_loss = train(
        "with_accelerate.py", tmp_path / "accelerate", "--resume"
    )
    last_step = values_by_option["num-steps"]
    assert min(resumed_losses) == 101
    assert resumed_losses[last_step] == pytest.approx(losses[last_step], abs=1e-6)
    assert resumed_validation_loss == pytest.approx(validation_loss)
