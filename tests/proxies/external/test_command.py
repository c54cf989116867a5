"""Tests of the engine that trains runs with a user's command.

They cover what the command receives, how its metrics become a result, how failures are reported,
and that none of the command's processes outlives its run. Trainers of these tests are scripts after
the preamble in command_cases, which defines `train`, `log`, `LOG` and `N`.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_cases import (
    BATCH_TOKENS,
    GOOD,
    NUM_STEPS,
    PYTHON,
    TrainerFolder,
    make_command,
    make_command_spec,
    wait_for_number,
    wait_until_gone,
)

from forerun._proxies.core import canon, flops
from forerun._proxies.core.failures import CAUSES, classify
from forerun._proxies.core.programs import PLACEHOLDERS
from forerun._proxies.core.spec import RunSpec
from forerun._proxies.external.command import CommandError, find_program, get_placeholder_values


@pytest.fixture
def trainer(tmp_path):
    """A trainer folder at a path with spaces."""
    return TrainerFolder(tmp_path / "with spaces")


def test_good_trainer_gives_a_result_and_a_curve(trainer):
    result, curve = trainer.train(GOOD)
    spec = make_command_spec()
    assert (result.status, result.loss_nats, result.num_steps, result.id) == (
        "finished",
        2.5,
        NUM_STEPS,
        spec.id,
    )
    assert curve.steps == tuple(range(1, NUM_STEPS + 1)) and curve.train_loss_nats[0] == 2.99
    assert curve.grad_norm == () and result.curve_id == canon.compute_content_id(curve)
    assert (
        result.tokens == NUM_STEPS * BATCH_TOKENS
        and result.flops == flops.compute_flops_per_token(spec.shape) * result.tokens
    )
    assert 0 < result.seconds < 10 and trainer.engine.steps == {}


def test_trainer_receives_every_placeholder_as_one_argument(tmp_path):
    """The file run.json holds the same values and the spec."""
    names = sorted(PLACEHOLDERS)
    # One quoted argument per placeholder, such as 'lr={lr} {{x}}'. It becomes "lr=0.3 {x}".
    template = (
        PYTHON
        + " trainer.py {run_json} "
        + " ".join(f"'{name}={{{name}}} {{{{x}}}}'" for name in names)
    )
    spec = make_command_spec(
        make_command(template), width=64, learning_rate=0.1 + 0.2, eps=1e-300, clip_norm=None
    )
    trainer = TrainerFolder(tmp_path / "it's «quoted»", corpus=tmp_path / "a corpus")
    # The first two arguments are trainer.py and run.json.
    code = "json.dump([sys.argv[2:], os.getcwd()], open('received.json', 'w'))\n" + GOOD
    trainer.train(code, spec)
    arguments, folder = json.loads((trainer.code_dir / "received.json").read_text())
    assert folder == str(trainer.code_dir)
    assert [argument.partition("=")[0] for argument in arguments] == names
    values = {}
    for argument in arguments:
        name, _, value = argument.partition("=")
        values[name] = value.removesuffix(" {x}")
    (attempt,) = trainer.list_attempts(spec)
    assert values["run_dir"] == str(attempt) and values["data"] == str(tmp_path / "a corpus")
    assert (
        float(values["lr"]) == 0.1 + 0.2
        and float(values["eps"]) == 1e-300
        and values["clip_norm"] == "inf"
    )
    assert (values["width"], values["width_multiplier"], values["num_heads"]) == ("64", "2.0", "8")
    recorded = json.loads((attempt / "run.json").read_text())
    assert canon.decode(RunSpec, recorded["spec"]) == spec
    num_words_before = len([*shlex.split(PYTHON), "trainer.py", "run.json"])
    assert recorded["argv"][num_words_before:] == arguments
    assert recorded["values"]["clip_norm"] is None and recorded["values"]["lr"] == 0.1 + 0.2


def test_exactly_the_placeholders_have_values():
    values = get_placeholder_values(make_command_spec(), Path("r"), Path("c"))
    assert set(values) == set(PLACEHOLDERS)


USUAL_LOGS = {
    "a trainer that resumed": (
        "train(last=4, loss=9.9)\ntrain(first=3)\nlog(step=N, val_loss=2.5)",
        2.97,
    ),
    "steps from 0": ("train(0, N - 1)\nlog(step=N - 1, val_loss=2.5)", 2.98),
    "steps from 0 to N": (
        "train(0, N)\nlog(step=0, val_loss=5.5)\nlog(step=N, val_loss=2.5)",
        2.98,
    ),
    "empty columns": (
        (
            "for s in range(1, N + 1): "
            "log(step=s, train_loss=3 - s / 100, val_loss=None if s < N else 2.5)"
        ),
        2.97,
    ),
    "validation without a step or an end of line, noise": (
        "LOG.write('Überraschung\\n[1]\\n\\n')\ntrain()\nLOG.write(json.dumps(dict(val_loss=2.5)))",
        2.97,
    ),
    "null where there is nothing to log": (
        (
            "log(step=2, train_loss=None, val_loss=None)\n"
            "train()\n"
            "log(step=N, val_loss=2.5)\n"
            "log(step=N, train_loss=None, val_loss=None, seconds=9)"
        ),
        2.97,
    ),
    "half a line": (GOOD + 'LOG.write(\'{"step": 7, "val_\')', 2.97),
}
"""Trainer code, and the training loss that is expected at step 3, by kind of log.

