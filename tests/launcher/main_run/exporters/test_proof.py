"""Tests of the proof of an export.

A proof starts the export's program in the other trainer. The program reports its view: the numbers
that it would train with. Every difference of the view from the frozen decision is a problem.
"""

import dataclasses
import sys
import time
from pathlib import Path

import pytest
from export_case import SHAPE, change_view, make_view, make_wide_decision
from exported_program import edit_numbers
from trainer_venv import require_interpreter

from forerun._launcher.main_run.exporters import proof
from forerun._launcher.main_run.exporters.comparison import (
    TrainerView,
    build_frozen_run,
    choose_proof_steps,
    compare,
)
from forerun._launcher.main_run.exporters.proof import ProofError
from forerun._launcher.main_run.exporters.trainers import torchtitan
from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._proxies.core import canon
from forerun._proxies.core.schedule import Schedule, compute_lr_multiplier

NAMES = torchtitan.parameter_names(SHAPE)
HIDDEN = "layers.1.feed_forward.w2.weight"


@pytest.fixture(scope="module")
def decision(manifest) -> Decision:
    """A decision that torchtitan can express."""
    return make_wide_decision(manifest)


def make_equal_view(decision: Decision, schedule: Schedule | None = None) -> TrainerView:
    """Return the view of a trainer that does everything as frozen, or with another schedule."""
    run, steps = build_frozen_run(decision), choose_proof_steps(decision.learning_rate.schedule)
    if schedule is not None:
        run = dataclasses.replace(
            run, shares=tuple(compute_lr_multiplier(schedule, step) for step in steps)
        )
    return make_view(decision, NAMES, run, "torchtitan", "0.3.0")


def test_equal_view_has_no_differences_and_survives_json(decision):
    view = make_equal_view(decision)
    assert compare(decision, view, NAMES) == []
    decoded = canon.decode(TrainerView, canon.parse(canon.to_pretty_json(view)), "view")
    assert decoded == view


def make_different_views(decision: Decision) -> dict[str, TrainerView]:
    """Return views with one difference each, by the start of the problem that must be reported."""
    view = make_equal_view(decision)
    with_value_head = {**view.parameters, "value_head.weight": view.parameters[HIDDEN]}
    without_readout = dict(view.parameters)
    del without_readout["lm_head.weight"]
    forward = dataclasses.replace(decision.forward, output=decision.forward.output * 1.25)
    three_steps = dataclasses.replace(
        view, steps=view.steps[:3], rates=tuple(row[:3] for row in view.rates)
    )
    views = {
        f"{HIDDEN}: {field} is ": change_view(
            view, HIDDEN, **{field: view.parameters[HIDDEN].settings[field] * (1 + 1e-8)}
        )
        for field in ("learning_rate", "eps", "beta2")
    }
    return views | {
        "norm.weight: weight_decay is 1e-12": change_view(view, "norm.weight", weight_decay=1e-12),
        "the optimizer lacks lm_head.weight": dataclasses.replace(view, parameters=without_readout),
        "the optimizer trains value_head.weight": dataclasses.replace(
            view, parameters=with_value_head
        ),
        f"{HIDDEN} has 7 elements": change_view(view, HIDDEN, num_elements=7),
        f"{HIDDEN}: there is no row 99": change_view(view, HIDDEN, rates=99),
        "num_steps is 13, frozen as 12": dataclasses.replace(view, num_steps=13),
        "batch_tokens is 512": dataclasses.replace(view, batch_tokens=512),
        "clip_norm is None, frozen as 0.5": dataclasses.replace(view, clip_norm=None),
        "forward.output is ": dataclasses.replace(view, forward=forward),
        "rates are given at 3 steps: must be the 12 ": three_steps,
        "rates are given at 12 steps: must be the 12 ": dataclasses.replace(
            three_steps, steps=view.steps
        ),
    }


def test_every_difference_is_reported_and_rounding_is_ignored(decision):
    for start, view in make_different_views(decision).items():
        [problem] = compare(decision, view, NAMES)
        assert problem.startswith(start)
    view = make_equal_view(decision)
    rates = tuple(tuple(rate * (1 + 3e-15) for rate in row) for row in view.rates)
    forward = dataclasses.replace(decision.forward, output=decision.forward.output * (1 + 1e-15))
    assert compare(decision, dataclasses.replace(view, rates=rates, forward=forward), NAMES) == []


def test_different_schedule_is_reported_for_every_parameter_at_its_first_step(decision):
    for changes, first_step in (({"warmup_steps": 4}, 0), ({"final_fraction": 0.10001}, 4)):
        schedule = dataclasses.replace(decision.learning_rate.schedule, **changes)
        problems = compare(decision, make_equal_view(decision, schedule), NAMES)
        assert len(problems) == len(NAMES)
        assert all(f": the rate at step {first_step} is " in problem for problem in problems)


def test_fused_matrix_stands_for_its_parts(decision):
    fused = {
        name: trainer_name.replace(".wk.", ".wkv.").replace(".wv.", ".wkv.")
        for name, trainer_name in NAMES.items()
    }
    view = make_equal_view(decision)
    parameters = {}
    for name, trainer_name in NAMES.items():
        parameter = view.parameters[trainer_name]
        num_parts = 2 if ".wk." in name or ".wv." in name else 1
        parameters[fused[name]] = dataclasses.replace(
            parameter, num_elements=num_parts * parameter.num_elements
        )
    view = dataclasses.replace(view, parameters=parameters)
    assert compare(decision, view, fused) == []
    without_wo = {name: fused[name] for name in fused if ".wo." not in name}
    assert compare(decision, view, without_wo)


