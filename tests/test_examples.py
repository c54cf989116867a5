"""The examples do what they say."""

import math
import os
import sys
import tomllib
from pathlib import Path

import pytest

from launcher.host import HostFactory
from launcher.stages import bank_key
from proxies import canon
from proxies.programs import Command
from proxies.rules import named
from proxies.schedule import Schedule
from proxies.shape import Shape
from proxies.spec import Hparams, Numerics, RunResult, RunSpec

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def plan():
    return tomllib.loads((EXAMPLES / "own_trainer" / "plan.toml").read_text())


@pytest.fixture
def own_python(monkeypatch):
    """The example says `python`: this one."""
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


def own_spec(plan, width, learning_rate):
    proxy, model = plan["proxy"], plan["model"]
    command = Command(
        template=proxy["command"], metrics_format=proxy["metrics_format"], metrics_path=proxy["metrics_path"],
        step_key="step", train_loss_key="train_loss", validation_loss_key="val_loss",
        grad_norm_key=proxy["metrics_grad_norm_key"],
    )  # fmt: skip
    base = Shape(
        num_layers=model["num_layers"], width=16, num_heads=2, num_kv_heads=2, ffn_width=64,
        vocab_size=plan["data"]["vocab_size"], seq_len=model["seq_len"],
    )  # fmt: skip
    return RunSpec(
        shape=base.at_width(width),
        base_shape=base,
        parametrization=named("mup"),
        hparams=Hparams(learning_rate=learning_rate, clip_norm=None),
        schedule=Schedule(kind="cosine", num_steps=proxy["num_steps"], warmup_steps=4),
        batch_tokens=proxy["batch_tokens"],
        data_id=plan["data"]["external"],
        seed=0,
        numerics=Numerics(),
        command=command,
    )


@pytest.mark.usefixtures("own_python")
def test_own_trainer(plan, tmp_path):
    """Two trials for real: both widths learn, and log what they should."""
    host = HostFactory(
        study_dir=str(tmp_path), code_dir=str(EXAMPLES / "own_trainer"), corpus="", timeout_seconds=120.0
    )()
    losses = []
    for width in (16, 32):
        spec = own_spec(plan, width, 2**-6)
        admit, finished = [(0, canon.to_json(spec))], []
        while not finished:
            finished, admit = host.advance(bank_key(spec), 1, admit, 50), []
        result = canon.decode(RunResult, finished[0].result)
        assert result.status == "finished" and len(finished[0].curve["grad_norm"]) == spec.schedule.num_steps
        losses.append(result.loss_nats)
    assert max(losses) < 2.5 < math.log(128) and losses[0] != losses[1]
