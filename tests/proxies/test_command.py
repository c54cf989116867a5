"""A user's trainer as an engine: what it is told, what its metrics mean, and that nothing of it survives."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_cases import GOOD, NUM_STEPS, PYTHON, Place, command, command_spec, gone, number_in

from proxies.core import canon, flops
from proxies.core.failures import CAUSES, classify
from proxies.core.programs import PLACEHOLDERS
from proxies.core.spec import RunSpec
from proxies.external.command import CommandError, find_program, placeholder_values


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "with spaces")


def test_a_run_of_a_good_trainer(place):
    result, curve = place.outcome(GOOD)
    spec = command_spec()
    assert (result.status, result.loss_nats, result.num_steps, result.id) == ("finished", 2.5, NUM_STEPS, spec.id)
    assert curve.steps == tuple(range(1, NUM_STEPS + 1)) and curve.train_loss_nats[0] == 2.99
    assert curve.grad_norm == () and result.curve_id == canon.content_id(curve)
    assert result.tokens == NUM_STEPS * 64 and result.flops == flops.flops_per_token(spec.shape) * result.tokens
    assert 0 < result.seconds < 10 and place.engine.free_slots == [0]


def test_what_the_trainer_is_told(tmp_path):
    """Every placeholder, exactly, one argument each; the same and the spec in run.json."""
    names = sorted(PLACEHOLDERS)
    template = PYTHON + " trainer.py {run_json} " + " ".join(f"'{name}={{{name}}} {{{{x}}}}'" for name in names)
    spec = command_spec(command(template), width=64, learning_rate=0.1 + 0.2, eps=1e-300, clip_norm=None)
    told = Place(tmp_path / "it's «told»", corpus=tmp_path / "a corpus")
    told.outcome("json.dump([sys.argv[2:], os.getcwd()], open('told.json', 'w'))\n" + GOOD, spec)
    words, folder = json.loads((told.code_dir / "told.json").read_text())
    assert folder == str(told.code_dir) and [word.partition("=")[0] for word in words] == names
    values = {word.partition("=")[0]: word.partition("=")[2].removesuffix(" {x}") for word in words}
    (attempt,) = told.attempts(spec)
    assert values["run_dir"] == str(attempt) and values["data"] == str(tmp_path / "a corpus")
    assert float(values["lr"]) == 0.1 + 0.2 and float(values["eps"]) == 1e-300 and values["clip_norm"] == "inf"
    assert (values["width"], values["width_multiplier"], values["num_heads"]) == ("64", "2.0", "8")
    recorded = json.loads((attempt / "run.json").read_text())
    assert canon.decode(RunSpec, recorded["spec"]) == spec and recorded["argv"][5:] == words
    assert recorded["values"]["clip_norm"] is None and recorded["values"]["lr"] == 0.1 + 0.2


def test_every_placeholder_has_a_value_and_no_other():
    assert set(placeholder_values(command_spec(), Path("r"), Path("c"))) == set(PLACEHOLDERS)


LATE = {
    "a trainer that resumed": ("train(last=4, loss=9.9)\ntrain(first=3)\nlog(step=N, val_loss=2.5)", 2.97),
    "steps from 0": ("train(0, N - 1)\nlog(step=N - 1, val_loss=2.5)", 2.98),
    "steps from 0 to N": ("train(0, N)\nlog(step=0, val_loss=5.5)\nlog(step=N, val_loss=2.5)", 2.98),
    "empty columns": ("for s in range(1, N + 1): log(step=s, train_loss=3 - s / 100, val_loss=None if s < N else 2.5)",
                      2.97),
    "validation without a step or an end of line, noise": (
        "LOG.write('Überraschung\\n[1]\\n\\n')\ntrain()\nLOG.write(json.dumps(dict(val_loss=2.5)))", 2.97),
    "null where there is nothing to log": (
        ("log(step=2, train_loss=None, val_loss=None)\ntrain()\nlog(step=N, val_loss=2.5)\n"
         "log(step=N, train_loss=None, val_loss=None, seconds=9)"), 2.97),
    "half a line": (GOOD + "LOG.write('{\"step\": 7, \"val_')", 2.97),
}  # fmt: skip


@pytest.mark.parametrize("name", LATE)
def test_logs_as_people_write_them(place, name):
    code, third = LATE[name]
    result, curve = place.outcome(code)
    assert (result.status, result.loss_nats, result.num_steps) == ("finished", 2.5, NUM_STEPS), result
    assert dict(zip(curve.steps, curve.train_loss_nats, strict=True))[3] == pytest.approx(third)
    assert curve.steps == tuple(range(1, NUM_STEPS + 1))


DIVERGED = {
    "NaN": ("train(last=3)\nlog(step=4, train_loss=float('nan'))\ntime.sleep(60)", "train_loss is NaN at step 4", 3),
    "a bare nan": ('train(last=3)\nLOG.write(\'{"step": 4, "train_loss": nan}\\n\')', "train_loss is NaN at step 4", 3),
    "inf": ("log(step=1, train_loss='inf')\nsys.exit(3)", "train_loss is inf at step 1", 0),
    "validation": ("train()\nlog(step=N, val_loss=float('nan'))", "val_loss is NaN at step 6", 6),
    "null to the end": (
        "train(last=3)\nfor s in (4, 5, 6): log(step=s, train_loss=None)\nlog(step=N, val_loss=None)",
        "train_loss is null at step 4",
        3,
    ),
    "validation null": ("train()\nlog(step=N, val_loss=None)", "val_loss is null at step 6", 6),
    "null, then an error": (
        "train(last=3)\nlog(step=4, train_loss=None, val_loss=None)\nsys.exit(1)",
        "train_loss is null at step 4",
        3,
    ),
    "too high": ("train(last=3)\nlog(step=4, train_loss=6.6)\ntime.sleep(60)", "loss 6.6 at step", 4),
    "validation too high": ("train()\nlog(step=N, val_loss=6.6)", "loss 6.6 at step", 6),
}


@pytest.mark.parametrize("name", DIVERGED)
def test_divergence_is_data(place, name):
    code, reason, num_steps = DIVERGED[name]
    result, curve = place.outcome(code, limit_seconds=10)
    assert (result.status, result.loss_nats, result.num_steps) == ("diverged", None, num_steps)
    assert result.reason.startswith(reason) and len(curve.steps) == num_steps
    assert result.last_train_loss_nats == (curve.train_loss_nats[-1] if num_steps else None)
    assert result.tokens == num_steps * 64


FAILED = {
    "exit": ("train(last=2)\nprint('Grüße ☃', file=sys.stderr)\nprint('\\x1b[31mout of memory\\x00')\nsys.exit(137)",
             "exit code 137.*Grüße ☃.*out of memory"),
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
}  # fmt: skip


@pytest.mark.parametrize("end", ["print('Killed'); sys.exit(137)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_command_that_sigkill_ended_is_not_said_to_have_failed(place, end):
    with pytest.raises(
        CommandError, match=r"killed by SIGKILL \((exit code 137|signal 9)\), probably for memory"
    ) as caught:
        place.outcome(f"train(last=3)\n{end}")
    assert CAUSES[classify(caught.value)].words == "out of memory"


@pytest.mark.parametrize("name", FAILED)
def test_failure_says_what_and_where(tmp_path, name):
    code, said = FAILED[name]
    place = Place(tmp_path, timeout_seconds=3.0)
    with pytest.raises(CommandError) as caught:
        place.outcome(code, limit_seconds=10)
    text = f"{caught.value}\n{caught.value.log_tail}"
    for pattern in [said, "attempt-1 in ", command_spec().id]:
        assert re.search(pattern, text, re.DOTALL), text
    assert str(caught.value).isprintable() and len(str(caught.value)) < 2500
    assert place.engine.free_slots == [0]


def test_advance_returns_soon_while_the_command_runs(place):
    place.trainer("time.sleep(60)")
    place.engine.admit(0, command_spec())
    began = time.monotonic()
    assert place.engine.advance(50) == [] and time.monotonic() - began < 3
    with pytest.raises(CommandError, match="one command at a time"):
        place.engine.admit(0, command_spec(seed=1))
    place.engine.evict(0)
    assert place.engine.free_slots == [0] and place.engine.advance(50) == []


GRANDCHILD = """
child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import signal, time\\nsignal.signal(15, signal.SIG_IGN)\\n"
                          "print(1, flush=True)\\ntime.sleep(300)"], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
