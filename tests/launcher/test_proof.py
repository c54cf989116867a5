"""A trainer's view held against the decision: equal as it stands, and every planted difference
named.
"""

import dataclasses
import sys
import time
from pathlib import Path

import pytest
from export_case import SHAPE, held, planted_view, wide_decision
from exported_program import change
from trainer_venv import interpreter

from launcher.exporters import proof
from launcher.exporters.proof import ProofError
from launcher.exporters.trainers import torchtitan
from launcher.exporters.view import TrainerView, compare, frozen_run, proof_steps
from launcher.frozen.frozen import Decision
from proxies.core import canon
from proxies.core.schedule import Schedule, lr_multiplier

NAMES = torchtitan.parameter_names(SHAPE)
HIDDEN = "layers.1.feed_forward.w2.weight"


@pytest.fixture(scope="module")
def decision(manifest) -> Decision:
    return wide_decision(manifest)


def view_of(decision: Decision, schedule: Schedule | None = None) -> TrainerView:
    """What a trainer would tell that does all as frozen, but for another schedule."""
    run, steps = frozen_run(decision), proof_steps(decision.learning_rate.schedule)
    if schedule is not None:
        run = dataclasses.replace(
            run, shares=tuple(lr_multiplier(schedule, step) for step in steps)
        )
    return planted_view(decision, NAMES, run, "torchtitan", "0.3.0")


def test_an_equal_view_has_no_differences_and_survives_json(decision):
    view = view_of(decision)
    assert compare(decision, view, NAMES) == []
    again = canon.decode(TrainerView, canon.parse(canon.pretty(view)), "view")
    assert again == view


def differences(decision: Decision) -> dict[str, TrainerView]:
    """A view that differs in one thing, by how the one problem that must be named begins."""
    view = view_of(decision)
    more = {**view.parameters, "value_head.weight": view.parameters[HIDDEN]}
    less = {name: numbers for name, numbers in view.parameters.items() if name != "lm_head.weight"}
    forward = dataclasses.replace(decision.forward, output=decision.forward.output * 1.25)
    few = dataclasses.replace(
        view, steps=view.steps[:3], rates=tuple(row[:3] for row in view.rates)
    )
    found = {
        f"{HIDDEN}: {field} is ": held(
            view, HIDDEN, **{field: view.parameters[HIDDEN].settings[field] * (1 + 1e-8)}
        )
        for field in ("learning_rate", "eps", "beta2")
    }
    return found | {
        "norm.weight: weight_decay is 1e-12": held(view, "norm.weight", weight_decay=1e-12),
        "the optimizer lacks lm_head.weight": dataclasses.replace(view, parameters=less),
        "the optimizer trains value_head.weight": dataclasses.replace(view, parameters=more),
        f"{HIDDEN} has 7 elements": held(view, HIDDEN, num_elements=7),
        f"{HIDDEN}: there is no row 99": held(view, HIDDEN, rates=99),
        "num_steps is 13, frozen as 12": dataclasses.replace(view, num_steps=13),
        "batch_tokens is 512": dataclasses.replace(view, batch_tokens=512),
        "clip_norm is None, frozen as 0.5": dataclasses.replace(view, clip_norm=None),
        "forward.output is ": dataclasses.replace(view, forward=forward),
        "rates are given at 3 steps: must be the 12 ": few,
        "rates are given at 12 steps: must be the 12 ": dataclasses.replace(few, steps=view.steps),
    }


def test_every_difference_is_named_and_rounding_is_none(decision):
    for begins, view in differences(decision).items():
        [problem] = compare(decision, view, NAMES)
        assert problem.startswith(begins)
    view = view_of(decision)
    rates = tuple(tuple(rate * (1 + 3e-15) for rate in row) for row in view.rates)
    forward = dataclasses.replace(decision.forward, output=decision.forward.output * (1 + 1e-15))
    assert compare(decision, dataclasses.replace(view, rates=rates, forward=forward), NAMES) == []


def test_another_schedule_is_named_for_every_parameter_at_its_first_step(decision):
    for other_numbers, first in (({"warmup_steps": 4}, 0), ({"final_fraction": 0.10001}, 4)):
        other = dataclasses.replace(decision.learning_rate.schedule, **other_numbers)
        problems = compare(decision, view_of(decision, other), NAMES)
        assert len(problems) == len(NAMES)
        assert all(f": the rate at step {first} is " in problem for problem in problems)


def test_a_fused_matrix_stands_for_its_parts(decision):
    fused = {n: t.replace(".wk.", ".wkv.").replace(".wv.", ".wkv.") for n, t in NAMES.items()}
    view = view_of(decision)
    parameters = {}
    for name, theirs in NAMES.items():
        one = view.parameters[theirs]
        both = 2 if ".wk." in name or ".wv." in name else 1
        parameters[fused[name]] = dataclasses.replace(one, num_elements=both * one.num_elements)
    view = dataclasses.replace(view, parameters=parameters)
    assert compare(decision, view, fused) == []
    assert compare(decision, view, {n: t for n, t in fused.items() if ".wo." not in n})


