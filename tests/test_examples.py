"""The examples do what they say."""

import dataclasses
import math
import os
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
    assert max(losses) < 2.5 < math.log(128) and losses[0] != losses[1]