with open("child.part", "w") as file: file.write(str(child.pid))
os.rename("child.part", "child.pid")
"""


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr("proxies.external.command._GRACE_SECONDS", 0.2)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("ending", ["finished", "evicted", "dropped"])
def test_a_grandchild_in_a_session_of_its_own_that_ignores_sigterm_is_gone(place, ending):
    """As torchrun's ranks; and the next run would share its device with it."""
    code = GRANDCHILD + (GOOD if ending == "finished" else "time.sleep(300)")
    if ending == "finished":
        place.outcome(code)
    else:
        place.trainer(code)
        place.engine.admit(0, command_spec())
        pid = number_in(place.code_dir / "child.pid")
        if ending == "evicted":
            place.engine.evict(0)
        else:
            place.engine = None
            assert gone(pid)
    assert gone(number_in(place.code_dir / "child.pid"), seconds=0.5)


WORKER = """
import sys, time
sys.path[:0] = sys.argv[1].split(":")
from pathlib import Path
from command_cases import Place, command_spec
place = Place(Path(sys.argv[2]))
place.trainer(sys.argv[3])
place.engine.admit(0, command_spec())
while True: place.engine.advance(50)
"""


def test_nothing_outlives_a_worker_that_is_killed(tmp_path):
    code = GRANDCHILD + "open('own.pid', 'w').write(str(os.getpid()))\ntime.sleep(300)"
    arguments = [sys.executable, "-c", WORKER, ":".join(sys.path), str(tmp_path / "place"), code]
    with subprocess.Popen(arguments) as worker:
        pids = [number_in(tmp_path / "place" / "code" / name, 20) for name in ("child.pid", "own.pid")]
        worker.kill()
    assert all(gone(pid) for pid in pids)


