"""Tests of Muon: its updates against torch's, and learning rates that follow a matrix's shape.

They cover the engine of a single trial, banks, states, sharded matrices, and GPUs. A bank trains
several trials as one batched model, each in its slot.
"""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import muon_ranks
import pytest
import torch
import torch.distributed as dist
from proxy_cases import TINY, finish_runs, make_run_spec, set_row_updates
from torch.optim._muon import _adjust_lr

from forerun._proxies.core import canon
from forerun._proxies.core.muon import SHAPE_RULES, compute_iteration_flops, compute_shape_factor
from forerun._proxies.core.optimizers import compute_optimizer_flops
from forerun._proxies.core.powers import Ratios
from forerun._proxies.core.rules import get_parametrization, get_scaling
from forerun._proxies.core.spec import Numerics
from forerun._proxies.model import bank_muon
from forerun._proxies.model.muon import Muon, orthogonalize
from forerun._proxies.parametrization.parametrization import compute_parameter_table
from forerun._proxies.training.bank import Bank
from forerun._proxies.training.single_trial import SingleTrialEngine

MANY_STEPS = 10**6
"""More steps than any run has: the engine trains until a run ends."""
WIDE = TINY.at_width(32).at_depth(2)
"""Shape of the runs, at twice the width and depth of their base."""
RATE_RULES = [*SHAPE_RULES]
"""Names of the rules by which a matrix's rate depends on its shape."""


def make_spec(store, *, muon_rate="original", rules=None, **changes):
    """Return the spec of a run with Muon.

    Args:
        muon_rate: Rule by which a matrix's rate depends on its shape.
        rules: Other options of the parametrization.
    """
    common = {
        "shape": WIDE,
        "base_shape": TINY,
        "weight_decay": 0.1,
        "adamw_learning_rate": 0.004,
        "num_slots": 1,
    }
    rules = get_parametrization("mup", muon_rate=muon_rate, **(rules or {}))
    return make_run_spec(
        store.manifest.data_id, optimizer="muon", parametrization=rules, **{**common, **changes}
    )


def train(engine, spec):
    """Train a run on an engine and return its (result, curve)."""
    engine.admit(0, spec)
    ((_, result, curve),) = engine.advance(MANY_STEPS)
    return result, curve


def train_single(spec, store):
    """Train a run on the engine of a single trial."""
    return train(SingleTrialEngine(store, device="cpu"), spec)


def build_bank(spec, store, device="cpu"):
    """Build the bank of a run."""
    return Bank(
        spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="muon", device=device
    )


class OptimizerPair:
    """Equal parameters under forerun's Muon and under torch's Muon and AdamW.

    Args:
        adjust: torch's name of the rule by which a matrix's rate depends on its shape.
    """

    def __init__(self, adjust, device="cpu"):
        self.rate, self.decay, momentum = 0.05, 0.3, 0.9
        self.generator = torch.Generator(device).manual_seed(3)
        shapes = [(24, 8), (8, 24), (16, 16), (16, 16), (5,), (7, 3)]
        initial = [torch.randn(shape, generator=self.generator, device=device) for shape in shapes]
        self.parameters = [torch.nn.Parameter(x.clone()) for x in initial]
        self.torch_parameters = [torch.nn.Parameter(x.clone()) for x in initial]

        # Muon trains the first four, AdamW the others.
        groups = []
        for matrix in self.parameters[:4]:
            factor = compute_shape_factor(adjust, tuple(matrix.shape))
            groups.append(self._make_group([matrix], factor, {"momentum": momentum}))
        adamw_settings = {"betas": (0.9, 0.95), "eps": 1e-8}
        groups.append(self._make_group(self.parameters[4:], 1.0, adamw_settings))
        self.optimizer = Muon(groups, dtype=torch.bfloat16)
        torch_muon = torch.optim.Muon(
            self.torch_parameters[:4],
            lr=self.rate,
            weight_decay=self.decay,
            momentum=momentum,
            adjust_lr_fn=adjust,
        )
        torch_adamw = torch.optim.AdamW(
            self.torch_parameters[4:], lr=self.rate, weight_decay=self.decay, **adamw_settings
        )
        self.torch_optimizers = [torch_muon, torch_adamw]

    def _make_group(self, parameters, factor, settings):
        return {
            "params": parameters,
            "lr": self.rate * factor,
            "weight_decay": self.decay / factor,
            **settings,
        }

    def measure_distance(self, num_steps):
        """Return the largest difference of parameters after steps with equal random gradients."""
        pairs = list(zip(self.parameters, self.torch_parameters, strict=True))
        for _ in range(num_steps):
            for parameter, torch_parameter in pairs:
                parameter.grad = torch.randn(
                    parameter.shape,
                    generator=self.generator,
                    dtype=parameter.dtype,
                    device=parameter.device,
                )
                torch_parameter.grad = parameter.grad.clone()
            self.optimizer.step()
            for optimizer in self.torch_optimizers:
                optimizer.step()
        return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_steps_with_the_iteration_in_bfloat16_match_torch(adjust):
    assert OptimizerPair(adjust).measure_distance(20) < 1e-6


