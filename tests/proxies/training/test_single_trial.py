"""Tests of the engine of a single trial, against the same trial in a bank and a reference loop.

The reference is a training loop with torch.optim.AdamW, written here.
"""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from proxy_cases import TINY, BuiltModel, UserModule, build_user_module, make_run_spec
from torch import nn

from forerun._proxies.core import canon
from forerun._proxies.core.programs import Factory
from forerun._proxies.core.schedule import Schedule, compute_lr_multiplier
from forerun._proxies.core.spec import Numerics
from forerun._proxies.model.decoder import Decoder
from forerun._proxies.parametrization.parametrization import (
    compute_forward_numbers,
    compute_parameter_table,
    draw_initial_tensor,
)
from forerun._proxies.training import run_progress
from forerun._proxies.training.bank import Bank
from forerun._proxies.training.run_progress import read_validation_ids
from forerun._proxies.training.single_trial import SingleTrialEngine
from forerun._proxies.training.trainable_model import build_decoder

pytestmark = [
    pytest.mark.usefixtures("few_windows"),
    # torch's compiler itself causes this warning.
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]

MANY_STEPS = 10**6
"""More steps than any run has: the engine trains until a run ends."""
BASE = TINY.at_depth(2)
DEEP = TINY.at_width(32).at_depth(4)
"""Shape of the runs, at twice the width and depth of `BASE`."""
FACTORY = Factory(target="user:build", source_sha256="0" * 64)
BATCH_WARMUP = Schedule(
    kind="cosine", num_steps=10, warmup_steps=2, batch_warmup_steps=5, batch_warmup_stages=4
)


def make_spec(store, name="mup", **changes):
    """Return a run with twice its base's width and depth.

    Under Complete(d)P it also has twice the base's batch and 4/3 of its tokens.
    """
    base_tokens = {"base_batch_tokens": 32, "base_num_tokens": 576} if name == "completedp" else {}
    common = {
        "shape": DEEP,
        "base_shape": BASE,
        "num_slots": 1,
        "weight_decay": 0.1,
        "clip_norm": 0.5,
        "seed": 3,
    }
    return make_run_spec(
        store.manifest.data_id, parametrization=name, **{**common, **base_tokens, **changes}
    )


def change_numerics(spec, **changes):
    """Return the spec with other numerics."""
    return dataclasses.replace(spec, numerics=dataclasses.replace(spec.numerics, **changes))


def train(spec, store, **options):
    """Train a run on the engine of a single trial; return its (result, curve)."""
    engine = SingleTrialEngine(store, **{"device": "cpu", **options})
    engine.admit(0, spec)
    ((slot, result, curve),) = engine.advance(MANY_STEPS)
    assert (slot, engine.steps, result.id) == (0, {}, spec.id)
    return result, curve


def train_in_bank(spec, store):
    """Train the same trial in a bank whose other slots are free."""
    spec = change_numerics(spec, num_slots=4)
    bank = Bank(spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="adamw")
    bank.admit(3, spec)
    ((_, result, curve),) = bank.advance(MANY_STEPS)
    return result, curve


def train_reference(spec, store):
    """Train a run with torch.optim.AdamW in float64; return losses, norms and validation loss."""
    # Model and optimizer, with one group per parameter
    model, table = Decoder(spec.shape).double(), compute_parameter_table(spec)
    multipliers = compute_forward_numbers(spec)
    parameters, groups = dict(model.named_parameters()), []
    for numbers in table:
        parameter = parameters[numbers.name]
        parameter.data.copy_(draw_initial_tensor(numbers, spec.seed))
        groups.append(
            {
                "params": [parameter],
                "lr": 0.0,
                "weight_decay": numbers.weight_decay,
                "eps": numbers.settings["eps"],
                "betas": (numbers.settings["beta1"], numbers.settings["beta2"]),
            }
        )
    adamw = torch.optim.AdamW(groups)

    def compute_loss(ids):
        return nn.functional.cross_entropy(model(ids[:, :-1], multipliers), ids[:, 1:].flatten())

    losses, norms, first_sequence = [], [], 0
    for step in range(spec.schedule.num_steps):
        # Loss and gradients of the next sequences
        count = int(spec.schedule.compute_batch_share(step) * spec.batch_sequences)
        batch = store.read_train_batch(
            seed=spec.seed,
            first_sequence=first_sequence,
            num_sequences=count,
            seq_len=spec.shape.seq_len,
        )
        first_sequence += count
        loss = compute_loss(torch.from_numpy(batch))
        adamw.zero_grad()
        loss.backward()
        # Clipping, then the update
        norm = nn.utils.clip_grad_norm_(model.parameters(), spec.hparams.clip_norm or math.inf)
        for group, numbers in zip(adamw.param_groups, table, strict=True):
            group["lr"] = numbers.learning_rate * compute_lr_multiplier(spec.schedule, step)
        adamw.step()
        losses.append(loss.item())
        norms.append(norm.item())
    with torch.no_grad():
        validation_loss = compute_loss(read_validation_ids(store, spec.shape.seq_len))
    return losses, norms, validation_loss.item()


