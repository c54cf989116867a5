"""A trial alone is held against the same trial in a bank, and against a training loop written out
by hand.
"""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from proxy_cases import TINY, Built, Theirs, run_spec, theirs
from torch import nn

from proxies.core import canon
from proxies.core.programs import Factory
from proxies.core.schedule import Schedule, lr_multiplier
from proxies.core.spec import Numerics
from proxies.model.decoder import Decoder
from proxies.parametrization.parametrization import forward_numbers, initial_tensor, parameter_table
from proxies.training.bank import Bank
from proxies.training.outcome import validation_ids
from proxies.training.solo import Solo
from proxies.training.trainable_model import our_model

pytestmark = [
    pytest.mark.usefixtures("few_windows"),
    # torch's own compiler calls it
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]

BASE = TINY.at_depth(2)
DEEP = TINY.at_width(32).at_depth(4)
FACTORY = Factory(target="mine:build", source_sha256="0" * 64)
WARMING = Schedule(
    kind="cosine", num_steps=10, warmup_steps=2, batch_warmup_steps=5, batch_warmup_stages=4
)


def spec_of(store, name="mup", **changes):
    """Twice the width and depth of its base; what scales with tokens runs at twice the batch and
    4/3 the duration.
    """
    tokens = {"base_batch_tokens": 32, "base_num_tokens": 576} if name == "completedp" else {}
    wanted = {
        "shape": DEEP,
        "base_shape": BASE,
        "num_slots": 1,
        "weight_decay": 0.1,
        "clip_norm": 0.5,
        "seed": 3,
    }
    return run_spec(store.manifest.data_id, parametrization=name, **{**wanted, **tokens, **changes})


def train(spec, store, **options):
    solo = Solo(store, **{"device": "cpu", **options})
    solo.admit(0, spec)
    ((slot, result, curve),) = solo.advance(10**6)
    assert (slot, solo.free_slots, result.id) == (0, [0], spec.id)
    return result, curve


def in_bank(spec, store, num_slots=4):
    """The same trial among empty neighbours."""
    spec = dataclasses.replace(
        spec, numerics=dataclasses.replace(spec.numerics, num_slots=num_slots)
    )
    bank = Bank(spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="adamw")
    bank.admit(num_slots - 1, spec)
    ((_, result, curve),) = bank.advance(10**6)
    return result, curve


def by_hand(spec, store):
    """torch.optim.AdamW with a group per parameter and clip_grad_norm_: losses, norms and the
    validation loss.
    """
    model, numbers, forward = (
        Decoder(spec.shape).double(),
        parameter_table(spec),
        forward_numbers(spec),
    )
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for n in numbers:
            parameters[n.name].copy_(initial_tensor(n, spec.seed))
    adamw = torch.optim.AdamW(
        [
            {
                "params": [parameters[n.name]],
                "lr": 0.0,
                "weight_decay": n.weight_decay,
                "eps": n.settings["eps"],
                "betas": (n.settings["beta1"], n.settings["beta2"]),
            }
            for n in numbers
        ]
    )

    def loss_of(ids):
        return nn.functional.cross_entropy(model(ids[:, :-1], forward), ids[:, 1:].flatten())

    losses, norms, first = [], [], 0
    for step in range(spec.schedule.num_steps):
        count = int(spec.schedule.batch_share(step) * spec.batch_sequences)
        batch = store.train_batch(
            seed=spec.seed, first_sequence=first, num_sequences=count, seq_len=spec.shape.seq_len
        )
        first += count
        loss = loss_of(torch.from_numpy(batch))
        adamw.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), spec.hparams.clip_norm or math.inf)
        for group, n in zip(adamw.param_groups, numbers, strict=True):
            group["lr"] = n.learning_rate * lr_multiplier(spec.schedule, step)
        adamw.step()
        losses.append(loss.item())
        norms.append(norm.item())
    with torch.no_grad():
        return losses, norms, loss_of(validation_ids(store, spec.shape.seq_len)).item()


def distance(one, other):
    """Largest difference of losses, validation's among them, in nats."""
    (result, curve), (their_result, their_curve) = one, other
    pairs = zip(curve.train_loss_nats, their_curve.train_loss_nats, strict=True)
    return max(abs(result.loss_nats - their_result.loss_nats), *(abs(a - b) for a, b in pairs))


@pytest.mark.parametrize("name", ["sp", "completedp", "umup"])
def test_it_is_the_loop_written_by_hand_and_the_bank(store, name):
    spec = spec_of(store, name, dtype="float64")
    assert spec.ratios.width == spec.ratios.depth == 2
    assert (spec.ratios.batch, spec.ratios.duration) == (
        (2, 4 / 3) if name == "completedp" else (1, 1)
    )
    result, curve = train(spec, store)
    losses, norms, validation_nats = by_hand(spec, store)
    assert curve.train_loss_nats == pytest.approx(losses, abs=1e-9)
    assert curve.grad_norm == pytest.approx(norms, rel=1e-9)
    assert result.loss_nats == pytest.approx(validation_nats, abs=1e-9)
    assert distance((result, curve), in_bank(spec, store)) < 1e-12
    assert losses[-1] < losses[0] - 0.1 and max(norms) > 0.5  # it learns, and the clip is at work


