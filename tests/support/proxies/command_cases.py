"""Cases for tests of users' training commands: small scripts without a model, and their runs."""

import os
import sys
import time
from pathlib import Path

from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.programs import Command
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Numerics, RunSpec
from forerun._proxies.external.command import CommandEngine, CommandSettings

SHAPE = Shape(
    num_layers=2, width=32, num_heads=4, num_kv_heads=2, ffn_width=64, vocab_size=256, seq_len=16
)
"""Base shape of the runs."""
NUM_STEPS, BATCH_TOKENS = 6, 64
"""Steps of a run by default, and tokens of each step."""
PYTHON = f"'{sys.executable}' -I -S"
"""Interpreter that starts fast: isolated, without site-packages."""
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
"""Beginning of every trainer script.

`N` is the number of steps. `log` writes a line of metrics to `LOG`, and `train` logs the steps from
`first` to `last`.
"""
GOOD = "train()\nlog(step=N, val_loss=2.5)\n"
"""Trainer that logs every step and a validation loss."""


def make_command(template=TEMPLATE, **changes):
    """Return a command that logs JSON lines, with other fields of `Command` changed."""
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


def make_command_spec(run_command=None, *, num_steps=NUM_STEPS, width=32, seed=0, **hparams):
    """Return the spec of a run that a command trains."""
    return RunSpec(
        optimizer="adamw",
        shape=SHAPE.at_width(width),
        base_shape=SHAPE,
        parametrization=get_parametrization("mup"),
        hparams=Hparams(**{"learning_rate": 0.01, **hparams}),
        schedule=Schedule(kind="cosine", num_steps=num_steps, warmup_steps=2),
        batch_tokens=BATCH_TOKENS,
        data_id="user",
        seed=seed,
        numerics=Numerics(),
        command=run_command or make_command(),
    )


class TrainerFolder:
    """A folder with a trainer script, and the engine that runs it."""

    def __init__(self, folder, *, timeout_seconds=30.0, corpus=None):
        self.code_dir, self.runs_dir = folder / "code", folder / "a study" / "external"
        self.code_dir.mkdir(parents=True)
        self.settings = CommandSettings(
            runs_dir=self.runs_dir,
            code_dir=self.code_dir,
            corpus=corpus,
            timeout_seconds=timeout_seconds,
        )
        self.engine = CommandEngine(self.settings)

    def write_trainer(self, code):
        """Write the trainer script."""
        (self.code_dir / "trainer.py").write_text(PREAMBLE + code, encoding="utf-8")

    def train(self, code=None, spec=None, limit_seconds=20.0):
        """Train one run and return its (result, curve).

        Args:
            code: Trainer code after the preamble; the script that is there if None.
            spec: Spec of the run; `make_command_spec()` if None.
            limit_seconds: Time after which the test fails.
        """
        if code is not None:
            self.write_trainer(code)
        self.engine.admit(0, spec or make_command_spec())
        deadline = time.monotonic() + limit_seconds
        while time.monotonic() < deadline:
            if outcomes := self.engine.advance(50):
                ((_, result, curve),) = outcomes
                return result, curve
        self.engine.evict(0)
        raise AssertionError("the run does not end")

    def list_attempts(self, spec=None):
        """Return the folders of a run's attempts."""
        return sorted((self.runs_dir / (spec or make_command_spec()).id).iterdir())


def is_alive(pid):
    """Return whether a process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def wait_until_gone(pid, seconds=5.0):
    """Wait for a process to end; return whether it did within the time limit."""
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


def wait_for_number(path, seconds=5.0):
    """Wait for a process to write a number to a file, and return the number."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().strip():
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"no number in {path} after {seconds} s")
