"""A trainer's view held against the decision: equal as it stands, and every planted difference named."""

import dataclasses
import math
import sys
import time
from pathlib import Path

import pytest
from export_case import SHAPE, wide_decision
from exported_program import change
from trainer_venv import interpreter

from launcher.exporters import proof
from launcher.exporters.proof import ProofError
from launcher.exporters.trainers import torchtitan
from launcher.exporters.view import TrainedWith, TrainerView, compare, proof_steps
from launcher.frozen import frozen
from launcher.frozen.frozen import Decision
from proxies.core import canon
from proxies.core.schedule import Schedule, lr_multiplier
from proxies.model.decoder import parameter_shapes

NAMES = torchtitan.parameter_names(SHAPE)
HIDDEN = "layers.1.feed_forward.w2.weight"


@pytest.fixture(scope="module")
def decision(manifest) -> Decision:
    return wide_decision(manifest)


def view_of(decision: Decision, schedule: Schedule | None = None) -> TrainerView:
    """What a trainer would tell that does all as frozen, but for another schedule."""
    steps = proof_steps(decision.learning_rate.schedule)
    rows = {group.pattern: row for row, group in enumerate(decision.groups)}
    ran = schedule or decision.learning_rate.schedule
    sizes = parameter_shapes(decision.shape)
    return TrainerView(
        trainer="torchtitan",
        version="0.3.0",
        num_steps=decision.learning_rate.schedule.num_steps,
        batch_tokens=decision.batch_tokens,
        clip_norm=decision.clip_norm,
        forward=decision.forward,
        steps=steps,
        rates=tuple(tuple(g.learning_rate * lr_multiplier(ran, step) for step in steps) for g in decision.groups),
        parameters={
            NAMES[name]: TrainedWith(
                num_elements=math.prod(sizes[name]),
                learning_rate=group.learning_rate,
                weight_decay=group.weight_decay,
                eps=group.eps,
                beta1=group.beta1,
                beta2=group.beta2,
                rates=rows[group.pattern],
            )
            for name, group in frozen.assign_groups(decision.groups, list(sizes)).items()
        },
    )


def held(view: TrainerView, name: str, **changes: object) -> TrainerView:
    changed = dataclasses.replace(view.parameters[name], **changes)
    return dataclasses.replace(view, parameters={**view.parameters, name: changed})


def test_an_equal_view_has_no_differences_and_survives_json(decision):
    view = view_of(decision)
    assert compare(decision, view, NAMES) == []
    again = canon.decode(TrainerView, canon.parse(canon.pretty(view)), "view")
    assert again == view


def test_rounding_of_another_order_of_products_is_no_difference(decision):
    view = view_of(decision)
    rates = tuple(tuple(rate * (1 + 3e-15) for rate in row) for row in view.rates)
    assert compare(decision, dataclasses.replace(view, rates=rates), NAMES) == []


@pytest.mark.parametrize("field", ["learning_rate", "eps", "beta2"])
def test_one_other_number_of_one_parameter_is_named(decision, field):
    view = view_of(decision)
    number = getattr(view.parameters[HIDDEN], field) * (1 + 1e-8)
    [problem] = compare(decision, held(view, HIDDEN, **{field: number}), NAMES)
    assert problem.startswith(f"{HIDDEN}: {field} is ")


def test_weight_decay_where_none_is_wanted_is_named(decision):
    view = view_of(decision)
    assert view.parameters["norm.weight"].weight_decay == 0
    assert compare(decision, held(view, "norm.weight", weight_decay=1e-12), NAMES)


@pytest.mark.parametrize(("change", "first"), [({"warmup_steps": 4}, 0), ({"final_fraction": 0.10001}, 4)])
def test_another_schedule_is_named_for_every_parameter_at_its_first_step(decision, change, first):
    other = dataclasses.replace(decision.learning_rate.schedule, **change)
    problems = compare(decision, view_of(decision, other), NAMES)
    assert len(problems) == len(NAMES)
    assert all(f": the rate at step {first} is " in problem for problem in problems)


def test_a_warmup_from_zero_is_named(decision):
    """The step-0 convention of several trainers: the same schedule, one update late."""
    view = view_of(decision)
    late = tuple((0.0, *row[:-1]) for row in view.rates)
    problems = compare(decision, dataclasses.replace(view, rates=late), NAMES)
    assert len(problems) == len(NAMES)
    assert "the rate at step 0 is 0.0" in problems[0]


def test_a_pattern_that_claims_nothing_leaves_its_parameters_to_other_numbers(decision):
    view = view_of(decision)
    embedding = dataclasses.replace(view.parameters["tok_embeddings.weight"], num_elements=SHAPE.width * 256)
    problems = compare(decision, held(view, "lm_head.weight", **dataclasses.asdict(embedding)), NAMES)
    assert problems
    assert all(problem.startswith("lm_head.weight: ") for problem in problems)
    gone = {name: with_ for name, with_ in view.parameters.items() if name != "lm_head.weight"}
    assert compare(decision, dataclasses.replace(view, parameters=gone), NAMES) == [
        "the optimizer lacks lm_head.weight"
    ]


def test_parameters_too_many_and_of_another_size_are_named(decision):
    view = view_of(decision)
    extra = {**view.parameters, "value_head.weight": view.parameters[HIDDEN]}
    assert compare(decision, dataclasses.replace(view, parameters=extra), NAMES) == [
        "the optimizer trains value_head.weight, which is not frozen"
    ]
    assert compare(decision, held(view, HIDDEN, num_elements=7), NAMES) == [
        f"{HIDDEN} has 7 elements, frozen with {64 * 160}"
    ]
    assert compare(decision, held(view, HIDDEN, rates=9), NAMES) == [f"{HIDDEN}: there is no row 9 of learning rates"]


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


