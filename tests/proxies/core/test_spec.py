"""Tests of run specs: their identity, which stored results depend on, and their limits."""

import copy
import dataclasses
import pickle
from pathlib import Path

import pytest
from proxy_cases import TINY, make_run_spec

from forerun._proxies.core import canon
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.powers import Ratios
from forerun._proxies.core.programs import Command, Factory
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import MAX_SEED, Curve, Numerics, Run, RunResult, RunSpec

ROOT = Path(__file__).parents[3]

GOLDEN = RunSpec(
    optimizer="adamw",
    shape=Shape(
        num_layers=2,
        width=64,
        num_heads=4,
        num_kv_heads=2,
        ffn_width=160,
        vocab_size=256,
        seq_len=64,
    ),
    base_shape=Shape(
        num_layers=2,
        width=32,
        num_heads=2,
        num_kv_heads=1,
        ffn_width=80,
        vocab_size=256,
        seq_len=64,
    ),
    parametrization=get_parametrization("mup"),
    hparams=Hparams(learning_rate=0.01, weight_decay=0.1),
    schedule=Schedule(kind="cosine", num_steps=100, warmup_steps=10, final_fraction=0.1),
    batch_tokens=1024,
    data_id="d" * 64,
    seed=7,
    numerics=Numerics(num_slots=8),
)
RESULT = RunResult(
    id="a" * 64,
    status="finished",
    loss_nats=2.5,
    num_steps=3,
    last_train_loss_nats=2.6,
    curve_id="b" * 64,
    flops=1e9,
    tokens=192,
    seconds=0.5,
    environment={"torch": "2"},
)


def list_problems(build):
    """Return the problems of the `SpecError` that `build()` raises."""
    with pytest.raises(SpecError) as caught:
        build()
    return caught.value.problems


def test_ids_of_spec_and_result_are_pinned():
    """If these ids change, finished runs of users are not found again. Never change them."""
    assert GOLDEN.id == "37a23cd3d6a43f3acd3697bc2fb73e488ee8bb14c4271a96ac4f1a8b68eed843"
    result_id = "094aeaa458c16c32de6ce3be5dcca1725a2f93245c3c7de901ef7440f580c673"
    assert canon.compute_content_id(RESULT) == result_id


@pytest.mark.parametrize(
    "record",
    [
        GOLDEN,
        RESULT,
        Curve(steps=(1, 3), train_loss_nats=(5.0, 4.5), grad_norm=(1.0, 0.0)),
        Schedule(kind="wsd", num_steps=5, decay_steps=2),
        Hparams(learning_rate=1e-3, clip_norm=None),
    ],
)
def test_records_survive_json(record):
    assert canon.decode(type(record), canon.parse(canon.to_canonical_json(record))) == record


def test_every_field_is_part_of_the_id():
    changed_fields = {
        "shape": GOLDEN.shape.at_depth(3),
        "base_shape": GOLDEN.shape,
        "parametrization": get_parametrization("sp"),
        "hparams": dataclasses.replace(GOLDEN.hparams, eps=1e-9),
        "batch_tokens": 2048,
        "data_id": "e",
        "seed": 8,
        "schedule": dataclasses.replace(GOLDEN.schedule, warmup_steps=11),
        "numerics": Numerics(num_slots=9),
    }
    single_trial = dataclasses.replace(GOLDEN, numerics=Numerics())
    command = Command(
        template="train {run_json}",
        metrics_format="jsonl",
        metrics_path="{run_dir}/metrics.jsonl",
        step_key="step",
        train_loss_key="loss",
        validation_loss_key="val_loss",
        grad_norm_key="",
    )
    specs = [GOLDEN, single_trial]
    specs += [
        dataclasses.replace(GOLDEN, **{name: value}) for name, value in changed_fields.items()
    ]

    # A user's program trains one run at a time, so the spec must have one slot.
    programs = {
        "factory": Factory(target="user.models:build", source_sha256="f" * 64),
        "command": command,
    }
    specs += [
        dataclasses.replace(single_trial, **{name: value}) for name, value in programs.items()
    ]

    # Only some parametrizations scale with the base run's tokens.
    token_fields = {
        "parametrization": get_parametrization("completedp"),
        "base_batch_tokens": 512,
        "base_num_tokens": 51_200,
    }
    specs += [
        dataclasses.replace(GOLDEN, **token_fields),
        dataclasses.replace(GOLDEN, **{**token_fields, "base_batch_tokens": 1024}),
        dataclasses.replace(GOLDEN, **{**token_fields, "base_num_tokens": 102_400}),
    ]

    # The optimizer cannot change alone, because muon needs another parametrization. The id is a
    # hash of the canonical text, so it is enough that the text names the optimizer.
    assert canon.to_json(GOLDEN)["optimizer"] == GOLDEN.optimizer
    tested = set(changed_fields) | set(programs) | set(token_fields) | {"optimizer"}
    assert tested == {field.name for field in dataclasses.fields(RunSpec)}
    assert len({spec.id for spec in specs}) == len(specs)