def check_matches_reference(outcome, reference):
    """Assert that losses and norms of an outcome are those of the reference loop."""
    (result, curve), (losses, norms, validation_nats) = outcome, reference
    assert curve.train_loss_nats == pytest.approx(losses, abs=1e-9)
    assert curve.grad_norm == pytest.approx(norms, rel=1e-9)
    assert result.loss_nats == pytest.approx(validation_nats, abs=1e-9)


def measure_distance(outcome, expected_outcome):
    """Return the largest difference of the losses of two outcomes, in nats."""
    (result, curve), (expected_result, expected_curve) = outcome, expected_outcome
    losses = [*curve.train_loss_nats, result.loss_nats]
    expected_losses = [*expected_curve.train_loss_nats, expected_result.loss_nats]
    return max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))


@pytest.mark.parametrize("name", ["sp", "completedp", "umup"])
def test_single_trial_matches_the_reference_loop_and_the_bank(store, name):
    spec = make_spec(store, name, dtype="float64")
    assert spec.ratios.width == spec.ratios.depth == 2
    token_ratios = (2, 4 / 3) if name == "completedp" else (1, 1)
    assert (spec.ratios.batch, spec.ratios.duration) == token_ratios
    outcome, reference = train(spec, store), train_reference(spec, store)
    check_matches_reference(outcome, reference)
    assert measure_distance(outcome, train_in_bank(spec, store)) < 1e-12
    # The model learns, and gradients are clipped.
    losses, norms, _ = reference
    assert losses[-1] < losses[0] - 0.1 and max(norms) > spec.hparams.clip_norm


@pytest.mark.parametrize("name", ["eps", "clip_norm"])
def test_changed_hyperparameter_is_noticed(store, name):
    """The comparisons above can fail: they notice a changed hyperparameter."""
    spec = make_spec(store, "completep", dtype="float64", eps=1e-3)
    value = getattr(spec.hparams, name) * 0.5
    hparams = dataclasses.replace(spec.hparams, **{name: value})
    changed = dataclasses.replace(spec, hparams=hparams)
    assert measure_distance(train(spec, store), train(changed, store)) > 1e-5