@pytest.mark.usefixtures("hasty")
def test_a_trainer_may_end_in_order(place):
    place.trainer(
        "signal.signal(15, lambda *_: (open('bye', 'w'), sys.exit(0)))\nopen('up', 'w').write('1')\ntime.sleep(60)"
    )
    place.engine.admit(0, command_spec())
    number_in(place.code_dir / "up")
    place.engine.evict(0)
    assert (place.code_dir / "bye").exists()


def test_programs_that_cannot_begin(place):
    (place.code_dir / "here.sh").write_text("#!/bin/sh\n")
    for name in ("no-such-program", "here.sh", "./there.sh", "./here.sh"):
        with pytest.raises(CommandError, match=name):
            find_program(name, place.code_dir)
    (place.code_dir / "here.sh").write_text("#!/no/such/interpreter\n")
    (place.code_dir / "here.sh").chmod(0o755)
    with pytest.raises(CommandError, match=r"could not be started: .*here.sh"):
        place.outcome(spec=command_spec(command("./here.sh {run_json}")))
    with pytest.raises(CommandError, match=r"names \{data\}"):
        place.outcome(spec=command_spec(command("./here.sh {run_json} {data}")))
    assert place.engine.free_slots == [0]


def test_secrets_of_the_environment_are_written_nowhere(place, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-key")
    monkeypatch.setenv("PYTHONPATH", "ours")
    result, _ = place.outcome("assert os.environ['WANDB_API_KEY'] and 'PYTHONPATH' not in os.environ\n" + GOOD)
    written = b"".join(path.read_bytes() for path in place.attempts()[0].iterdir())
    assert b"s3cr3t" not in written and "s3cr3t" not in canon.canonical(result)