def test_wrong_momentum_is_noticed_by_the_comparison_with_torch(monkeypatch):
    real_update = Muon._update_average

    def update_wrongly(self, parameter, momentum):
        return real_update(self, parameter, momentum).lerp(parameter.grad, 0.1)

    monkeypatch.setattr(Muon, "_update_average", update_wrongly)
    assert OptimizerPair("original").measure_distance(3) > 1e-3


def test_shape_factors_match_torch():
    for size in ((24, 8), (8, 24), (16, 16)):
        for rule in ("original", "match_rms_adamw"):
            torch_factor = _adjust_lr(1.0, rule, torch.Size(size))
            assert compute_shape_factor(rule, size) == pytest.approx(torch_factor, rel=1e-15)


@pytest.mark.parametrize("size", [(32, 32), (96, 32), (32, 96), (128, 128)])
def test_iteration_in_float32_is_accurate_and_independent_of_other_matrices(size):
    matrices = torch.randn(3, *size, generator=torch.Generator().manual_seed(1))
    single = orthogonalize(matrices, torch.float32)
    double = orthogonalize(matrices.double(), torch.float64)
    assert float((single - double).abs().max()) < 1e-6

    # The iteration moves singular values near one, but not to one.
    values = torch.linalg.svdvals(single)
    assert 1.0 < float(values.max()) < 1.25
    assert float(values.median()) > 0.65

    # The other matrices of the batch do not matter.
    other_batch = torch.cat([matrices[:1], 7 * matrices[1:]])
    assert torch.equal(single[0], orthogonalize(other_batch, torch.float32)[0])
    assert not orthogonalize(torch.zeros(1, *size), torch.float32).any()


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
def test_trial_in_a_bank_matches_the_single_trial(store, monkeypatch, rule, by_row):
    set_row_updates(monkeypatch, "muon", by_row=by_row)
    spec = make_spec(store, muon_rate=rule, dtype="float64", clip_norm=0.5)
    bank_spec = dataclasses.replace(spec, numerics=Numerics(num_slots=4, dtype="float64"))
    result, curve = train(build_bank(bank_spec, store), bank_spec)
    reference, reference_curve = train_single(spec, store)
    assert curve.train_loss_nats == pytest.approx(reference_curve.train_loss_nats, abs=1e-9)
    assert result.loss_nats == pytest.approx(reference.loss_nats, abs=1e-9)
    assert result.loss_nats < curve.train_loss_nats[0] - 0.3


@pytest.mark.parametrize("by_row", [True, False])
def test_curve_is_bitwise_the_same_with_a_diverging_neighbor(store, monkeypatch, by_row):
    set_row_updates(monkeypatch, "muon", by_row=by_row)
    numerics = Numerics(num_slots=3)
    spec = dataclasses.replace(make_spec(store), numerics=numerics)
    diverging = dataclasses.replace(
        make_spec(store, learning_rate=1e30, adamw_learning_rate=1e30, clip_norm=None, seed=5),
        numerics=numerics,
    )

    def train_among(neighbors):
        """Train the run among neighbors, given by slot; return (result, curve) by run id."""
        bank = build_bank(spec, store)
        bank.admit(1, spec)
        for slot, neighbor in neighbors.items():
            bank.admit(slot, neighbor)
        return finish_runs(bank, until=spec)

    outcomes = train_among({0: diverging, 2: dataclasses.replace(spec, seed=9)})
    assert outcomes[diverging.id][0].status == "diverged"
    assert outcomes[spec.id] == train_among({})[spec.id]


@pytest.mark.parametrize("engine", ["bank", "single"])
def test_run_resumed_from_a_state_is_the_same_bit_by_bit(store, engine):
    spec = make_spec(store)

    def build_engine():
        if engine == "single":
            return SingleTrialEngine(store, device="cpu")
        return build_bank(spec, store)

    interrupted, resumed = build_engine(), build_engine()
    interrupted.admit(0, spec)
    interrupted.advance(5)
    resumed.admit(0, spec, interrupted.get_state(0))
    ((_, result, curve),) = resumed.advance(MANY_STEPS)
    uninterrupted, uninterrupted_curve = train(build_engine(), spec)
    assert (result.loss_nats, curve) == (uninterrupted.loss_nats, uninterrupted_curve)


