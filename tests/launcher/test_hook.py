"""`forerun.hook` in a user's script: planted mistakes are found, a right script passes, without it
nothing happens.
"""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import hook_trainer
import pytest
import torch
from main_run import decision_of, spec_of
from planted_watch import MANIFEST

from forerun import hook
from launcher.exporters.proof import ProofError
from launcher.exporters.view import proof_steps
from launcher.frozen.frozen import OwnTrainer
from launcher.supervisor import own_proof
from launcher.supervisor.own_launch import OwnPlaces, words_of
from proxies.core.programs import PLACES, Command
from proxies.external.command import placeholder_values

HERE = Path(__file__).parent
TEMPLATE = (
    f"{sys.executable} hook_trainer.py --width {{width}} --base-width {{base_width}} --num-steps "
    f"{{num_steps}} "
    "--warmup {warmup_steps} --seed {seed} --batch-sequences {batch_sequences} --seq-len {seq_len} "
    "--lr {lr} "
    "--wd {weight_decay} --eps {eps} --clip {clip_norm} --out {run_dir}"
)
MISTAKES = {
    "scaled twice": "scaled twice",
    "left unscaled": "left as at the base width",
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
    "no clipping": "behind clipping",
    "init": "its initial std is",
}


def own_decision(mistake=""):
    template = TEMPLATE + (f" --mistake '{mistake}'" if mistake else "")
    command = Command(
        template=template,
        metrics_path="{run_dir}/metrics.jsonl",
        metrics_format="jsonl",
        train_loss_key="train_loss",
        validation_loss_key="val_loss",
        step_key="step",
        grad_norm_key="",
    )
    # A clip norm that every gradient is above.
    spec = dataclasses.replace(spec_of("data", eps=1e-6, clip_norm=1e-3), command=command)
    values = {
        name: value
        for name, value in placeholder_values(spec, Path(), None).items()
        if name not in PLACES
    }
    plain = decision_of(dataclasses.replace(spec, command=None), MANIFEST)
    return dataclasses.replace(plain, groups=(), own=OwnTrainer(command=command, values=values))


def reported(decision, tmp_path, monkeypatch, steps, module=hook_trainer):
    """The script's report, made in this process."""
    report = tmp_path / f"{steps}.json"
    request = {
        "report": str(report),
        "steps": steps,
        "at": list(proof_steps(decision.learning_rate.schedule)),
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    monkeypatch.setenv(hook.VARIABLE, str(tmp_path / "request.json"))
    monkeypatch.setattr(hook, "_exit_now", lambda code: (_ for _ in ()).throw(KeyboardInterrupt))
    # The hook watches by replacing torch's function for as long as its process lives.
    for place in (torch.nn.utils, torch.nn.utils.clip_grad):
        monkeypatch.setattr(place, "clip_grad_norm_", torch.nn.utils.clip_grad_norm_)
    words = words_of(
        decision.own, OwnPlaces(run_dir=tmp_path, code_dir=HERE, corpus=None), resume=False
    )
    with pytest.raises(KeyboardInterrupt):
        module.main(words[2:])
    return own_proof._read(report.read_bytes())


def judged(mistake, tmp_path, monkeypatch):
    decision = own_decision(mistake)
    sizes = {"width": decision.base_shape.width}
    there = dataclasses.replace(decision.own, values={**decision.own.values, **sizes})
    at_base = reported(dataclasses.replace(decision, own=there), tmp_path, monkeypatch, 0)
    return own_proof.compare(decision, reported(decision, tmp_path, monkeypatch, 5), at_base)


def test_a_right_script_passes(tmp_path, monkeypatch):
    problems, notes = judged("", tmp_path, monkeypatch)
    assert not problems
    # a transformer's parameters, which this has not
    assert len(notes) == 1 and "the forecast counts" in notes[0]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_named(mistake, tmp_path, monkeypatch):
    problems, _ = judged(mistake, tmp_path, monkeypatch)
    assert any(MISTAKES[mistake] in problem for problem in problems), problems


def test_both_sides_say_the_same():
    assert (own_proof.PROVE_VARIABLE, own_proof.FORMAT) == (hook.VARIABLE, hook.FORMAT)


def test_without_a_request_nothing_happens(monkeypatch):
    monkeypatch.delenv(hook.VARIABLE, raising=False)
    hook.prove(None, None)  # not even looked at


def test_it_is_the_standard_library_until_it_is_called():
    program = "import sys, runpy; runpy.run_path(sys.argv[1]); print('torch' in sys.modules)"
    said = subprocess.run(
        [sys.executable, "-S", "-c", program, hook.__file__],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout == "False\n"


def test_the_process_is_asked_and_its_mistake_named():
    places = OwnPlaces(run_dir=HERE, code_dir=HERE, corpus=None)
    problems, notes, report = own_proof.prove(own_decision("eps"), places)
    assert (
        len(problems) == 6
        and all("eps is 1e-08" in problem for problem in problems)
        and len(notes) == 1
    )
    assert (report.world_size, len(report.observed)) == (1, 5)


@pytest.mark.parametrize(
    ("script", "said"), [("pass", "call forerun.hook.prove"), ("hook.prove(1, 2)", "no torch")]
)
def test_a_hook_that_reports_nothing_or_fails_is_an_error(script, said, tmp_path):
    (tmp_path / "hook_trainer.py").write_text(f"from forerun import hook\n{script}\n")
    with pytest.raises(ProofError, match=said):
        own_proof.prove(own_decision(), OwnPlaces(run_dir=tmp_path, code_dir=tmp_path, corpus=None))