def test_microbatches_give_the_same_losses_and_gradients(store):
    spec = make_spec(store, dtype="float64")
    micro_spec = change_numerics(spec, microbatch_tokens=spec.batch_tokens // 4)
    micro_outcome, outcome = train(micro_spec, store), train(spec, store)
    assert measure_distance(micro_outcome, outcome) < 1e-12
    assert micro_outcome[1].grad_norm == pytest.approx(outcome[1].grad_norm, rel=1e-12)


def test_activation_checkpointing_recomputes_blocks_with_the_same_results(store, monkeypatch):
    spec, num_calls = make_spec(store), 0
    real_silu = nn.functional.silu

    def count_call(x):
        nonlocal num_calls
        num_calls += 1
        return real_silu(x)

    monkeypatch.setattr(nn.functional, "silu", count_call)
    outcome = train(spec, store)
    num_calls_without, num_calls = num_calls, 0
    recomputed = train(change_numerics(spec, activation_checkpointing=True), store)
    assert measure_distance(recomputed, outcome) == 0
    assert recomputed[1].grad_norm == outcome[1].grad_norm
    # One more call per block and step
    assert num_calls == num_calls_without + spec.schedule.num_steps * DEEP.num_layers


def test_bfloat16_keeps_weights_in_float32(store):
    """Small updates would be lost in bfloat16 weights. The losses stay close to float32."""
    spec = make_spec(store, num_steps=30)
    engine = SingleTrialEngine(store, device="cpu")
    engine.admit(0, change_numerics(spec, dtype="bfloat16"))
    assert {p.dtype for p in engine.model.parameters()} == {torch.float32}
    ((_, result, curve),) = engine.advance(30)
    assert result.status == "finished"
    assert 1e-5 < measure_distance((result, curve), train(spec, store)) < 0.02


@pytest.fixture
def fresh_compiler():
    """Reset torch's compiler, because earlier compilations count toward its limit."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_run_has_the_same_losses(store):
    spec = make_spec(store, shape=DEEP.at_depth(1), num_steps=4)
    compiled = train(change_numerics(spec, compiled=True), store, compile_backend="eager")
    assert measure_distance(compiled, train(spec, store)) < 1e-5


@pytest.mark.usefixtures("fresh_compiler")
def test_model_that_must_be_compiled_at_every_step_is_an_error(store):
    """Torch would run it without compiling after some steps."""

    class ChangingModule(UserModule):
        num_steps = 0

        def forward(self, ids):
            self.num_steps += 1
            return super().forward(ids) * (1 + self.num_steps / 100)

    def build(spec):
        model = build_user_module(spec)
        model.module.__class__ = ChangingModule
        return model

    spec = dataclasses.replace(make_spec(store, compiled=True), factory=FACTORY)
    with pytest.raises(Exception, match="recompile_limit"):
        train(spec, store, build=build, compile_backend="eager")


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    "schedule",
    [BATCH_WARMUP, Schedule(kind="cosine", num_steps=12)],
    ids=["batch warmup", "constant batch"],
)
@pytest.mark.parametrize(
    "options", [{}, {"activation_checkpointing": True}, {"microbatch_tokens": 16}], ids=str
)
def test_run_compiled_by_inductor_has_the_same_losses(store, options, schedule):
    spec = make_spec(store, schedule=schedule)
    compiled = train(change_numerics(spec, compiled=True, **options), store)
    assert measure_distance(compiled, train(spec, store)) < 1e-5


def test_batch_warmup_matches_the_reference_loop(store):
    spec = make_spec(store, dtype="float64", schedule=BATCH_WARMUP)
    counts = [BATCH_WARMUP.count_sequences(step, 4)[1] for step in range(10)]
    assert counts == [1, 1, 2, 2, 3, 4, 4, 4, 4, 4]
    result, curve = train(spec, store)
    check_matches_reference((result, curve), train_reference(spec, store))
    assert result.tokens == sum(counts) * DEEP.seq_len == spec.num_tokens
    assert result.num_steps == 10
    micro_outcome = train(change_numerics(spec, microbatch_tokens=16), store)
    assert measure_distance(micro_outcome, (result, curve)) < 1e-12


@pytest.mark.parametrize(
    ("learning_rate", "reason"),
    # A loss diverges at one nat above that of a random guess, ln 256.
    [(1e3, f"above {math.log(256) + 1:.3f} nats"), (1e30, "not finite at step")],
)
def test_divergence_is_a_result(store, learning_rate, reason):
    spec = make_spec(
        store, learning_rate=learning_rate, clip_norm=None, weight_decay=0.0, num_steps=20
    )
    result, curve = train(spec, store)
    assert (result.status, result.loss_nats) == ("diverged", None) and reason in result.reason
    assert result.num_steps == len(curve.steps) < 20
    assert result.tokens == result.num_steps * spec.batch_tokens
    bank_result, _ = train_in_bank(spec, store)
    assert bank_result.num_steps == result.num_steps and reason in bank_result.reason
    assert canon.compute_content_id(result), "a result with NaN would have no id"


def test_step_with_nan_is_named_and_changes_no_weight(store):
    spec = make_spec(store)
    engine = SingleTrialEngine(store, device="cpu")
    engine.admit(0, spec)
    assert engine.advance(4) == []
    model = engine.model  # the engine drops it at the end of the run
    weights_before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    ((_, result, curve),) = engine.advance(8)
    assert (result.status, result.reason) == ("diverged", "loss or gradient not finite at step 5")
    assert (result.num_steps, curve.steps) == (4, (1, 2, 3, 4))
    for name, parameter in model.named_parameters():
        if name != "norm.weight":
            assert torch.equal(parameter, weights_before[name])


def test_all_problems_of_a_run_are_named(store):
    shape = dataclasses.replace(DEEP, vocab_size=100)
    base_shape = dataclasses.replace(BASE, vocab_size=100)
    spec = dataclasses.replace(
        make_spec(store), data_id="f" * 64, shape=shape, base_shape=base_shape
    )
    with pytest.raises(
        ValueError, match=r"slot 1 .*uses another corpus; vocab_size = 100 is smaller"
    ):
        SingleTrialEngine(store, device="cpu").admit(1, spec)


def test_user_model_is_trained(store):
    """A model from a factory learns, and forerun's decoder from a factory has its usual curve."""
    spec = make_spec(store)
    user_spec = dataclasses.replace(spec, factory=FACTORY)
    # Without a factory in the spec, `build` is not used.
    _, curve = train(spec, store, build=build_user_module)
    assert train(user_spec, store, build=build_decoder)[1] == curve
    result, user_curve = train(user_spec, store, build=build_user_module)
    assert result.id == user_spec.id
    assert user_curve.train_loss_nats[-1] < user_curve.train_loss_nats[0] - 0.1


def test_user_model_without_numbers_of_a_parameter_is_refused(store):
    spec = dataclasses.replace(make_spec(store), factory=FACTORY)

    def build_without_numbers(spec):
        model = build_user_module(spec)
        return BuiltModel(model.module, model.numbers[1:])

    with pytest.raises(ValueError, match=r"their numbers differ in unused"):
        train(spec, store, build=build_without_numbers)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"microbatch_tokens": 16}, {"activation_checkpointing": True}, {"compiled": True}],
)
def test_training_on_a_gpu_matches_the_cpu(store, dtype, options):
    spec = make_spec(store, dtype=dtype, **options)
    cpu_dtype = "float64" if dtype == "float64" else "float32"
    cpu_spec = dataclasses.replace(spec, numerics=Numerics(dtype=cpu_dtype))
    tolerance = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 0.05}[dtype]
    result, curve = train(spec, store, device="cuda")
    assert measure_distance((result, curve), train(cpu_spec, store)) < tolerance
    assert result.environment["device"] != "cpu"