`train` logs the loss 3 - step / 100, so step 3 has 2.97, and 2.98 if the trainer counts from 0.
"""


@pytest.mark.parametrize("name", USUAL_LOGS)
def test_logs_as_people_write_them_are_read(trainer, name):
    code, third_loss = USUAL_LOGS[name]
    result, curve = trainer.train(code)
    assert (result.status, result.loss_nats, result.num_steps) == ("finished", 2.5, NUM_STEPS), (
        result
    )
    losses = dict(zip(curve.steps, curve.train_loss_nats, strict=True))
    assert losses[3] == pytest.approx(third_loss)
    assert curve.steps == tuple(range(1, NUM_STEPS + 1))


DIVERGED = {
    "NaN": (
        "train(last=3)\nlog(step=4, train_loss=float('nan'))\ntime.sleep(60)",
        "train_loss is NaN at step 4",
        3,
    ),
    "a bare nan": (
        'train(last=3)\nLOG.write(\'{"step": 4, "train_loss": nan}\\n\')',
        "train_loss is NaN at step 4",
        3,
    ),
    "inf": ("log(step=1, train_loss='inf')\nsys.exit(3)", "train_loss is inf at step 1", 0),
    "validation": ("train()\nlog(step=N, val_loss=float('nan'))", "val_loss is NaN at step 6", 6),
    "null to the end": (
        (
            "train(last=3)\n"
            "for s in (4, 5, 6): log(step=s, train_loss=None)\n"
            "log(step=N, val_loss=None)"
        ),
        "train_loss is null at step 4",
        3,
    ),
    "validation null": ("train()\nlog(step=N, val_loss=None)", "val_loss is null at step 6", 6),
    "null, then an error": (
        "train(last=3)\nlog(step=4, train_loss=None, val_loss=None)\nsys.exit(1)",
        "train_loss is null at step 4",
        3,
    ),
    # A random guess has log(256) = 5.5 nats; losses far above it count as diverged.
    "too high": (
        "train(last=3)\nlog(step=4, train_loss=6.6)\ntime.sleep(60)",
        "loss 6.6 at step",
        4,
    ),
    "validation too high": ("train()\nlog(step=N, val_loss=6.6)", "loss 6.6 at step", 6),
}
"""Trainer code, the beginning of the reason, and the number of steps of the result, by kind.

