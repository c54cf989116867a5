import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from proxy_cases import BASE, TINY, run_spec

from proxies import canon
from proxies.checks import SpecError
from proxies.spec import MAX_SEED, Curve, Hparams, Numerics, Run, RunResult, RunSpec, Schedule, Shape

ROOT = Path(__file__).parents[2]

GOLDEN = RunSpec(
    shape=Shape(num_layers=2, width=64, num_heads=4, num_kv_heads=2, ffn_width=160, vocab_size=256, seq_len=64),
    base_shape=Shape(num_layers=2, width=32, num_heads=2, num_kv_heads=1, ffn_width=80, vocab_size=256, seq_len=64),
    parametrization="mup",
    hparams=Hparams(learning_rate=0.01, weight_decay=0.1),
    schedule=Schedule(kind="cosine", num_steps=100, warmup_steps=10, final_fraction=0.1),
    batch_tokens=1024,
    data_id="d" * 64,
    seed=7,
    numerics=Numerics(num_slots=8),
)
RESULT = RunResult(
    id="a" * 64, status="finished", loss_nats=2.5, num_steps=3, last_train_loss_nats=2.6, curve_id="b" * 64,
    flops=1e9, tokens=192, seconds=0.5, environment={"torch": "2"},
)  # fmt: skip


def problems(build):
    with pytest.raises(SpecError) as caught:
        build()
    return caught.value.problems


def test_the_language_is_pinned():
    """Another id here means that every finished run of every user is a stranger: change it knowingly."""
    assert GOLDEN.id == "55dd216b4019c58592c33362983fb3dc49cda92e8c1acb4c3df9d8cc64983ffa"
    assert canon.content_id(RESULT) == "094aeaa458c16c32de6ce3be5dcca1725a2f93245c3c7de901ef7440f580c673"


@pytest.mark.parametrize(
    "record",
    [GOLDEN, RESULT, Curve(steps=(1, 3), train_loss_nats=(5.0, 4.5), grad_norm=(1.0, 0.0)),
     Schedule(kind="wsd", num_steps=5, decay_steps=2), Hparams(learning_rate=1e-3, clip_norm=None)],
)  # fmt: skip
def test_records_come_back_from_their_text(record):
    assert canon.decode(type(record), canon.parse(canon.canonical(record))) == record


def test_every_field_is_part_of_the_identity():
    other = {
        "shape": dataclasses.replace(GOLDEN.shape, num_layers=3), "base_shape": GOLDEN.shape, "parametrization": "sp",
        "hparams": dataclasses.replace(GOLDEN.hparams, eps=1e-9), "batch_tokens": 2048, "data_id": "e", "seed": 8,
        "schedule": dataclasses.replace(GOLDEN.schedule, warmup_steps=11), "numerics": Numerics(num_slots=9),
    }  # fmt: skip
    assert set(other) | {"optimizer"} == {f.name for f in dataclasses.fields(RunSpec)}
    ids = {GOLDEN.id, *(dataclasses.replace(GOLDEN, **{name: value}).id for name, value in other.items())}
    assert len(ids) == 1 + len(other)


def test_a_whole_number_and_its_float_are_one_run():
    """Else a run whose clip was written as 1 would not find its own result again."""
    whole = dataclasses.replace(GOLDEN, hparams=Hparams(learning_rate=1, weight_decay=0, clip_norm=2))
    as_float = dataclasses.replace(GOLDEN, hparams=Hparams(learning_rate=1.0, weight_decay=0.0, clip_norm=2.0))
    assert whole.id == as_float.id
    assert canon.decode(RunSpec, canon.parse(canon.canonical(whole))).id == whole.id


def test_derived_numbers():
    assert (GOLDEN.num_tokens, GOLDEN.batch_sequences) == (102_400, 16)
    assert (GOLDEN.shape.head_dim, GOLDEN.shape.kv_width) == (16, 32)


def test_records_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GOLDEN.seed = 1
    with pytest.raises(TypeError):
        Schedule("cosine", 5)


def test_a_shape_says_every_problem_at_once():
    found = problems(
        lambda: Shape(
            num_layers=0,
            width=-1,
            num_heads=2.0,
            num_kv_heads=True,
            ffn_width="8",
            vocab_size=1,
            seq_len=0,
            family="gpt",
            tied=1,
        )
    )
    assert [text.split(" ")[0] for text in found] == [
        "num_layers", "width", "num_heads", "num_kv_heads", "ffn_width", "seq_len", "vocab_size", "family", "tied",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"num_heads": 3}, "num_heads = 3 does not divide width = 16"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads = 3 does not divide num_heads = 4"),
        ({"num_heads": 16}, "head_dim = 1 is odd"),
    ],
)
def test_a_shape_must_add_up(changes, problem):
    assert [text[: len(problem)] for text in problems(lambda: dataclasses.replace(TINY, **changes))] == [problem]