@pytest.mark.gpu
def test_batch_warmup_and_divergence_are_the_same_on_a_gpu(store):
    spec = make_spec(store, schedule=BATCH_WARMUP)
    assert measure_distance(train(spec, store, device="cuda"), train(spec, store)) < 1e-3
    diverging = make_spec(store, learning_rate=1e30, clip_norm=None, weight_decay=0.0)
    result, _ = train(diverging, store, device="cuda")
    assert "not finite at step" in result.reason


def test_engines_do_not_import_distributed_tensors_or_the_compiler():
    """Each such import takes at least half a second of CPU time in every worker."""
    program = (
        "import sys; sys.path[:] = sys.argv[1].split(':'); import forerun._proxies.training.bank, "
        "forerun._proxies.training.single_trial; "
        "print(*sys.modules.keys() & {'torch.distributed.tensor', 'torch._dynamo', 'sympy'})"
    )
    process = subprocess.run(
        [sys.executable, "-c", program, ":".join(sys.path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert process.stdout.strip() == ""


def test_number_of_validation_sequences_is_limited(store, monkeypatch):
    for max_sequences in (16, 3):
        monkeypatch.setattr(run_progress, "VALIDATION_SEQUENCES", max_sequences)
        assert len(read_validation_ids(store, TINY.seq_len)) == max_sequences