@pytest.mark.parametrize(("field", "value"), [("num_steps", 13), ("batch_tokens", 512), ("clip_norm", None)])
def test_another_run_is_named(decision, field, value):
    [problem] = compare(decision, dataclasses.replace(view_of(decision), **{field: value}), NAMES)
    assert problem == f"{field} is {value}, frozen as {getattr(decision, field, 12)}"


@pytest.mark.parametrize("field", ["embedding", "output"])
def test_another_forward_multiplier_is_named_and_its_rounding_is_not(decision, field):
    view, ours = view_of(decision), getattr(decision.forward, field)
    for factor, said in ((1 + 1e-15, []), (1.25, [f"forward.{field} is {ours * 1.25!r}, frozen as {ours!r}"])):
        forward = dataclasses.replace(decision.forward, **{field: ours * factor})
        assert compare(decision, dataclasses.replace(view, forward=forward), NAMES) == said


def test_a_view_at_other_steps_proves_nothing(decision):
    view = view_of(decision)
    few = dataclasses.replace(view, steps=view.steps[:3], rates=tuple(row[:3] for row in view.rates))
    assert "12 other ones are wanted" in compare(decision, few, NAMES)[0]
    short = dataclasses.replace(view, rates=tuple(row[:3] for row in view.rates))
    assert compare(decision, short, NAMES)


def test_long_runs_are_read_at_every_bend():
    long = Schedule(kind="wsd", num_steps=1_000_000, warmup_steps=2000, decay_steps=70_001)
    steps = proof_steps(long)
    assert len(steps) < 5000
    assert list(steps) == sorted(set(steps))
    for bend in (0, 1999, 2000, 929_998, 929_999, 930_000, 999_999):
        assert bend in steps
    assert proof_steps(dataclasses.replace(long, num_steps=80_000)) != steps
    assert proof_steps(Schedule(kind="cosine", num_steps=4096)) == tuple(range(4096))


@pytest.mark.parametrize("limit_seconds", [1.5, 30])
def test_nothing_that_a_proof_started_outlives_it(tmp_path, monkeypatch, limit_seconds):
    monkeypatch.setattr(proof, "LIMIT_SECONDS", limit_seconds)
    child = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, file=open('pid', 'w'), flush=True)"
    wait = "import time; time.sleep(60)" if limit_seconds < 2 else "raise SystemExit(3)"
    (tmp_path / proof.PROVE_FILE).write_text(f"{child}\n{wait}\n")
    began = time.monotonic()
    with pytest.raises(
        ProofError, match="seconds and was stopped" if limit_seconds < 2 else "ended with 3: no word why"
    ):
        proof.ask("torchtitan", Path(sys.executable), tmp_path)
    assert time.monotonic() - began < 20
    state = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    while time.monotonic() - began < 20 and state.exists() and state.read_text().split()[2] != "Z":
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z"


SILENT = {
    "kill -9 $$": "was killed by signal 9 (was there memory enough?): no word why",
    "echo 'no such flag' >&2; exit 3": "ended with 3: no such flag",
    "exit 0": "ended with 0: no word why",
    "echo first; printf '\\377\\376'": "printed no view: not JSON",
    "echo '{}'": "printed no view: view (TrainerView) lacks trainer",
    "head -c 20000 /dev/zero | tr '\\0' '['": "printed no view: not JSON: maximum recursion depth",
    "echo '{\"a\": \"'; head -c 500000 /dev/zero | tr '\\0' 'x'": "printed no view: ",
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
        "the export is for torchtitan 0.3.0: has it that? FORERUN_TORCHTITAN_PYTHON names another Python",
    ]


def test_an_export_is_proven_if_its_trainer_agrees_and_its_files_are_those_asked(tmp_path, decision):
    python, lying = tmp_path / "python", tmp_path / "lying"
    python.write_text(f"#!/bin/sh\ntest -f {torchtitan.MODULE}.py && echo '{canon.canonical(view_of(decision))}'\n")
    python.chmod(0o755)
    torchtitan.export(decision, lying)
    assert proof.prove(decision, "torchtitan", "0.3.0", python, lying) == []
    [problem] = proof.prove(dataclasses.replace(decision, clip_norm=1.0), "torchtitan", "0.3.0", python)
    assert problem == "clip_norm is 0.5, frozen as 1.0"
    (lying / "run.sh").write_text("true")
    [problem] = proof.prove(decision, "torchtitan", "0.3.0", python, lying)
    assert problem.endswith("run.sh is not what this version of forerun writes: export again")
    python.write_text(python.read_text().replace('"version":"0.3.0"', '"version":"0.2.2"'))
    [problem] = proof.prove(decision, "torchtitan", "0.3.0", python)
    assert "has torchtitan 0.2.2: 0.3.0 is wanted" in problem


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
        ('"learning_rate": 0.015625', '"learning_rate": 0.0156250001', "learning_rate is 0.0156250001, frozen as 0.0"),
        ('"warmup_steps": 3', '"warmup_steps": 4', "the rate at step 0 is "),
        ('"clip_norm": 0.5', '"clip_norm": null', "clip_norm is None, frozen as 0.5"),
        ("^(?:tok_embeddings", "^(?:token_embeddings", "matched no parameters"),
    ],
)
def test_torchtitan_itself_tells_what_was_changed_in_its_numbers(tmp_path, decision, old, new, said):
    python = interpreter("torchtitan")
    torchtitan.export(decision, tmp_path)
    change(tmp_path, old, new)
    try:
        told = compare(decision, proof.ask("torchtitan", python, tmp_path), NAMES)
    except ProofError as error:
        told = error.problems
    assert any(said in problem for problem in told)
