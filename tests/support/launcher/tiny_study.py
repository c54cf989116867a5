"""Cases for tests of studies: about the smallest study that the plan's rules allow (some 70 runs of
a few steps), and the command line called in this process.

The study uses the values that its search found without comparing them with the conventional ones
(`tie_seeds = 0`); test_ties.py tests that comparison.
"""

import contextlib
import dataclasses
import io
import json
import random
import shutil

from forerun._launcher.cli.cli import main
from forerun._launcher.study.stages.study_folder import read_recorded_study
from forerun._proxies.core.spec import RunResult
from forerun._proxies.data.corpus import tokenize
from forerun._sweeps.store.ledger import Ledger

PLAN = """
[model]
num_layers = 1
head_dim = 8
seq_len = 16
[proxy]
base_width = 8
batch_tokens = 64
num_steps = 6
[search]
num_trials = 4
parallelism = 2
num_startup = 2
tie_seeds = 0
[transfer]
widths = [8, 16]
offsets_octaves = [-1.0, 0.0, 1.0, 2.0]
num_seeds = 2
narrow_offsets_octaves = [-1.0, -0.5, 0.5, 1.0]
durations = [1.0, 2.0, 3.0]
axis_num_seeds = 2
hyperparameters = { clip_norm = ["width"] }
hyperparameter_offsets_octaves = [-1.0, 0.0, 1.0]
max_extensions = 1
control_widths = [16]
control_num_seeds = 1
check_widths = [8, 16]
check_num_steps = 2
check_num_seeds = 2
[ladder]
widths = [8, 16, 24]
num_steps = [4, 8, 16]
form = "chinchilla"
bootstrap = 50
[target]
budget_flops = 2e9
width_multiple = 8
[cluster]
backend = "inline"
"""
COMMAND = '''
[data]
path = ""
external = "planted"
vocab_size = 256
[proxy]
command = """%s -S trainer.py {run_dir} --lr {lr} --width {width} --num-steps {num_steps} --seed {seed}
  --clip {clip_norm} --warmup {warmup_steps} --form {parametrization}"""
'''  # noqa: E501
"""Sections of a plan whose runs are trained by a user's trainer.py in the plan's folder."""
SENTENCE = "the run before the run tells what the large model will lose and how sure of it we are"


def write_corpus(folder):
    """Write sixty texts of common words and tokenize them into shards."""
    rng, words = random.Random(0), SENTENCE.split()
    source = folder / "source"
    source.mkdir(parents=True)
    for number in range(60):
        (source / f"{number:02}.txt").write_text(" ".join(rng.choice(words) for _ in range(250)))
    return tokenize([source], folder / "corpus", validation_fraction=0.3)


def write_plan(folder, text=PLAN):
    """Write a plan and, in the same folder, its corpus."""
    write_corpus(folder)
    path = folder / "plan.toml"
    path.write_text(text)
    return path


def write_plan_with(folder, part):
    """Write the tiny plan with the keys of `part` added or replaced."""
    section, key, sections = {}, "", {}
    for line in [*PLAN.splitlines(), *part.splitlines()]:
        if line.startswith("["):
            section = sections.setdefault(line, {})
        elif line.startswith(" "):  # a string that continues over several lines
            section[key] += "\n" + line
        elif line:
            key = line.split(" = ")[0]
            section[key] = line
    path = folder / "plan.toml"
    path.write_text(
        "\n".join("\n".join([name, *lines.values()]) for name, lines in sections.items())
    )
    return path


def run_forerun(*arguments):
    """Run a command line in this process; return exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


def run_json(*arguments):
    """Run a command line with --json; return the exit code and the one object on stdout."""
    code, out, err = run_forerun(*arguments, "--json")
    assert "Traceback" not in err
    body = json.loads(out)
    assert isinstance(body, dict)
    return code, body


def make_result(spec, loss_nats):
    """Return the planted outcome of a run; without a loss it diverged."""
    diverged = loss_nats is None
    return RunResult(
        id=spec.id,
        status="diverged" if diverged else "finished",
        loss_nats=loss_nats,
        num_steps=6,
        last_train_loss_nats=None,
        curve_id="0" * 64,
        flops=0.0,
        tokens=0,
        seconds=0.0,
        environment={},
        reason="planted" if diverged else "",
    )


def copy_records(study_dir, to, keep, edit=lambda record: record.body):
    """Copy the records that `keep` lets through, as `edit` returns them, into a new study; return
    it and its ledger, open for reading.
    """
    to.mkdir()
    shutil.copy(study_dir / "plan.toml", to)
    study = dataclasses.replace(read_recorded_study(to), study_dir=to)
    with Ledger.open(to, study.question, create=True) as ledger:
        for record in Ledger.read(study_dir).read_records():
            if record.kind not in ("plan", "driver") and keep(record):
                ledger.append(record.kind, record.key, edit(record))
    if (study_dir / "curves").is_dir():
        shutil.copytree(study_dir / "curves", to / "curves")
    return study, Ledger.read(to)


GATES = {"coordinates": "failed", "transfer": "cannot_tell", "fit": "passed", "data": "passed"}


def set_gates(monkeypatch, outcomes=GATES):
    """Fix the outcomes of the gates; by default two are closed, one of each kind."""
    from forerun._launcher.study.stages import study_findings
    from forerun._launcher.study.stages.gates import Gate

    gates = tuple(
        Gate(name=name, outcome=outcome, reason=f"{name} says")
        for name, outcome in outcomes.items()
    )
    monkeypatch.setattr(study_findings, "judge_gates", lambda *_: gates)
