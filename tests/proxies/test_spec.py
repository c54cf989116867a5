import copy
import dataclasses
import pickle
from pathlib import Path

import pytest
from proxy_cases import TINY, run_spec

from proxies.core import canon
from proxies.core.checks import SpecError
from proxies.core.hyperparameters import Hparams
from proxies.core.powers import Ratios
from proxies.core.programs import Command, Factory
from proxies.core.rules import named
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.core.spec import MAX_SEED, Curve, Numerics, Run, RunResult, RunSpec

ROOT = Path(__file__).parents[2]

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
    parametrization=named("mup"),
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


def problems(build):
    with pytest.raises(SpecError) as caught:
        build()
    return caught.value.problems


def test_the_language_is_pinned():
    """Another id here means that every finished run of every user is a stranger: change it
    knowingly.
    """
    assert GOLDEN.id == "37a23cd3d6a43f3acd3697bc2fb73e488ee8bb14c4271a96ac4f1a8b68eed843"
    assert (
        canon.content_id(RESULT)
        == "094aeaa458c16c32de6ce3be5dcca1725a2f93245c3c7de901ef7440f580c673"
    )


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
def test_records_come_back_from_their_text(record):
    assert canon.decode(type(record), canon.parse(canon.canonical(record))) == record


def test_every_field_is_part_of_the_identity():
    other = {
        "shape": GOLDEN.shape.at_depth(3),
        "base_shape": GOLDEN.shape,
        "parametrization": named("sp"),
        "hparams": dataclasses.replace(GOLDEN.hparams, eps=1e-9),
        "batch_tokens": 2048,
        "data_id": "e",
        "seed": 8,
        "schedule": dataclasses.replace(GOLDEN.schedule, warmup_steps=11),
        "numerics": Numerics(num_slots=9),
    }
    alone = dataclasses.replace(GOLDEN, numerics=Numerics())
    command = Command(
        template="train {run_json}",
        metrics_format="jsonl",
        metrics_path="{run_dir}/metrics.jsonl",
        step_key="step",
        train_loss_key="loss",
        validation_loss_key="val_loss",
        grad_norm_key="",
    )
    ids = {
        GOLDEN.id,
        alone.id,
        *(dataclasses.replace(GOLDEN, **{name: value}).id for name, value in other.items()),
    }
    own = {
        "factory": Factory(target="mine.models:build", source_sha256="f" * 64),
        "command": command,
    }
    ids |= {dataclasses.replace(alone, **{name: value}).id for name, value in own.items()}
    timed = {
        "parametrization": named("completedp"),
        "base_batch_tokens": 512,
        "base_num_tokens": 51_200,
    }
    ids.add(dataclasses.replace(GOLDEN, **timed).id)
    ids.add(dataclasses.replace(GOLDEN, **{**timed, "base_batch_tokens": 1024}).id)
    ids.add(dataclasses.replace(GOLDEN, **{**timed, "base_num_tokens": 102_400}).id)
    assert set(other) | set(own) | set(timed) | {"optimizer"} == {
        f.name for f in dataclasses.fields(RunSpec)
    }
    assert len(ids) == 2 + len(other) + len(own) + len(timed)


def test_a_whole_number_and_its_float_are_one_run():
    """Else a run whose clip was written as 1 would not find its own result again."""
    whole = dataclasses.replace(
        GOLDEN, hparams=Hparams(learning_rate=1, weight_decay=0, clip_norm=2)
    )
    as_float = dataclasses.replace(
        GOLDEN, hparams=Hparams(learning_rate=1.0, weight_decay=0.0, clip_norm=2.0)
    )
    assert whole.id == as_float.id
    assert canon.decode(RunSpec, canon.parse(canon.canonical(whole))).id == whole.id


def test_derived_numbers():
    assert (GOLDEN.num_tokens, GOLDEN.batch_sequences) == (102_400, 16)
    assert GOLDEN.ratios == Ratios(width=2.0)
    timed = {
        "parametrization": named("completedp"),
        "base_batch_tokens": 512,
        "base_num_tokens": 25_600,
    }
    assert dataclasses.replace(GOLDEN, **timed).ratios == Ratios(width=2.0, batch=2.0, duration=4.0)
    warmed = Schedule(kind="cosine", num_steps=100, batch_warmup_steps=30, batch_warmup_stages=4)
    run = dataclasses.replace(GOLDEN, schedule=warmed, numerics=Numerics())
    assert run.num_tokens == 10 * (256 + 512 + 768) + 70 * 1024


def test_a_run_says_every_problem_at_once():
    changes = {"optimizer": "sgd", "batch_tokens": 0, "seed": MAX_SEED + 1, "data_id": ""}
    assert len(problems(lambda: dataclasses.replace(GOLDEN, **changes))) == 4
    assert problems(lambda: dataclasses.replace(GOLDEN, seed=True, batch_tokens=64.0))
    found = problems(
        lambda: dataclasses.replace(
            GOLDEN, batch_tokens=100, base_shape=dataclasses.replace(TINY, vocab_size=99)
        )
    )
    assert [text.split(" ")[0] for text in found] == ["batch_tokens", "shape"]


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"parametrization": named("completedp")}, "base_batch_tokens = None"),
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
def test_runs_that_do_not_hold_together(changes, problem):
    assert any(
        text.startswith(problem)
        for text in problems(lambda: dataclasses.replace(GOLDEN, **changes))
    )


def test_a_run_is_a_spec_with_its_own_result():
    spec = run_spec("d")
    assert Run(spec=spec, result=dataclasses.replace(RESULT, id=spec.id)).spec is spec
    assert problems(lambda: Run(spec=spec, result=RESULT)) == [
        "result aaaaaaaaaaaa is of another spec"
    ]


def fresh():
    """Equal to `GOLDEN`, and nobody has asked for its id."""
    return dataclasses.replace(GOLDEN)


def test_a_known_id_is_no_part_of_a_spec():
    known, unknown = fresh(), fresh()
    text = repr(known)
    assert known.id
    assert known == unknown
    assert (repr(known), canon.to_json(known)) == (text, canon.to_json(unknown))
    assert [field.name for field in dataclasses.fields(known)] == [
        field.name for field in dataclasses.fields(unknown)
    ]
    assert pickle.dumps(known) == pickle.dumps(unknown)
    for twin in (
        copy.copy(known),
        copy.deepcopy(known),
        pickle.loads(pickle.dumps(known)),
        dataclasses.replace(known),
    ):
        assert not hasattr(twin, "_id")
        assert twin == known
        assert twin.id == known.id
    other = dataclasses.replace(known, seed=8)
    assert other.id == canon.content_id(other) != known.id
    with pytest.raises((AttributeError, TypeError)):
        known._id = "0" * 64
