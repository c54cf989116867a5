"""Muon: torch's own step by step, the same in a bank as alone, its rate by the matrix's shape as
each source says.
"""

import dataclasses
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import muon_ranks
import pytest
import torch
from proxy_cases import TINY, run_spec
from torch.optim._muon import _adjust_lr

from proxies.core import canon
from proxies.core.muon import SHAPE_RULES, iteration_flops, shape_factor
from proxies.core.optimizers import optimizer_flops
from proxies.core.powers import Ratios
from proxies.core.rules import named, scaling
from proxies.core.spec import Numerics
from proxies.model import bank_muon
from proxies.model.muon import Muon, orthogonalized
from proxies.model.optimizer import IMPLEMENTATIONS
from proxies.parametrization.parametrization import parameter_table
from proxies.training.bank import Bank
from proxies.training.solo import Solo

WIDE = TINY.at_width(32).at_depth(2)
RATES = [*SHAPE_RULES]


def spec_of(store, *, muon_rate="original", rules=None, **changes):
    common = {
        "shape": WIDE,
        "base_shape": TINY,
        "weight_decay": 0.1,
        "adamw_learning_rate": 0.004,
        "num_slots": 1,
    }
    rules = named("mup", muon_rate=muon_rate, **(rules or {}))
    return run_spec(
        store.manifest.data_id, optimizer="muon", parametrization=rules, **{**common, **changes}
    )


def train(engine, spec):
    engine.admit(0, spec)
    ((_, result, curve),) = engine.advance(10**6)
    return result, curve


def alone(spec, store):
    return train(Solo(store, device="cpu"), spec)


class Pair:
    """The same parameters under our optimizer and under torch's two."""

    def __init__(self, adjust, momentum=0.9, decay=0.3, device="cpu"):
        generator = torch.Generator(device).manual_seed(3)
        shapes = [(24, 8), (8, 24), (16, 16), (16, 16), (5,), (7, 3)]
        drawn = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
        self.ours, self.theirs = ([torch.nn.Parameter(d.clone()) for d in drawn] for _ in range(2))
        self.rate, self.decay, self.generator = 0.05, decay, generator
        by_muon = {"momentum": momentum}
        matrices = [
            self._group([one], shape_factor(adjust, tuple(one.shape)), by_muon)
            for one in self.ours[:4]
        ]
        rest = self._group(self.ours[4:], 1.0, {"betas": (0.9, 0.95), "eps": 1e-8})
        self.optimizer = Muon([*matrices, rest], dtype=torch.bfloat16)
        self.torch = [
            torch.optim.Muon(
                self.theirs[:4],
                lr=self.rate,
                weight_decay=decay,
                momentum=momentum,
                adjust_lr_fn=adjust,
            ),
            torch.optim.AdamW(
                self.theirs[4:], lr=self.rate, weight_decay=decay, betas=(0.9, 0.95), eps=1e-8
            ),
        ]

    def _group(self, parameters, factor, settings):
        return {
            "params": parameters,
            "lr": self.rate * factor,
            "weight_decay": self.decay / factor,
            **settings,
        }

    def distance_after(self, num_steps):
        for _ in range(num_steps):
            for one, other in zip(self.ours, self.theirs, strict=True):
                one.grad = torch.randn(
                    one.shape, generator=self.generator, dtype=one.dtype, device=one.device
                )
                other.grad = one.grad.clone()
            self.optimizer.step()
            for each in self.torch:
                each.step()
        return max(
            float((a - b).detach().abs().max()) for a, b in zip(self.ours, self.theirs, strict=True)
        )


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_with_the_iteration_in_bfloat16_it_is_torchs_own_step_by_step(adjust):
    assert Pair(adjust).distance_after(20) < 1e-6


def test_the_comparison_with_torch_can_fail(monkeypatch):
    real = Muon._averaged
    monkeypatch.setattr(
        Muon, "_averaged", lambda self, p, momentum: real(self, p, momentum).lerp(p.grad, 0.1)
    )
    assert Pair("original").distance_after(3) > 1e-3


def test_torchs_factors_are_ours():
    for size in ((24, 8), (8, 24), (16, 16)):
        for rate in ("original", "match_rms_adamw"):
            assert shape_factor(rate, size) == pytest.approx(
                _adjust_lr(1.0, rate, torch.Size(size)), rel=1e-15
            )