@pytest.mark.parametrize("spoil", ["eps", "clip_norm"])
def test_the_comparison_can_fail(store, spoil):
    spec = spec_of(store, "completep", dtype="float64", eps=1e-3)
    other = getattr(spec.hparams, spoil) * 0.5
    spoiled = dataclasses.replace(spec, hparams=dataclasses.replace(spec.hparams, **{spoil: other}))
    assert distance(train(spec, store), train(spoiled, store)) > 1e-5


def test_accumulated_gradients_are_the_batchs(store):
    spec = spec_of(store, dtype="float64")
    micro = dataclasses.replace(spec.numerics, microbatch_tokens=spec.batch_tokens // 4)
    parts, whole = train(dataclasses.replace(spec, numerics=micro), store), train(spec, store)
    assert distance(parts, whole) < 1e-12
    assert parts[1].grad_norm == pytest.approx(whole[1].grad_norm, rel=1e-12)


def test_recomputed_blocks_change_nothing(store, monkeypatch):
    spec = spec_of(store)
    passes = []
    forward = nn.functional.silu
    monkeypatch.setattr(nn.functional, "silu", lambda x: passes.append(len(x)) or forward(x))
    kept = train(spec, store)
    num_kept = len(passes)
    passes.clear()
    numerics = dataclasses.replace(spec.numerics, activation_checkpointing=True)
    recomputed = train(dataclasses.replace(spec, numerics=numerics), store)
    assert distance(recomputed, kept) == 0 and recomputed[1].grad_norm == kept[1].grad_norm
    assert len(passes) == num_kept + 12 * DEEP.num_layers


def test_bfloat16_keeps_weights_in_float32(store):
    """Near float32's curve; weights, moments and sums stay float32, or small updates would be
    lost.
    """
    spec = spec_of(store, num_steps=30)
    numerics = dataclasses.replace(spec.numerics, dtype="bfloat16")
    solo = Solo(store, device="cpu")
    solo.admit(0, dataclasses.replace(spec, numerics=numerics))
    assert {p.dtype for p in solo.model.parameters()} == {torch.float32}
    ((_, result, curve),) = solo.advance(30)
    assert result.status == "finished"
    assert 1e-5 < distance((result, curve), train(spec, store)) < 0.02


def compiled(spec, **numerics):
    return dataclasses.replace(
        spec, numerics=dataclasses.replace(spec.numerics, compiled=True, **numerics)
    )


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_compiled_it_is_the_same_function(store, fresh_compiler):
    spec = spec_of(store, shape=DEEP.at_depth(1), num_steps=4)
    assert (
        distance(train(compiled(spec), store, compile_backend="eager"), train(spec, store)) < 1e-5
    )


def test_a_model_that_is_another_at_every_step_is_never_run_uncompiled_in_silence(
    store, fresh_compiler
):
    class Counting(Theirs):
        steps = 0

        def forward(self, ids):
            self.steps += 1
            return super().forward(ids) * (1 + self.steps / 100)

    def build(spec):
        built = theirs(spec)
        built.module.__class__ = Counting
        return built

    spec = dataclasses.replace(spec_of(store, compiled=True), factory=FACTORY)
    with pytest.raises(Exception, match="recompile_limit"):
        train(spec, store, build=build, compile_backend="eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", [WARMING, Schedule(kind="cosine", num_steps=12)], ids=["warming", "steady"]
)
@pytest.mark.parametrize(
    "options", [{}, {"activation_checkpointing": True}, {"microbatch_tokens": 16}], ids=str
)
def test_compiled_for_the_device_it_is_the_same_function(store, fresh_compiler, options, schedule):
    spec = spec_of(store, schedule=schedule)
    assert distance(train(compiled(spec, **options), store), train(spec, store)) < 1e-5


def test_a_warming_batch_is_the_loop_written_by_hand(store):
    spec = spec_of(store, dtype="float64", schedule=WARMING)
    counts = [WARMING.sequences(step, 4)[1] for step in range(10)]
    assert counts == [1, 1, 2, 2, 3, 4, 4, 4, 4, 4]
    result, curve = train(spec, store)
    losses, norms, validation_nats = by_hand(spec, store)
    assert curve.train_loss_nats == pytest.approx(losses, abs=1e-9)
    assert curve.grad_norm == pytest.approx(norms, rel=1e-9)
    assert result.loss_nats == pytest.approx(validation_nats, abs=1e-9)
    assert (result.tokens, result.num_steps) == (sum(counts) * 16, 10) == (spec.num_tokens, 10)
    parts = dataclasses.replace(spec.numerics, microbatch_tokens=16)
    assert (
        distance(train(dataclasses.replace(spec, numerics=parts), store), (result, curve)) < 1e-12
    )


@pytest.mark.parametrize(
    ("learning_rate", "said"), [(1e3, "above 6.545 nats"), (1e30, "not finite at step")]
)
def test_a_diverging_run_is_data(store, learning_rate, said):
    spec = spec_of(
        store, learning_rate=learning_rate, clip_norm=None, weight_decay=0.0, num_steps=20
    )
    result, curve = train(spec, store)
    assert (result.status, result.loss_nats) == ("diverged", None) and said in result.reason
    assert result.num_steps == len(curve.steps) < 20
    assert result.tokens == result.num_steps * spec.batch_tokens
    theirs, _ = in_bank(spec, store)
    assert (theirs.num_steps, said in theirs.reason) == (result.num_steps, True)
    assert canon.content_id(result)  # holds no NaN


def test_nan_at_a_step_is_named_and_never_stepped_on(store):
    spec = spec_of(store)
    solo = Solo(store, device="cpu")
    solo.admit(0, spec)
    assert solo.advance(4) == []
    held, model = (
        {name: p.detach().clone() for name, p in solo.model.named_parameters()},
        solo.model,
    )
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    ((_, result, curve),) = solo.advance(8)
    assert (result.status, result.reason) == ("diverged", "loss or gradient not finite at step 5")
    assert (result.num_steps, curve.steps) == (4, (1, 2, 3, 4))
    assert all(
        torch.equal(p, held[name]) for name, p in model.named_parameters() if name != "norm.weight"
    )


def test_runs_that_are_not_for_it_are_refused_all_at_once(store):
    shape, base = (dataclasses.replace(each, vocab_size=100) for each in (DEEP, BASE))
    other = dataclasses.replace(spec_of(store), data_id="f" * 64, shape=shape, base_shape=base)
    with pytest.raises(
        ValueError, match=r"slot 1 .*uses another corpus; vocab_size = 100 is smaller"
    ):
        Solo(store, device="cpu").admit(1, other)


def test_a_users_model_is_trained_like_ours(store):
    """Ours through the factory's door is ours; another one learns."""
    spec = spec_of(store)
    own = dataclasses.replace(spec, factory=FACTORY)
    assert train(own, store, build=our_model)[1] == train(spec, store, build=theirs)[1]
    result, curve = train(own, store, build=theirs)
    assert result.id == own.id and curve.train_loss_nats[-1] < curve.train_loss_nats[0] - 0.1


def test_a_users_model_that_does_not_fit_is_refused(store):
    spec = dataclasses.replace(spec_of(store), factory=FACTORY)

    def without_numbers(spec):
        built = theirs(spec)
        return Built(built.module, built.numbers[1:])

    with pytest.raises(ValueError, match=r"their numbers differ in unused"):
        train(spec, store, build=without_numbers)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"microbatch_tokens": 16}, {"activation_checkpointing": True}, {"compiled": True}],
)
def test_a_gpu_trains_as_the_cpu(store, dtype, options):
    spec = spec_of(store, dtype=dtype, **options)
    plain = dataclasses.replace(
        spec, numerics=Numerics(dtype="float64" if dtype == "float64" else "float32")
    )
    near = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.05}[dtype]
    result, curve = train(spec, store, device="cuda")
    assert distance((result, curve), train(plain, store)) < near
    assert result.environment["device"] != "cpu"


@pytest.mark.gpu
def test_a_gpu_names_nan_and_warms_up_the_batch(store):
    spec = spec_of(store, schedule=WARMING)
    assert distance(train(spec, store, device="cuda"), train(spec, store)) < 1e-3
    wild = spec_of(store, learning_rate=1e30, clip_norm=None, weight_decay=0.0)
    assert "not finite at step" in train(wild, store, device="cuda")[0].reason


def test_engines_load_nothing_that_only_ranks_and_the_compiler_need():
    """Each takes half a second of processor time and more, and every worker pays it."""
    program = (
        "import sys; sys.path[:] = sys.argv[1].split(':'); import proxies.training.bank, "
        "proxies.training.solo; "
        "sys.exit(' '.join(sys.modules.keys() & {'torch.distributed.tensor', 'torch._dynamo', "
        "'sympy'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, ":".join(sys.path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.strip() == ""


def test_validation_takes_as_many_windows_as_are_asked_for(store):
    asked = (None, 3, 0)
    assert [len(validation_ids(store, TINY.seq_len, most)) for most in asked] == [16, 3, 1]