def test_another_width_keeps_the_ratios():
    wide = BASE.at_width(64)
    assert wide == dataclasses.replace(BASE, width=64, num_heads=8, num_kv_heads=4, ffn_width=192)
    assert wide.at_width(16) == BASE
    assert (wide.head_dim, wide.num_heads // wide.num_kv_heads) == (BASE.head_dim, 2)


@pytest.mark.parametrize(
    "shape, width, problem",
    [
        (BASE, 20, "width = 20 is no multiple of the head dim 8"),
        (BASE, 0, "width = 0 is no multiple"),
        (BASE, -16, "width = -16 is no multiple"),
        (BASE, 24, "width = 24 has 3 heads, not a multiple of 2 per kv head"),
        (dataclasses.replace(BASE, ffn_width=45), 24, "width = 24 gives the FFN width 67.5"),
    ],
)
def test_a_width_that_does_not_fit_is_refused(shape, width, problem):
    assert problem in problems(lambda: shape.at_width(width))[0]


def test_hparams_say_every_problem_at_once():
    found = problems(
        lambda: Hparams(
            learning_rate=0,
            weight_decay=-0.1,
            beta1=1.0,
            beta2=math.nan,
            eps=math.inf,
            clip_norm=0,
            embedding_multiplier="1",
            output_multiplier=10**400,
        )
    )
    assert len(found) == 8
    assert found[0] == "learning_rate = 0: a finite number > 0 is wanted"
    assert "beta1 = 1.0: a finite number >= 0 and < 1 is wanted" in found
    assert Hparams(learning_rate=1e-3, beta1=0, beta2=0, clip_norm=None).clip_norm is None


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"kind": "step"}, "kind = 'step': one of cosine, linear, wsd, constant is wanted"),
        ({"num_steps": 0}, "num_steps = 0: a whole number >= 1"),
        ({"warmup_steps": -1}, "warmup_steps = -1"),
        ({"warmup_steps": 11}, "warmup_steps = 11 and decay_steps = 0 exceed num_steps = 10"),
        ({"kind": "wsd", "warmup_steps": 5, "decay_steps": 6}, "warmup_steps = 5 and decay_steps = 6 exceed"),
        ({"kind": "wsd"}, "decay_steps = 0: `wsd` needs some"),
        ({"decay_steps": 2}, "decay_steps = 2: `cosine` needs none"),
        ({"final_fraction": 1.1}, "final_fraction = 1.1: a finite number >= 0 and <= 1"),
        ({"final_fraction": math.nan}, "final_fraction = nan"),
    ],
)
def test_schedules_that_do_not_hold_together(changes, problem):
    (found,) = problems(lambda: Schedule(**{"kind": "cosine", "num_steps": 10, **changes}))
    assert found.startswith(problem)


def test_a_run_says_every_problem_at_once():
    changes = {"parametrization": "ntk", "optimizer": "sgd", "batch_tokens": 0, "seed": MAX_SEED + 1, "data_id": ""}
    assert len(problems(lambda: dataclasses.replace(GOLDEN, **changes))) == 5
    assert problems(lambda: dataclasses.replace(GOLDEN, seed=True, batch_tokens=64.0))
    found = problems(
        lambda: dataclasses.replace(GOLDEN, batch_tokens=100, base_shape=dataclasses.replace(TINY, vocab_size=99))
    )
    assert [text.split(" ")[0] for text in found] == ["batch_tokens", "shape"]


def test_numerics_are_checked():
    assert len(problems(lambda: Numerics(dtype="int8", matmul_precision="low", num_slots=0, num_threads=True))) == 4


@pytest.mark.parametrize(
    "columns, problem",
    [
        (((1, 2), (1.0,), (1.0, 2.0)), "columns of different lengths: [1, 2]"),
        (((2, 1), (1.0, 1.0), (1.0, 2.0)), "steps are not strictly increasing"),
        (((1, 1), (1.0, 1.0), (1.0, 2.0)), "steps are not strictly increasing"),
        (((1,), (math.inf,), (1.0,)), "a value is not finite"),
        (((1,), (1.0,), (math.nan,)), "a value is not finite"),
    ],
)
def test_curves_that_do_not_hold_together(columns, problem):
    steps, losses, norms = columns
    assert problems(lambda: Curve(steps=steps, train_loss_nats=losses, grad_norm=norms)) == [problem]


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"status": "lost"}, "status = 'lost'"),
        ({"id": "a" * 63}, "id = "),
        ({"loss_nats": None}, "status = finished with loss_nats = None"),
        ({"status": "diverged", "reason": "x"}, "status = diverged with loss_nats = 2.5"),
        ({"status": "pruned", "loss_nats": None}, "status = pruned without a reason"),
        ({"loss_nats": math.nan}, "loss_nats = nan"),
        ({"last_train_loss_nats": math.inf}, "last_train_loss_nats = inf"),
        ({"num_steps": -1}, "num_steps = -1"),
        ({"tokens": 1.5}, "tokens = 1.5"),
        ({"flops": -1.0}, "flops = -1.0"),
        ({"seconds": math.inf}, "seconds = inf"),
    ],
)
def test_results_that_do_not_hold_together(changes, problem):
    assert any(text.startswith(problem) for text in problems(lambda: dataclasses.replace(RESULT, **changes)))


def test_a_run_is_a_spec_with_its_own_result():
    spec = run_spec("d")
    assert Run(spec=spec, result=dataclasses.replace(RESULT, id=spec.id)).spec is spec
    assert problems(lambda: Run(spec=spec, result=RESULT)) == ["result aaaaaaaaaaaa is of another spec"]


def loaded_by(*modules):
    """First names of everything that importing `modules` loads in a fresh interpreter."""
    script = (
        "import sys, json; before = set(sys.modules)\n"
        + "".join(f"import {module}\n" for module in modules)
        + "print(json.dumps(sorted({m.split('.')[0] for m in set(sys.modules) - before})))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(json.loads(done.stdout))


def test_the_hearth_loads_only_the_standard_library():
    found = loaded_by("proxies.spec", "proxies.canon", "proxies.flops", "proxies.schedule")
    assert found - set(sys.stdlib_module_names) == {"proxies"}


@pytest.mark.parametrize("room", ["transfer", "scaling_fits"])
def test_rooms_of_pure_functions_load_no_torch(room):
    found = loaded_by(*(f"{room}.{path.stem}" for path in sorted((ROOT / room).glob("[a-z]*.py"))))
    assert {room, "numpy"} <= found
    assert not found & {"torch", "ray", "optuna", "mup", "wandb", "sweeps", "launcher"}