@pytest.mark.parametrize("size", [(32, 32), (96, 32), (32, 96), (128, 128)])
def test_in_float32_the_iteration_is_a_float64_one(size):
    matrices = torch.randn(3, *size, generator=torch.Generator().manual_seed(1))
    single = orthogonalized(matrices, torch.float32)
    assert float((single - orthogonalized(matrices.double(), torch.float64)).abs().max()) < 1e-6
    values = torch.linalg.svdvals(single)
    assert 1.0 < float(values.max()) < 1.25
    assert float(values.median()) > 0.65
    others = torch.cat([matrices[:1], 7 * matrices[1:]])  # whoever is beside it
    assert torch.equal(single[0], orthogonalized(others, torch.float32)[0])
    assert not orthogonalized(torch.zeros(1, *size), torch.float32).any()


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("rate", ["original", "match_rms_adamw"])
def test_in_a_bank_it_is_the_trial_alone(store, monkeypatch, rate, by_row):
    built = dataclasses.replace(
        IMPLEMENTATIONS["muon"], bank=partial(bank_muon.BankMuon, by_row=by_row)
    )
    monkeypatch.setitem(IMPLEMENTATIONS, "muon", built)
    spec = spec_of(store, muon_rate=rate, dtype="float64", clip_norm=0.5)
    banked = dataclasses.replace(spec, numerics=Numerics(num_slots=4, dtype="float64"))
    bank = Bank(
        spec.shape, spec.batch_tokens, banked.numerics, store, optimizer="muon", device="cpu"
    )
    result, curve = train(bank, banked)
    reference, its_curve = alone(spec, store)
    assert curve.train_loss_nats == pytest.approx(its_curve.train_loss_nats, abs=1e-9)
    assert result.loss_nats == pytest.approx(reference.loss_nats, abs=1e-9)
    assert result.loss_nats < curve.train_loss_nats[0] - 0.3


@pytest.mark.parametrize("by_row", [True, False])
def test_a_slots_curve_is_bitwise_the_same_beside_a_diverging_one(store, monkeypatch, by_row):
    built = dataclasses.replace(
        IMPLEMENTATIONS["muon"], bank=partial(bank_muon.BankMuon, by_row=by_row)
    )
    monkeypatch.setitem(IMPLEMENTATIONS, "muon", built)
    numerics = Numerics(num_slots=3)
    spec = dataclasses.replace(spec_of(store), numerics=numerics)
    wild = dataclasses.replace(
        spec_of(store, learning_rate=1e30, adamw_learning_rate=1e30, clip_norm=None, seed=5),
        numerics=numerics,
    )

    def curve(neighbours):
        bank = Bank(spec.shape, spec.batch_tokens, numerics, store, optimizer="muon", device="cpu")
        bank.admit(1, spec)
        for slot, other in neighbours.items():
            bank.admit(slot, other)
        ended = {}
        while spec.id not in ended:
            ended |= {result.id: (result.status, curve) for _, result, curve in bank.advance(100)}
        return ended

    beside = curve({0: wild, 2: dataclasses.replace(spec, seed=9)})
    assert beside[wild.id][0] == "diverged"
    assert beside[spec.id] == curve({})[spec.id]


@pytest.mark.parametrize("engine", ["bank", "alone"])
def test_from_a_saved_state_it_goes_on_bit_by_bit(store, engine):
    spec = spec_of(store)

    def opened():
        if engine == "alone":
            return Solo(store, device="cpu")
        return Bank(
            spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="muon", device="cpu"
        )

    first, second = opened(), opened()
    first.admit(0, spec)
    first.advance(5)
    second.admit(0, spec, first.state(0))
    ((_, result, curve),) = second.advance(100)
    whole, its_curve = train(opened(), spec)
    assert (result.loss_nats, curve) == (whole.loss_nats, its_curve)


def hidden(table):
    return {n.name: n for n in table if n.optimizer == "muon"}


@pytest.mark.parametrize("rate", RATES)
def test_the_numbers_follow_the_rule_at_every_width(store, rate):
    """And the decay's share of a step is the base's."""
    tables = {
        w: parameter_table(spec_of(store, muon_rate=rate, shape=TINY.at_width(w))) for w in (16, 64)
    }
    for table in tables.values():
        for name, numbers in hidden(table).items():
            assert name.startswith("layers") and len(numbers.size) == 2
            assert numbers.learning_rate == pytest.approx(
                0.01 * shape_factor(rate, numbers.size), rel=1e-12
            )
            assert numbers.decay_share == pytest.approx(0.01 * 0.1, rel=1e-12)
            assert numbers.settings.keys() == {"learning_rate", "weight_decay", "momentum"}
        for numbers in table:
            if numbers.optimizer == "adamw":  # under muP those rates are the same at every width
                assert (numbers.learning_rate, numbers.weight_decay) == (0.004, 0.0)
    small, large = (
        hidden(tables[w])["layers.0.attention.wq.weight"].learning_rate for w in (16, 64)
    )
    assert large / small == pytest.approx(4 ** SHAPE_RULES[rate].width_power, rel=1e-12)


def test_against_original_the_rate_of_match_rms_adamw_doubles_every_four_widths():
    """So its optimum falls by half an octave a doubling; the control in standard form falls
    so too.
    """
    power = scaling(named("mup", muon_rate="match_rms_adamw"), "learning_rate").width
    assert power - scaling(named("mup", muon_rate="original"), "learning_rate").width == 0.5
    for rate in RATES:
        assert scaling(named("mup", muon_rate=rate).unscaled, "learning_rate").width == 0.5


@pytest.mark.parametrize("rate", RATES)
def test_at_the_base_shape_the_control_is_the_same_function(store, rate):
    spec = spec_of(store, muon_rate=rate, shape=TINY)
    table = parameter_table(
        dataclasses.replace(spec, parametrization=spec.parametrization.unscaled)
    )
    assert table == parameter_table(spec)