def test_integer_and_equal_float_give_the_same_id():
    """A plan may write 1 where the result was stored with 1.0."""
    as_integer = dataclasses.replace(
        GOLDEN, hparams=Hparams(learning_rate=1, weight_decay=0, clip_norm=2)
    )
    as_float = dataclasses.replace(
        GOLDEN, hparams=Hparams(learning_rate=1.0, weight_decay=0.0, clip_norm=2.0)
    )
    assert as_integer.id == as_float.id
    assert (
        canon.decode(RunSpec, canon.parse(canon.to_canonical_json(as_integer))).id == as_integer.id
    )


def test_tokens_and_ratios_are_derived_from_the_spec():
    assert (GOLDEN.num_tokens, GOLDEN.batch_sequences) == (102_400, 16)
    assert GOLDEN.ratios == Ratios(width=2.0)
    token_fields = {
        "parametrization": get_parametrization("completedp"),
        "base_batch_tokens": 512,
        "base_num_tokens": 25_600,
    }
    ratios = dataclasses.replace(GOLDEN, **token_fields).ratios
    assert ratios == Ratios(width=2.0, batch=2.0, duration=4.0)
    warmed = Schedule(kind="cosine", num_steps=100, batch_warmup_steps=30, batch_warmup_stages=4)
    run = dataclasses.replace(GOLDEN, schedule=warmed, numerics=Numerics())
    # Three stages of ten steps at 1/4, 2/4 and 3/4 of the batch, then full batches
    assert run.num_tokens == 10 * (256 + 512 + 768) + 70 * 1024


def test_all_problems_of_a_run_are_listed():
    changes = {"optimizer": "sgd", "batch_tokens": 0, "seed": MAX_SEED + 1, "data_id": ""}
    assert len(list_problems(lambda: dataclasses.replace(GOLDEN, **changes))) == 4
    assert list_problems(lambda: dataclasses.replace(GOLDEN, seed=True, batch_tokens=64.0))
    other_base = dataclasses.replace(TINY, vocab_size=99)
    problems = list_problems(
        lambda: dataclasses.replace(GOLDEN, batch_tokens=100, base_shape=other_base)
    )
    assert [problem.split(" ")[0] for problem in problems] == ["batch_tokens", "shape"]


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"parametrization": get_parametrization("completedp")}, "base_batch_tokens = None"),
        ({"base_batch_tokens": 512}, "base tokens = (512, None): mup does not scale with them"),
        (
            {"factory": Factory(target="a:b", source_sha256="0" * 64)},
            "num_slots = 8: a factory's model trains one",
        ),
        (
            {
                "factory": Factory(target="a:b", source_sha256="0" * 64),
                "numerics": Numerics(activation_checkpointing=True),
            },
            "activation_checkpointing",
        ),
        (
            {
                "schedule": Schedule(
                    kind="cosine", num_steps=9, batch_warmup_steps=4, batch_warmup_stages=2
                )
            },
            "num_slots = 8: batch warmup needs one",
        ),
        (
            {"numerics": Numerics(microbatch_tokens=96)},
            "microbatch_tokens = 96: must be a multiple of",
        ),
        (
            {
                "schedule": Schedule(
                    kind="cosine", num_steps=9, batch_warmup_steps=4, batch_warmup_stages=3
                ),
                "numerics": Numerics(),
            },
            "batch_tokens = 1024 is not a multiple of seq_len = 64 times",
        ),
    ],
)
def test_inconsistent_runs_are_refused(changes, problem):
    problems = list_problems(lambda: dataclasses.replace(GOLDEN, **changes))
    assert any(message.startswith(problem) for message in problems)


def test_run_refuses_the_result_of_another_spec():
    spec = make_run_spec("d")
    assert Run(spec=spec, result=dataclasses.replace(RESULT, id=spec.id)).spec is spec
    problems = list_problems(lambda: Run(spec=spec, result=RESULT))
    assert problems == ["result aaaaaaaaaaaa is of another spec"]


def test_cached_id_is_not_part_of_a_spec():
    """A spec stores its id at the first access; copies and texts must not contain it."""
    cached, fresh = dataclasses.replace(GOLDEN), dataclasses.replace(GOLDEN)
    text = repr(cached)
    assert cached.id
    assert cached == fresh
    assert (repr(cached), canon.to_json(cached)) == (text, canon.to_json(fresh))
    cached_fields = [field.name for field in dataclasses.fields(cached)]
    assert cached_fields == [field.name for field in dataclasses.fields(fresh)]
    assert pickle.dumps(cached) == pickle.dumps(fresh)
    for duplicate in (
        copy.copy(cached),
        copy.deepcopy(cached),
        pickle.loads(pickle.dumps(cached)),
        dataclasses.replace(cached),
    ):
        assert not hasattr(duplicate, "_id")
        assert duplicate == cached
        assert duplicate.id == cached.id
    changed = dataclasses.replace(cached, seed=8)
    assert changed.id == canon.compute_content_id(changed) != cached.id
    with pytest.raises((AttributeError, TypeError)):
        cached._id = "0" * 64