After the divergence, a trainer may sleep: forerun must not wait for its end.
"""


@pytest.mark.parametrize("name", DIVERGED)
def test_divergence_is_a_result(trainer, name):
    code, reason, num_steps = DIVERGED[name]
    result, curve = trainer.train(code, limit_seconds=10)
    assert (result.status, result.loss_nats, result.num_steps) == ("diverged", None, num_steps)
    assert result.reason.startswith(reason) and len(curve.steps) == num_steps
    assert result.last_train_loss_nats == (curve.train_loss_nats[-1] if num_steps else None)
    assert result.tokens == num_steps * BATCH_TOKENS


@pytest.mark.parametrize(
    "end", ["print('Killed'); sys.exit(137)", "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_command_killed_by_sigkill_counts_as_out_of_memory(trainer, end):
    with pytest.raises(
        CommandError, match=r"killed by SIGKILL \((exit code 137|signal 9)\), probably for memory"
    ) as caught:
        trainer.train(f"train(last=3)\n{end}")
    assert CAUSES[classify(caught.value)].words == "out of memory"


FAILED = {
    "exit": (
        (
            "train(last=2)\n"
            "print('Grüße ☃', file=sys.stderr)\n"
            "print('\\x1b[31mout of memory\\x00')\n"
            "sys.exit(137)"
        ),
        "exit code 137.*Grüße ☃.*out of memory",
    ),
    "signal": ("os.kill(os.getpid(), signal.SIGSEGV)", "signal 11"),
    "no metrics": ("os.remove(LOG.name)", "no 'train_loss'; there is no file at .*metrics.jsonl"),
    "other names": ("log(step=1, loss=3.0, eval={'loss': 2.0})", "holds eval.loss, loss, step"),
    "no validation": ("train()", "no 'val_loss'"),
    "validation first": ("log(step=0, val_loss=5.0)\ntrain()", "'val_loss' is of step 0"),
    "too short": ("train(last=3)\nlog(step=3, val_loss=2.0)", "at step 3"),
    "too long": ("log(step=7, train_loss=3.0)\ntime.sleep(60)", "step is 7"),
    "no step": ("log(train_loss=3.0)", "without a step"),
    "text": ("log(step=1, train_loss='low')", '"low" at step 1'),
    "true": ("train()\nlog(step=6, val_loss=True)", "val_loss is true at step 6: must be a number"),
    "negative": ("log(step=1, train_loss=-2.0)", "-2 at step 1"),
    "odd lines": ("LOG.write('step 1: loss 3\\n' * 3)", "3 lines are not JSON objects"),
    "timeout": ("time.sleep(60)", "timeout_seconds = 3"),
}
"""Trainer code, and the pattern that the error must contain, by kind of failure."""


@pytest.mark.parametrize("name", FAILED)
def test_failure_names_cause_attempt_and_run(tmp_path, name):
    code, cause = FAILED[name]
    trainer = TrainerFolder(tmp_path, timeout_seconds=3.0)
    with pytest.raises(CommandError) as caught:
        trainer.train(code, limit_seconds=10)
    text = f"{caught.value}\n{caught.value.log_tail}"
    for pattern in [cause, "attempt-1 in ", make_command_spec().id]:
        assert re.search(pattern, text, re.DOTALL), text
    assert str(caught.value).isprintable() and len(str(caught.value)) < 2500
    assert trainer.engine.steps == {}


def test_advance_returns_soon_while_the_command_runs(trainer):
    trainer.write_trainer("time.sleep(60)")
    trainer.engine.admit(0, make_command_spec())
    began = time.monotonic()
    assert trainer.engine.advance(50) == [] and time.monotonic() - began < 3
    with pytest.raises(CommandError, match="one command at a time"):
        trainer.engine.admit(0, make_command_spec(seed=1))
    trainer.engine.evict(0)
    assert trainer.engine.steps == {} and trainer.engine.advance(50) == []


GRANDCHILD = """
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import signal, time\\nsignal.signal(15, signal.SIG_IGN)\\n"
                          "print(1, flush=True)\\ntime.sleep(300)"], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
with open("child.part", "w") as file: file.write(str(child.pid))
os.rename("child.part", "child.pid")
"""  # noqa: E501
"""Trainer code that starts a process in another session and writes its id to a file.

The process ignores SIGTERM (signal 15). The trainer waits until it does.
"""


@pytest.fixture
def short_grace(monkeypatch):
    """Kill a command 0.2 s after SIGTERM."""
    monkeypatch.setattr("forerun._proxies.external.command._GRACE_SECONDS", 0.2)


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("ending", ["finished", "evicted", "dropped"])
def test_grandchild_in_another_session_that_ignores_sigterm_is_killed(trainer, ending):
    """The ranks of torchrun are such processes. One left over would share the next run's device.

    The run ends, is evicted, or loses its engine.
    """
    code = GRANDCHILD + (GOOD if ending == "finished" else "time.sleep(300)")
    if ending == "finished":
        trainer.train(code)
    else:
        trainer.write_trainer(code)
        trainer.engine.admit(0, make_command_spec())
        pid = wait_for_number(trainer.code_dir / "child.pid")
        if ending == "evicted":
            trainer.engine.evict(0)
        else:
            trainer.engine = None  # the engine is garbage and ends its processes
            assert wait_until_gone(pid)
    assert wait_until_gone(wait_for_number(trainer.code_dir / "child.pid"), seconds=0.5)


WORKER = """
import sys, time
sys.path[:0] = sys.argv[1].split(":")
from pathlib import Path
from command_cases import TrainerFolder, make_command_spec
trainer = TrainerFolder(Path(sys.argv[2]))
trainer.write_trainer(sys.argv[3])
trainer.engine.admit(0, make_command_spec())
while True: trainer.engine.advance(50)
"""
"""Worker that trains one run without an end.

