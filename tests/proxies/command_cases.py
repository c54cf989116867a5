"""Little trainers without a model, each misbehaving in its own way, and the runs that ask for
them.
"""

import os
import sys
import time
from pathlib import Path

from proxies.core.hyperparameters import Hparams
from proxies.core.programs import Command
from proxies.core.rules import named
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.core.spec import Numerics, RunSpec
from proxies.external.command import CommandEngine, CommandSettings

SHAPE = Shape(
    num_layers=2, width=32, num_heads=4, num_kv_heads=2, ffn_width=64, vocab_size=256, seq_len=16
)
NUM_STEPS = 6
PYTHON = f"'{sys.executable}' -I -S"
TEMPLATE = PYTHON + " trainer.py {run_json}"
PREAMBLE = """
import json, os, signal, subprocess, sys, time
RUN = json.load(open(sys.argv[1]))
N = RUN["values"]["num_steps"]
LOG = open(os.path.join(os.environ["FORERUN_RUN_DIR"], "metrics.jsonl"), "a")
def log(**row):
    print(json.dumps(row), file=LOG, flush=True)
def train(first=1, last=N, loss=3.0):
    for step in range(first, last + 1):
        log(step=step, train_loss=loss - step / 100)
"""
GOOD = "train()\nlog(step=N, val_loss=2.5)\n"


def command(template=TEMPLATE, **changes):
    fields = {
        "metrics_format": "jsonl",
        "metrics_path": "metrics.jsonl",
        "step_key": "step",
        "train_loss_key": "train_loss",
        "validation_loss_key": "val_loss",
        "grad_norm_key": "",
        "template": template,
    }
    return Command(**{**fields, **changes})


def command_spec(
    its_command=None, *, num_steps=NUM_STEPS, width=32, seed=0, vocab_size=256, **hparams
):
    base = Shape(
        num_layers=2,
        width=32,
        num_heads=4,
        num_kv_heads=2,
        ffn_width=64,
        vocab_size=vocab_size,
        seq_len=16,
    )
    return RunSpec(
        optimizer="adamw",
        shape=base.at_width(width),
        base_shape=base,
        parametrization=named("mup"),
        hparams=Hparams(**{"learning_rate": 0.01, **hparams}),
        schedule=Schedule(kind="cosine", num_steps=num_steps, warmup_steps=2),
        batch_tokens=64,
        data_id="theirs",
        seed=seed,
        numerics=Numerics(),
        command=its_command or command(),
    )


class Place:
    """A folder with a trainer in it, and an engine over it."""

    def __init__(self, folder, *, timeout_seconds=30.0, corpus=None):
        self.code_dir, self.runs_dir = folder / "code", folder / "a study" / "external"
        self.code_dir.mkdir(parents=True)
        self.workplace = CommandSettings(
            runs_dir=self.runs_dir,
            code_dir=self.code_dir,
            corpus=corpus,
            timeout_seconds=timeout_seconds,
        )
        self.engine = CommandEngine(self.workplace)

    def trainer(self, code):
        (self.code_dir / "trainer.py").write_text(PREAMBLE + code, encoding="utf-8")

    def outcome(self, code=None, spec=None, limit_seconds=20.0):
        """(result, curve) of one run; raises what the engine raises."""
        if code is not None:
            self.trainer(code)
        self.engine.admit(0, spec or command_spec())
        until = time.monotonic() + limit_seconds
        while time.monotonic() < until:
            if ended := self.engine.advance(50):
                return ended[0][1:]
        self.engine.evict(0)
        raise AssertionError("the run does not end")

    def attempts(self, spec=None):
        return sorted((self.runs_dir / (spec or command_spec()).id).iterdir())


def alive(pid):
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def gone(pid, seconds=5.0):
    """Whether a process ends within so long."""
    until = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.02)
    return not alive(pid)


def number_in(path, seconds=5.0):
    """A number that some process will write to a file."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if path.exists() and path.read_text().strip():
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"{path} does not come")
