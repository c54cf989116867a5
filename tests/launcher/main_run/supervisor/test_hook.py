"""Tests of `forerun.hook`, by which forerun compares a user's training script with the config.

The script calls the hook, and the hook reports the optimizer and the learning rates. Planted
mistakes must be reported, a correct script must pass, and without a request the hook must do
nothing.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import hook_trainer
import pytest
import torch
from user_trainer_case import make_user_decision

from forerun import hook
from forerun._launcher.main_run.exporters.comparison import choose_proof_steps
from forerun._launcher.main_run.exporters.proof import ProofError
from forerun._launcher.main_run.supervisor import user_proof
from forerun._launcher.main_run.supervisor.user_launch import UserRunFolders, build_command_words

SUPPORT_DIR = Path(__file__).parents[3] / "support" / "launcher"
MISTAKES = {
    "scaled twice": "scaled twice",
    "left unscaled": "still have the value for the base width",
    "group missed": "blocks.*.1.weight: no optimizer trains it",
    "decay on gains": "a block_gain does not decay",
    "frozen layer": "requires_grad",
    "tied": "optimizer groups train it",
    "lr off": "1.1 times",
    "lr ignored": "its peak rate is",
    "eps": "eps is 1e-08",
    "warmup in tokens": "its rate at step",
    "total steps": "its rate at step",
    "stepped twice": "stepped twice",
    "batch per rank": "frozen as 256",
    "clip": "it clips at",
    "no clipping": "after clipping",
    "init": "its initial std is",
}
"""Words of the problem that must be reported, by planted mistake of `hook_trainer`."""


def run_script(decision, tmp_path, monkeypatch, steps, module=hook_trainer):
    """Run the script in this process until the hook ends it after some steps; return the report."""
    report = tmp_path / f"{steps}.json"
    request = {
        "report": str(report),
        "steps": steps,
        "at": list(choose_proof_steps(decision.learning_rate.schedule)),
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    monkeypatch.setenv(hook.VARIABLE, str(tmp_path / "request.json"))

    def raise_interrupt(code):
        raise KeyboardInterrupt

    monkeypatch.setattr(hook.os, "_exit", raise_interrupt)
    # The hook replaces torch's function for the life of its process; undo that after the test.
    for torch_module in (torch.nn.utils, torch.nn.utils.clip_grad):
        monkeypatch.setattr(torch_module, "clip_grad_norm_", torch.nn.utils.clip_grad_norm_)
    words = build_command_words(
        decision.own,
        UserRunFolders(run_dir=tmp_path, code_dir=SUPPORT_DIR, corpus=None),
        resume=False,
    )
    with pytest.raises(KeyboardInterrupt):
        module.main(words[2:])
    return user_proof._read(report.read_bytes())


def run_and_compare(mistake, tmp_path, monkeypatch):
    """Run the script at the base width and at full width; return problems and notes."""
    decision = make_user_decision(mistake)
    base_values = {**decision.own.values, "width": decision.base_shape.width}
    base_decision = dataclasses.replace(
        decision, own=dataclasses.replace(decision.own, values=base_values)
    )
    base_report = run_script(base_decision, tmp_path, monkeypatch, 0)
    report = run_script(decision, tmp_path, monkeypatch, 5)
    return user_proof.compare(decision, report, base_report)


def test_correct_script_passes(tmp_path, monkeypatch):
    problems, notes = run_and_compare("", tmp_path, monkeypatch)
    assert not problems
    # The script's model is no transformer, so its parameter count differs from the forecast's.
    assert len(notes) == 1 and "the forecast counts" in notes[0]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistake_is_reported(mistake, tmp_path, monkeypatch):
    problems, _ = run_and_compare(mistake, tmp_path, monkeypatch)
    assert any(MISTAKES[mistake] in problem for problem in problems), problems


def test_hook_and_proof_agree_on_variable_and_format():
    assert (user_proof.PROVE_VARIABLE, user_proof.FORMAT) == (hook.VARIABLE, hook.FORMAT)


def test_hook_does_nothing_without_a_request(monkeypatch):
    monkeypatch.delenv(hook.VARIABLE, raising=False)
    hook.prove(None, None)  # The call would fail if the hook used its arguments.


def test_import_of_the_hook_does_not_import_torch():
    program = "import sys, runpy; runpy.run_path(sys.argv[1]); print('torch' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-S", "-c", program, hook.__file__],
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout == "False\n"


def test_prove_runs_the_command_and_reports_its_mistake():
    folders = UserRunFolders(run_dir=SUPPORT_DIR, code_dir=SUPPORT_DIR, corpus=None)
    problems, notes, report = user_proof.prove(make_user_decision("eps"), folders)
    # The script's model has six parameters.
    assert len(problems) == 6 and all("eps is 1e-08" in problem for problem in problems)
    assert len(notes) == 1
    assert (report.world_size, len(report.observed)) == (1, 5)


@pytest.mark.parametrize(
    ("script", "message"),
    [("pass", "call forerun.hook.prove"), ("hook.prove(1, 2)", "no torch")],
    ids=["no call", "call fails"],
)
def test_script_without_a_report_is_an_error(script, message, tmp_path):
    (tmp_path / "hook_trainer.py").write_text(f"from forerun import hook\n{script}\n")
    with pytest.raises(ProofError, match=message):
        user_proof.prove(
            make_user_decision(), UserRunFolders(run_dir=tmp_path, code_dir=tmp_path, corpus=None)
        )