def select_muon_rows(table):
    """Return the rows of the parameters that Muon trains, by name."""
    return {numbers.name: numbers for numbers in table if numbers.optimizer == "muon"}


@pytest.mark.parametrize("rule", RATE_RULES)
def test_rates_follow_the_rule_at_every_width_and_decay_shares_stay(store, rule):
    """A decay share is the part of a weight that decays per step: rate times weight decay.

    The runs have the learning rate 0.01 and the weight decay 0.1.
    """
    tables = {}
    for width in (16, 64):
        spec = make_spec(store, muon_rate=rule, shape=TINY.at_width(width))
        tables[width] = compute_parameter_table(spec)
    for table in tables.values():
        for name, numbers in select_muon_rows(table).items():
            assert name.startswith("layers") and len(numbers.size) == 2
            assert numbers.learning_rate == pytest.approx(
                0.01 * compute_shape_factor(rule, numbers.size), rel=1e-12
            )
            assert numbers.decay_share == pytest.approx(0.01 * 0.1, rel=1e-12)
            assert numbers.settings.keys() == {"learning_rate", "weight_decay", "momentum"}
        for numbers in table:
            if numbers.optimizer == "adamw":  # under mup these rates are equal at every width
                assert (numbers.learning_rate, numbers.weight_decay) == (0.004, 0.0)
    name = "layers.0.attention.wq.weight"
    small, large = (select_muon_rows(tables[w])[name].learning_rate for w in (16, 64))
    assert large / small == pytest.approx((64 / 16) ** SHAPE_RULES[rule].width_power, rel=1e-12)


def test_match_rms_adamw_grows_by_a_square_root_of_width_against_original():
    """The optimum therefore falls by half an octave per doubling, as without any scaling."""

    def get_width_power(parametrization):
        return get_scaling(parametrization, "learning_rate").width

    power = get_width_power(get_parametrization("mup", muon_rate="match_rms_adamw"))
    original_power = get_width_power(get_parametrization("mup", muon_rate="original"))
    assert power - original_power == 0.5
    for rule in RATE_RULES:
        unscaled = get_parametrization("mup", muon_rate=rule).unscaled
        assert get_width_power(unscaled) == 0.5


@pytest.mark.parametrize("rule", RATE_RULES)
def test_unscaled_control_is_the_same_at_the_base_shape(store, rule):
    spec = make_spec(store, muon_rate=rule, shape=TINY)
    unscaled = dataclasses.replace(spec, parametrization=spec.parametrization.unscaled)
    assert compute_parameter_table(unscaled) == compute_parameter_table(spec)


def test_rate_scales_with_depth_batch_and_duration_by_the_parametrization():
    rules = get_parametrization(
        "completep",
        muon_rate="original",
        depth_alpha=0.5,
        rate_batch_power=0.5,
        rate_duration_power=-0.32,
    )
    powers = get_scaling(rules, "learning_rate")
    assert powers.evaluate(Ratios(depth=4.0)) == 0.5
    assert powers.evaluate(Ratios(batch=4.0)) == 2.0
    assert powers.evaluate(Ratios(duration=2.0)) == pytest.approx(2**-0.32)


@pytest.mark.parametrize("kind", ["independent", "scaled"])
def test_independent_decay_is_not_multiplied_by_the_rate(store, kind):
    table = compute_parameter_table(make_spec(store, rules={"weight_decay": kind}))
    (numbers, *_) = select_muon_rows(table).values()
    assert numbers.decay_share == pytest.approx(0.1 if kind == "independent" else 0.001)


@pytest.mark.parametrize(
    ("optimizer", "rules"),
    [("adamw", {"muon_rate": "original"}), ("muon", {})],
    ids=["rule without Muon", "Muon without rule"],
)
def test_muon_and_its_rule_are_refused_without_each_other(store, optimizer, rules):
    with pytest.raises(ValueError, match="muon_rate"):
        make_run_spec(
            store.manifest.data_id,
            optimizer=optimizer,
            parametrization=get_parametrization("mup", **rules),
        )


def test_options_without_effect_are_refused():
    with pytest.raises(ValueError, match="muon_width_power"):
        get_parametrization("mup", muon_width_power=0.5)
    with pytest.raises(ValueError, match="root"):
        get_parametrization("mup", muon_rate="original", weight_decay="root")


