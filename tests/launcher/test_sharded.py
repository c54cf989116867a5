"""A trial over two ranks, against the same trial on one; and against itself, again and taken up from a checkpoint."""

import dataclasses

import pytest
import torch
from proxy_cases import TINY, run_spec, write_corpus
from sharded_case import NUM_WINDOWS, ranked, sharded

from proxies.core.checks import SpecError
from proxies.core.programs import Factory
from proxies.core.schedule import Schedule
from proxies.data.tokens import TokenStore
from proxies.training.solo import Solo

WARMING = Schedule(kind="cosine", num_steps=6, warmup_steps=2, batch_warmup_steps=3, batch_warmup_stages=2)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def store(words):
    return TokenStore(words)


def spec_of(store, name="mup", **changes):
    """Twice the width and depth of its base."""
    shape = changes.pop("shape", TINY)
    tokens = {"base_batch_tokens": 32, "base_num_tokens": 576} if name == "completedp" else {}
    wanted = {
        "base_shape": shape.at_depth(2),
        "num_slots": 1,
        "weight_decay": 0.1,
        "clip_norm": 0.5,
        "seed": 3,
        "num_steps": 7,
    }
    shape = shape.at_width(32).at_depth(3)
    return run_spec(store.manifest.data_id, shape=shape, parametrization=name, **{**wanted, **tokens, **changes})


def alone(spec, store, device="cpu"):
    threads = torch.get_num_threads()
    solo = Solo(store, device=device)
    solo.admit(0, spec)
    ((_, result, curve),) = solo.advance(10**6)
    torch.set_num_threads(threads)
    return result, curve


def distance(found, expected):
    """The largest relative difference of any logged number."""
    (result, curve), (other, other_curve) = found, expected
    assert (result.status, result.num_steps, result.reason) == (other.status, other.num_steps, other.reason)
    assert curve.steps == other_curve.steps
    pairs = [
        (result.loss_nats or 0.0, other.loss_nats or 0.0),
        *zip(curve.train_loss_nats, other_curve.train_loss_nats, strict=True),
        *zip(curve.grad_norm, other_curve.grad_norm, strict=True),
    ]
    return max(abs(mine - theirs) / abs(theirs or 1.0) for mine, theirs in pairs)


@pytest.mark.parametrize(
    "left_out", [("llama", "gpt2", "warming", "bfloat16"), pytest.param((), marks=pytest.mark.slow)]
)
def test_as_on_one_device(words, store, tmp_path, monkeypatch, left_out):
    monkeypatch.setattr("proxies.training.outcome.VALIDATION_SEQUENCES", NUM_WINDOWS)
    gpt2 = dataclasses.replace(TINY, family="gpt2", num_kv_heads=2)
    tied = dataclasses.replace(TINY, tied=True, qk_norm=True)
    parts = {"microbatch_tokens": TINY.seq_len, "activation_checkpointing": True}
    close = {
        "llama": (spec_of(store, dtype="float64"), 1e-9),
        "gpt2": (spec_of(store, shape=gpt2, dtype="float64"), 1e-9),
        "tied": (spec_of(store, shape=tied, dtype="float64"), 1e-9),
        "completedp, in parts": (spec_of(store, "completedp", dtype="float64", **parts), 1e-9),
        "warming": (spec_of(store, schedule=WARMING, dtype="float64"), 1e-9),
        "float32": (spec_of(store), 1e-5),
        "bfloat16": (spec_of(store, dtype="bfloat16"), 0.02),
        "diverged": (spec_of(store, learning_rate=1e12, clip_norm=None), 1.0),
    }
    close = {name: case for name, case in close.items() if name not in left_out}
    asked = [(ranked(spec), [], 1) for spec, _ in close.values()]
    whole = ranked(spec_of(store))
    asked += [(whole, [1, 5], 1), (whole, [4], 2)]
    *found, resumed, split = sharded(tmp_path / "ranks", words, asked)
    for (name, (spec, most)), mine in zip(close.items(), found, strict=True):
        expected = alone(spec, store)
        if name == "diverged":
            assert (mine[0].status, mine[0].reason) == (expected[0].status, expected[0].reason)
            assert mine[0].status == "diverged"
        else:
            assert distance(mine, expected) < most, name
    float32 = found[list(close).index("float32")]
    assert resumed[1] == float32[1] and resumed[0].loss_nats == float32[0].loss_nats, "to the last bit"
    assert split[0].environment["num_microbatches"] == "2" and distance(split, float32) < 1e-5


def test_what_ranks_refuse(store):
    spec = spec_of(store)
    with pytest.raises(ValueError, match="num_ranks = 2: ranks are wanted"):
        Solo(store).admit(0, ranked(spec))
    for refused in ({"compiled": True}, {"fused_loss": True}, {"num_slots": 2}):
        with pytest.raises(SpecError, match=r"wants one (device|trial)"):
            ranked(spec, **refused)
    with pytest.raises(SpecError, match="num_ranks = 2: no divisor of a batch's 3 sequences"):
        ranked(dataclasses.replace(spec, batch_tokens=3 * TINY.seq_len))
    with pytest.raises(SpecError, match="a factory's model is not ours to shard"):
        ranked(dataclasses.replace(spec, factory=Factory(target="mine:build", source_sha256="0" * 64)))


@pytest.mark.gpu
def test_as_on_one_gpu(words, store, tmp_path, monkeypatch):
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are wanted")
    monkeypatch.setattr("proxies.training.outcome.VALIDATION_SEQUENCES", NUM_WINDOWS)
    specs = [spec_of(store), spec_of(store, dtype="bfloat16", activation_checkpointing=True)]
    asked = [(ranked(spec), saves, 1) for spec in specs for saves in ([], [3])]
    found = sharded(tmp_path / "ranks", words, asked, on_gpus=True)
    for spec, mine, resumed in zip(specs, found[::2], found[1::2], strict=True):
        assert distance(mine, alone(spec, store, "cuda")) < (0.02 if spec.numerics.dtype == "bfloat16" else 1e-4)
        assert resumed[1] == mine[1], "to the last bit"