Arguments: this process's import path, the trainer's folder, and the trainer's code.
"""


def test_no_process_outlives_a_killed_worker(tmp_path):
    code = GRANDCHILD + "open('command.pid', 'w').write(str(os.getpid()))\ntime.sleep(300)"
    arguments = [sys.executable, "-c", WORKER, ":".join(sys.path), str(tmp_path / "trainer"), code]
    with subprocess.Popen(arguments) as worker:
        pids = [
            wait_for_number(tmp_path / "trainer" / "code" / name, seconds=20)
            for name in ("child.pid", "command.pid")
        ]
        worker.kill()
    assert all(wait_until_gone(pid) for pid in pids)


def test_command_ends_with_its_supervising_process_which_counts_as_a_lost_worker(trainer):
    """The supervising process is the parent of the command. The user's code is not at fault."""
    trainer.write_trainer(
        "for name, pid in (('supervisor', os.getppid()), ('command', os.getpid())):\n"
        "    open(f'{name}.pid', 'w').write(str(pid))\n"
        "time.sleep(300)"
    )
    trainer.engine.admit(0, make_command_spec())
    command_pid = wait_for_number(trainer.code_dir / "command.pid", seconds=20)
    supervisor_pid = wait_for_number(trainer.code_dir / "supervisor.pid", seconds=20)
    os.kill(supervisor_pid, signal.SIGKILL)
    with pytest.raises(CommandError, match="supervisor of the command was killed") as caught:
        for _ in range(20):  # the first calls may come before the end is noticed
            trainer.engine.advance(50)
    assert classify(caught.value) == "lost_worker"
    assert wait_until_gone(command_pid)


@pytest.mark.usefixtures("short_grace")
def test_trainer_may_shut_down_after_sigterm(trainer):
    trainer.write_trainer(
        "signal.signal(15, lambda *_: (open('bye', 'w'), sys.exit(0)))\n"
        "open('up', 'w').write('1')\n"
        "time.sleep(60)"
    )
    trainer.engine.admit(0, make_command_spec())
    wait_for_number(trainer.code_dir / "up")
    trainer.engine.evict(0)
    assert (trainer.code_dir / "bye").exists()


def test_programs_that_cannot_start_are_named(trainer):
    (trainer.code_dir / "here.sh").write_text("#!/bin/sh\n")
    for name in ("no-such-program", "here.sh", "./there.sh", "./here.sh"):
        with pytest.raises(CommandError, match=name):
            find_program(name, trainer.code_dir)
    (trainer.code_dir / "here.sh").write_text("#!/no/such/interpreter\n")
    (trainer.code_dir / "here.sh").chmod(0o755)
    with pytest.raises(CommandError, match=r"could not be started: .*here.sh"):
        trainer.train(spec=make_command_spec(make_command("./here.sh {run_json}")))
    # These trainers have no corpus, so the placeholder {data} has no value.
    with pytest.raises(CommandError, match=r"names \{data\}"):
        trainer.train(spec=make_command_spec(make_command("./here.sh {run_json} {data}")))
    assert trainer.engine.steps == {}


def test_secrets_of_the_environment_are_not_stored(trainer, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-key")
    monkeypatch.setenv("PYTHONPATH", "ours")
    result, _ = trainer.train(
        "assert os.environ['WANDB_API_KEY'] and 'PYTHONPATH' not in os.environ\n" + GOOD
    )
    attempt_files = b"".join(path.read_bytes() for path in trainer.list_attempts()[0].iterdir())
    assert b"s3cr3t" not in attempt_files and "s3cr3t" not in canon.to_canonical_json(result)