def test_depth_batch_and_duration_scale_it_as_the_parametrization_says():
    rules = named(
        "completep",
        muon_rate="original",
        depth_alpha=0.5,
        rate_batch_power=0.5,
        rate_duration_power=-0.32,
    )
    powers = scaling(rules, "learning_rate")
    assert powers.at(Ratios(depth=4.0)) == 0.5
    assert powers.at(Ratios(batch=4.0)) == 2.0
    assert powers.at(Ratios(duration=2.0)) == pytest.approx(2**-0.32)


@pytest.mark.parametrize("kind", ["independent", "scaled"])
def test_independent_decay_is_the_share_itself(store, kind):
    (numbers, *_) = hidden(parameter_table(spec_of(store, rules={"weight_decay": kind}))).values()
    assert numbers.decay_share == pytest.approx(0.1 if kind == "independent" else 0.001)


@pytest.mark.parametrize(
    ("optimizer", "rules"),
    [("adamw", {"muon_rate": "original"}), ("muon", {})],
    ids=["rule alone", "optimizer alone"],
)
def test_an_optimizer_and_a_rule_that_do_not_fit_are_refused(store, optimizer, rules):
    with pytest.raises(ValueError, match="muon_rate"):
        run_spec(store.manifest.data_id, optimizer=optimizer, parametrization=named("mup", **rules))


def test_choices_without_a_meaning_are_refused():
    with pytest.raises(ValueError, match="muon_width_power"):
        named("mup", muon_width_power=0.5)
    with pytest.raises(ValueError, match="root"):
        named("mup", muon_rate="original", weight_decay="root")


def test_a_mutant_in_the_bank_is_noticed(store, monkeypatch):
    real = bank_muon.orthogonalized
    spec = spec_of(store)

    def losses():
        bank = Bank(
            spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="muon", device="cpu"
        )
        return train(bank, spec)[1].train_loss_nats

    reference = alone(spec, store)[1].train_loss_nats
    assert losses() == pytest.approx(reference, abs=1e-3)
    monkeypatch.setattr(bank_muon, "orthogonalized", lambda m, dtype: real(m.roll(1, 0), dtype))
    assert max(abs(a - b) for a, b in zip(losses(), reference, strict=True)) > 1e-2


def test_its_flops_are_those_of_its_products():
    """Five iterations: x x^T, (x x^T)^2 and their product with x, 2 FLOPs a multiplication."""
    assert (
        iteration_flops((8, 24)) == iteration_flops((24, 8)) == 5 * (2 * 8 * 8 * 24 * 2 + 2 * 8**3)
    )
    per_block = sum(
        map(iteration_flops, [(16, 16), (8, 16), (8, 16), (16, 16), (32, 16), (32, 16), (16, 32)])
    )
    assert math.isclose(optimizer_flops("muon", TINY), per_block)
    assert optimizer_flops("adamw", TINY) == 0


def test_specs_without_it_keep_their_identity(store):
    """Ids of studies that began before there was a Muon
    (`tests/launcher/test_golden_ledger.py`).
    """
    plain = canon.to_json(run_spec(store.manifest.data_id))
    assert "muon_rate" not in plain["parametrization"]
    assert "momentum" not in plain["hparams"]


def test_sharded_over_three_ranks_it_is_the_whole_matrix(tmp_path):
    """Rows that the ranks do not divide, and fewer rows than ranks."""
    script, out = Path(__file__).with_name("muon_ranks.py"), tmp_path / "found.pt"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "3",
        script,
        out,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    for one, whole in zip(
        torch.load(out, weights_only=True), muon_ranks.stepped(lambda t: t), strict=True
    ):
        assert float((one - whole).abs().max()) < 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["bank", "alone"])
@pytest.mark.parametrize("mode", [{}, {"compiled": True}, {"cuda_graphs": True}], ids=str)
def test_a_gpu_trains_with_it_as_the_cpu(store, engine, mode):
    """Its iteration is bfloat16 there and float64 here, so losses agree as those of bfloat16 do."""
    if engine == "alone" and "cuda_graphs" in mode:
        pytest.skip("a bank of one slot records graphs")
    spec = dataclasses.replace(spec_of(store), numerics=Numerics(num_slots=1, **mode))
    if engine == "alone":
        gpu = Solo(store, device="cuda")
    else:
        gpu = Bank(
            spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="muon", device="cuda"
        )
    result, curve = train(gpu, spec)
    wanted, their_curve = alone(
        dataclasses.replace(spec, numerics=Numerics(dtype="float64")), store
    )
    assert result.loss_nats == pytest.approx(wanted.loss_nats, abs=0.05)
    assert curve.train_loss_nats == pytest.approx(their_curve.train_loss_nats, abs=0.05)
    assert wanted.loss_nats < their_curve.train_loss_nats[0] - 0.3


@pytest.mark.gpu
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_on_a_gpu_it_is_torchs_own_up_to_the_iterations_rounding(adjust):
    pair = Pair(adjust, device="cuda")
    assert pair.distance_after(20) < 20 * pair.rate * 2**-8 * 4