def test_long_runs_are_read_at_every_bend():
    long = Schedule(kind="wsd", num_steps=1_000_000, warmup_steps=2000, decay_steps=70_001)
    steps = proof_steps(long)
    assert len(steps) < 5000
    assert {0, 1999, 2000, 929_998, 929_999, 930_000, 999_999} <= set(steps)


@pytest.mark.parametrize("limit_seconds", [1.5, 30])
def test_nothing_that_a_proof_started_outlives_it(tmp_path, monkeypatch, limit_seconds):
    monkeypatch.setattr(proof, "LIMIT_SECONDS", limit_seconds)
    child = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, file=open('pid', "
        "'w'), flush=True)"
    )
    wait = "import time; time.sleep(60)" if limit_seconds < 2 else "raise SystemExit(3)"
    (tmp_path / proof.PROVE_FILE).write_text(f"{child}\n{wait}\n")
    began = time.monotonic()
    with pytest.raises(
        ProofError,
        match="seconds and was stopped" if limit_seconds < 2 else "ended with 3: no reason given",
    ):
        proof.ask("torchtitan", Path(sys.executable), tmp_path)
    assert time.monotonic() - began < 20
    state = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    while time.monotonic() - began < 20 and state.exists() and state.read_text().split()[2] != "Z":
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z"


SILENT = {
    "kill -9 $$": "was killed by signal 9 (out of memory?): no reason given",
    "echo 'no such flag' >&2; exit 3": "ended with 3: no such flag",
    "echo '{}'": "printed no readable answer: view (TrainerView) lacks trainer",
    "head -c 20000 /dev/zero | tr '\\0' '['": (
        "printed no readable answer: not JSON: maximum recursion depth"
    ),
}


@pytest.mark.parametrize("script", SILENT)
def test_an_interpreter_that_gives_no_answer_is_named_in_a_few_words(tmp_path, script):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    with pytest.raises(ProofError) as caught:
        proof.ask("torchtitan", python, tmp_path)
    [problem] = caught.value.problems
    assert SILENT[script] in problem
    assert len(problem) < 1000


def test_an_interpreter_that_cannot_start_is_named_with_what_to_do(tmp_path, decision):
    python = tmp_path / "python"
    python.write_text("")
    with pytest.raises(ProofError) as caught:
        proof.prove(decision, "torchtitan", "0.3.0", python)
    assert caught.value.problems == [
        f"{python} cannot be started: Permission denied",
        (
            "the export needs torchtitan 0.3.0: is it installed? FORERUN_TORCHTITAN_PYTHON can "
            "name "
            "another Python"
        ),
    ]


def test_an_export_is_proven_if_its_trainer_agrees_and_its_files_are_those_asked(
    tmp_path, decision
):
    python, lying = tmp_path / "python", tmp_path / "lying"
    python.write_text(
        f"#!/bin/sh\ntest -f {torchtitan.MODULE}.py && echo "
        f"'{canon.canonical(view_of(decision))}'\n"
    )
    python.chmod(0o755)
    torchtitan.export(decision, lying)
    assert proof.prove(decision, "torchtitan", "0.3.0", python, lying) == []
    [problem] = proof.prove(
        dataclasses.replace(decision, clip_norm=1.0), "torchtitan", "0.3.0", python
    )
    assert problem == "clip_norm is 0.5, frozen as 1.0"
    (lying / "run.sh").write_text("true")
    [problem] = proof.prove(decision, "torchtitan", "0.3.0", python, lying)
    assert problem.endswith("run.sh is not what this version of forerun writes: export again")
    python.write_text(python.read_text().replace('"version":"0.3.0"', '"version":"0.2.2"'))
    [problem] = proof.prove(decision, "torchtitan", "0.3.0", python)
    assert "has torchtitan 0.2.2: must be 0.3.0" in problem


def test_an_interpreter_is_told_or_built_or_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORERUN_MEGATRON_LM_PYTHON", raising=False)
    assert proof.interpreter("megatron-lm") is None
    built = tmp_path / ".venv-trainers" / "megatron-lm" / "bin" / "python"
    built.parent.mkdir(parents=True)
    built.symlink_to(sys.executable)
    assert proof.interpreter("megatron-lm") == built
    monkeypatch.setenv("FORERUN_MEGATRON_LM_PYTHON", sys.executable)
    assert proof.interpreter("megatron-lm") == Path(sys.executable)
    monkeypatch.setenv("FORERUN_MEGATRON_LM_PYTHON", str(tmp_path / "gone"))
    with pytest.raises(ProofError, match="there is no such file"):
        proof.interpreter("megatron-lm")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "said"),
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
def test_torchtitan_itself_tells_what_was_changed_in_its_numbers(
    tmp_path, decision, old, new, said
):
    python = interpreter("torchtitan")
    torchtitan.export(decision, tmp_path)
    change(tmp_path, old, new)
    try:
        told = compare(decision, proof.ask("torchtitan", python, tmp_path), NAMES)
    except ProofError as error:
        told = error.problems
    assert any(said in problem for problem in told)