def test_proof_steps_of_a_long_run_include_every_bend():
    long = Schedule(kind="wsd", num_steps=1_000_000, warmup_steps=2000, decay_steps=70_001)
    steps = choose_proof_steps(long)
    assert len(steps) < 5000
    assert {0, 1999, 2000, 929_998, 929_999, 930_000, 999_999} <= set(steps)


@pytest.mark.parametrize(
    ("limit_seconds", "ending", "message"),
    [
        (1.5, "import time; time.sleep(60)", "seconds and was stopped"),
        (30, "raise SystemExit(3)", "ended with 3: no reason given"),
    ],
    ids=["stopped at the limit", "ends by itself"],
)
def test_no_process_of_a_proof_outlives_it(tmp_path, monkeypatch, limit_seconds, ending, message):
    monkeypatch.setattr(proof, "LIMIT_SECONDS", limit_seconds)
    start_child = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, file=open('pid', "
        "'w'), flush=True)"
    )
    (tmp_path / proof.PROVE_FILE).write_text(f"{start_child}\n{ending}\n")
    began = time.monotonic()
    with pytest.raises(ProofError, match=message):
        proof.ask_trainer("torchtitan", Path(sys.executable), tmp_path)
    assert time.monotonic() - began < 20
    # The child is gone, or is a zombie ("Z") until its new parent reaps it.
    state = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    while time.monotonic() - began < 20 and state.exists() and state.read_text().split()[2] != "Z":
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z"


WITHOUT_ANSWER = {
    "kill -9 $$": "was killed by signal 9 (out of memory?): no reason given",
    "echo 'no such flag' >&2; exit 3": "ended with 3: no such flag",
    "echo '{}'": "printed no readable answer: view (TrainerView) lacks trainer",
    "head -c 20000 /dev/zero | tr '\\0' '['": (
        "printed no readable answer: not JSON: maximum recursion depth"
    ),
}
"""Words of the reported problem, by the shell script that stands for the trainer's interpreter."""


@pytest.mark.parametrize("script", WITHOUT_ANSWER)
def test_interpreter_without_an_answer_is_reported_briefly(tmp_path, script):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    with pytest.raises(ProofError) as caught:
        proof.ask_trainer("torchtitan", python, tmp_path)
    [problem] = caught.value.problems
    assert WITHOUT_ANSWER[script] in problem
    assert len(problem) < 1000


def test_interpreter_that_cannot_start_is_reported_with_advice(tmp_path, decision):
    python = tmp_path / "python"
    python.write_text("")
    with pytest.raises(ProofError) as caught:
        proof.prove(decision, "torchtitan", "0.3.0", python)
    assert caught.value.problems == [
        f"{python} cannot be started: Permission denied",
        (
            "the export needs torchtitan 0.3.0: is it installed? FORERUN_TORCHTITAN_PYTHON can "
            "name another Python"
        ),
    ]


def test_export_is_proven_if_its_trainer_agrees_and_its_files_are_unchanged(tmp_path, decision):
    python, export = tmp_path / "python", tmp_path / "export"
    python.write_text(
        f"#!/bin/sh\ntest -f {torchtitan.MODULE}.py && echo "
        f"'{canon.to_canonical_json(make_equal_view(decision))}'\n"
    )
    python.chmod(0o755)
    torchtitan.export(decision, export)
    assert proof.prove(decision, "torchtitan", "0.3.0", python, export) == []
    [problem] = proof.prove(
        dataclasses.replace(decision, clip_norm=1.0), "torchtitan", "0.3.0", python
    )
    assert problem == "clip_norm is 0.5, frozen as 1.0"
    (export / "run.sh").write_text("true")
    [problem] = proof.prove(decision, "torchtitan", "0.3.0", python, export)
    assert problem.endswith("run.sh is not what this version of forerun writes: export again")
    python.write_text(python.read_text().replace('"version":"0.3.0"', '"version":"0.2.2"'))
    [problem] = proof.prove(decision, "torchtitan", "0.3.0", python)
    assert "has torchtitan 0.2.2: must be 0.3.0" in problem


def test_interpreter_comes_from_a_variable_or_the_built_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORERUN_MEGATRON_LM_PYTHON", raising=False)
    assert proof.find_interpreter("megatron-lm") is None
    built = tmp_path / ".venv-trainers" / "megatron-lm" / "bin" / "python"
    built.parent.mkdir(parents=True)
    built.symlink_to(sys.executable)
    assert proof.find_interpreter("megatron-lm") == built
    monkeypatch.setenv("FORERUN_MEGATRON_LM_PYTHON", sys.executable)
    assert proof.find_interpreter("megatron-lm") == Path(sys.executable)
    monkeypatch.setenv("FORERUN_MEGATRON_LM_PYTHON", str(tmp_path / "gone"))
    with pytest.raises(ProofError, match="there is no such file"):
        proof.find_interpreter("megatron-lm")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            '"learning_rate": 0.015625',
            '"learning_rate": 0.0156250001',
            "learning_rate is 0.0156250001, frozen as 0.0",
        ),
        ('"warmup_steps": 3', '"warmup_steps": 4', "the rate at step 0 is "),
        ('"clip_norm": 0.5', '"clip_norm": null', "clip_norm is None, frozen as 0.5"),
        ("^(?:tok_embeddings", "^(?:token_embeddings", "matched no parameters"),
    ],
)
def test_torchtitan_reports_edited_numbers(tmp_path, decision, old, new, words):
    python = require_interpreter("torchtitan")
    torchtitan.export(decision, tmp_path)
    edit_numbers(tmp_path, old, new)
    try:
        problems = compare(decision, proof.ask_trainer("torchtitan", python, tmp_path), NAMES)
    except ProofError as error:
        problems = error.problems
    assert any(words in problem for problem in problems)