def test_mixed_up_matrices_in_the_bank_are_noticed(store, monkeypatch):
    """The comparison of a bank with a single trial can fail: it notices exchanged updates."""
    real_orthogonalize = bank_muon.orthogonalize
    spec = make_spec(store)

    def orthogonalize_mixed_up(matrices, dtype):
        return real_orthogonalize(matrices.roll(1, 0), dtype)

    def train_in_bank():
        return train(build_bank(spec, store), spec)[1].train_loss_nats

    reference = train_single(spec, store)[1].train_loss_nats
    assert train_in_bank() == pytest.approx(reference, abs=1e-3)
    monkeypatch.setattr(bank_muon, "orthogonalize", orthogonalize_mixed_up)
    differences = [abs(a - b) for a, b in zip(train_in_bank(), reference, strict=True)]
    assert max(differences) > 1e-2


def test_flops_are_those_of_the_matrix_products():
    """An iteration computes x x^T, (x x^T)^2 and the product of their sum with x.

    There are five iterations, and two FLOPs per multiplication.
    """
    iteration_flops = 5 * (2 * 8 * 8 * 24 * 2 + 2 * 8**3)
    assert compute_iteration_flops((8, 24)) == iteration_flops
    assert compute_iteration_flops((24, 8)) == iteration_flops
    # Queries, keys, values, attention's output, and the three matrices of the feed-forward
    block_sizes = [(16, 16), (8, 16), (8, 16), (16, 16), (32, 16), (32, 16), (16, 32)]
    block_flops = sum(compute_iteration_flops(size) for size in block_sizes)
    assert math.isclose(compute_optimizer_flops("muon", TINY), block_flops)
    assert compute_optimizer_flops("adamw", TINY) == 0


def test_fields_of_muon_are_not_part_of_other_specs(store):
    """Specs that were stored before Muon existed keep their ids.

    `tests/launcher/study/test_golden_ledger.py` pins such ids.
    """
    value = canon.to_json(make_run_spec(store.manifest.data_id))
    assert "muon_rate" not in value["parametrization"]
    assert "momentum" not in value["hparams"]


def test_sharded_training_on_two_ranks_matches_whole_matrices(tmp_path):
    """Some matrices have rows that two does not divide, and one has fewer rows than ranks.

    This process is rank 0, and another process is rank 1.
    """
    script = Path(muon_ranks.__file__)
    rank_1 = subprocess.Popen([sys.executable, script, tmp_path / "rendezvous"])
    try:
        sharded = muon_ranks.train_sharded_steps(0, tmp_path / "rendezvous")
        assert rank_1.wait(60) == 0
    finally:
        rank_1.kill()
        if dist.is_initialized():
            dist.destroy_process_group()
    unsharded = muon_ranks.train_steps(lambda tensor: tensor)
    for matrix, expected in zip(sharded, unsharded, strict=True):
        assert float((matrix - expected).abs().max()) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["bank", "single"])
@pytest.mark.parametrize("mode", [{}, {"compiled": True}, {"cuda_graphs": True}], ids=str)
def test_training_on_a_gpu_matches_the_cpu(store, engine, mode):
    """The iteration is bfloat16 on the GPU and float64 on the CPU, so losses differ slightly."""
    if engine == "single" and "cuda_graphs" in mode:
        pytest.skip("only a bank records CUDA graphs")
    spec = dataclasses.replace(make_spec(store), numerics=Numerics(num_slots=1, **mode))
    if engine == "single":
        gpu_engine = SingleTrialEngine(store, device="cuda")
    else:
        gpu_engine = build_bank(spec, store, device="cuda")
    result, curve = train(gpu_engine, spec)
    cpu_spec = dataclasses.replace(spec, numerics=Numerics(dtype="float64"))
    cpu_result, cpu_curve = train_single(cpu_spec, store)
    assert result.loss_nats == pytest.approx(cpu_result.loss_nats, abs=0.05)
    assert curve.train_loss_nats == pytest.approx(cpu_curve.train_loss_nats, abs=0.05)
    assert cpu_result.loss_nats < cpu_curve.train_loss_nats[0] - 0.3


@pytest.mark.gpu
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_steps_on_a_gpu_match_torch_within_the_rounding_of_the_iteration(adjust):
    pair = OptimizerPair(adjust, device="cuda")
    # Each of the 20 steps may differ by 4 units of the rounding of bfloat16, 2^-8.
    assert pair.measure_distance(20) < 20 * pair.rate * 2**-8 * 4
