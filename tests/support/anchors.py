"""Negative anchors, which are known mistakes that break transfer over width, and sweeps with them.

Each anchor plants one mistake where it happens in practice, and names what the coordinate check
(which compares the sizes of activations over widths) must report. Tests in tests/anchors run the
checks with and without the mistake.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import coordinate_cases
import torch
from coordinate_cases import BASE, WIDTHS, plant_in_table, plant_unscaled_output
from proxy_cases import finish_runs, make_run_spec

from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.model.bank_adamw import BankAdamW
from forerun._proxies.training import bank, single_trial, trainable_model
from forerun._proxies.training.bank import Bank
from forerun._transfer.question import Point, Question
from forerun._transfer.verdict.verdict import judge


class Slope(NamedTuple):
    """A slope per doubling of width, with the ends of its interval."""

    estimate: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Anchor:
    """A mistake that breaks transfer, and the statistic in which the coordinate check sees it."""

    name: str
    expected_mistake: str
    """Text that one of the check's mistakes must contain."""
    layer: str
    """Layer in which the mistake shows."""
    statistic: str
    """Statistic that the mistake moves: `start` (size at step 0), `rate` (size of the layer's own
    first update) or `change` (total change after the last step)."""
    setting: dict = dataclasses.field(default_factory=dict)
    """Options of `run_check`, with and without the mistake."""
    mistaken_setting: dict = dataclasses.field(default_factory=dict)
    """Options of `run_check` that are the mistake."""
    tied: bool = False
    """Whether the models tie their embeddings."""
    plant: Callable = lambda patch: None
    """Function that patches the mistake into the code."""

    def run_check(self, store, patch, *, is_mistaken):
        """Run the coordinate check with the mistake, or the same setup without it."""
        options = {**self.setting, **(self.mistaken_setting if is_mistaken else {})}
        with patch.context() as context:
            if self.tied:
                context.setattr(coordinate_cases, "BASE", dataclasses.replace(BASE, tied=True))
            if is_mistaken:
                self.plant(context)
            return coordinate_cases.run_check(store, **options)

    def read_slope(self, check):
        """Return the growth of the statistic per doubling of width, with its interval."""
        (layer,) = [layer for layer in check.layers if layer.layer == self.layer]
        # A layer's own slope is that of its total change.
        statistics = {"start": layer.start, "rate": layer.rate, "change": layer}
        statistic = statistics[self.statistic]
        low, high = statistic.interval
        return Slope(statistic.slope, low, high)


def plant_growing_tied_std(patch):
    """Let the std of a tied embedding grow with the square root of the width ratio.

    The mup package rescales a readout's initial weights in this way. In a tied model these weights
    are the embedding.
    """
    plant_in_table(patch, "embedding", init_std=lambda row, ratio: row.init_std * math.sqrt(ratio))


def plant_overwritten_rates(patch, *, from_step=0):
    """Give all parameter groups the largest rate from one optimizer step on, in both engines.

    This is a mistake of GPT-NeoX: its scheduler overwrites the rates when it is constructed, before
    any step.
    """
    real_rates, real_step = single_trial.set_rates, BankAdamW.step

    def set_rates(optimizer, rates, share):
        rates = list(rates)
        real_rates(optimizer, rates, share)
        num_steps = max((int(state["step"]) for state in optimizer.state.values()), default=0)
        if num_steps >= from_step:
            for group in optimizer.param_groups:
                group["lr"] = max(rate.learning_rate for rate in rates) * share

    def step(self, lr_multiplier_K1, active_K1, grad_norm_K1):
        largest_K1 = self.peak_lr_KS.amax(1, keepdim=True)
        self.peak_lr_KS = torch.where(self.updates_K1 >= from_step, largest_K1, self.peak_lr_KS)
        real_step(self, lr_multiplier_K1, active_K1, grad_norm_K1)

    patch.setattr(single_trial, "set_rates", set_rates)
    patch.setattr(BankAdamW, "step", step)


def plant_unscaled_readout(patch):
    """Leave the readout without its width multiplier, in both engines."""
    plant_unscaled_output(patch)
    patch.setattr(bank, "compute_forward_numbers", trainable_model.compute_forward_numbers)


def plant_gradient_spike(patch, *, at_step, times):
    """Multiply the gradient of every run by `times` at one step."""
    real_step = BankAdamW.step

    def step(self, lr_multiplier_K1, active_K1, grad_norm_K1):
        self.gradients_KP.mul_(torch.where(self.updates_K1 == at_step, times, 1.0))
        real_step(self, lr_multiplier_K1, active_K1, grad_norm_K1)

    patch.setattr(BankAdamW, "step", step)


HIDDEN_RATE = "hidden matrices' learning rate does not shrink with width"
MUON = {
    rate: get_parametrization("mup", muon_rate=rate) for rate in ("original", "match_rms_adamw")
}
BASES_WITH_ANOTHER_FOR_TARGET = [BASE.at_width(WIDTHS[0])] * (len(WIDTHS) - 1) + [
    BASE.at_width(WIDTHS[-1])
]
"""Base shape of each width: the proxies share a base, and the target is its own base."""
ANCHORS = (
    Anchor(
        name="attention at 1/sqrt(head_dim), head dim growing",
        expected_mistake="attention logits blow up with the head dim: q . k is scaled by 1 / "
        "sqrt(head_dim)",
        layer="layers.0.attention_logits",
        statistic="start",
        setting={"grow_head": True},
        mistaken_setting={
            "parametrization": get_parametrization("mup", attention="inverse_sqrt_head_dim")
        },
    ),
    Anchor(
        name="readout unscaled",
        expected_mistake="unscaled readout",
        layer="lm_head",
        statistic="rate",
        plant=plant_unscaled_readout,
    ),
    Anchor(
        name="each model its own base (silent SP)",
        expected_mistake=HIDDEN_RATE,
        layer="layers.0.attention.wq",
        statistic="rate",
        mistaken_setting={"bases": [BASE.at_width(width) for width in WIDTHS]},
    ),
    Anchor(
        name="proxies on base 16, target 128 on its own",
        expected_mistake=HIDDEN_RATE,
        layer="layers.0.attention.wq",
        statistic="rate",
        mistaken_setting={"bases": BASES_WITH_ANOTHER_FOR_TARGET},
    ),
    Anchor(
        name="tied embeddings with mup's growing std",
        expected_mistake="the embedding's initial std grows with width",
        layer="tok_embeddings",
        statistic="start",
        tied=True,
        plant=plant_growing_tied_std,
    ),
    Anchor(
        name="Muon by match_rms_adamw",
        expected_mistake="hidden matrices' learning rate grows with width",
        layer="layers.0.attention.wq",
        statistic="rate",
        setting={"optimizer": "muon", "parametrization": MUON["original"]},
        mistaken_setting={"parametrization": MUON["match_rms_adamw"]},
    ),
    Anchor(
        name="scheduler overwrites group rates when it is made",
        expected_mistake=HIDDEN_RATE,
        layer="layers.0.attention.wq",
        statistic="rate",
        plant=plant_overwritten_rates,
    ),
    Anchor(
        name="scheduler overwrites group rates after the first step",
        # The check sees the change and its place, but cannot tell that the rate is the cause.
        expected_mistake="(layers.0.attention.wq and 10 more)",
        layer="layers.0.attention.wq",
        statistic="change",
        plant=lambda patch: plant_overwritten_rates(patch, from_step=1),
    ),
)


def print_row(anchor, guard, findings, seconds=0.0):
    """Print one row of docs/negative-anchors.md, visible under `pytest -s`."""
    print(f"\n| {anchor} | {guard} | {findings} | {seconds:.1f} s |", end="")


def format_slope(slope):
    """Return a slope and its interval as text."""
    return f"{slope.estimate:+.2f} [{slope.low:+.2f}, {slope.high:+.2f}]"


# ---- Sweeps of the learning rate ----


SWEEP_BASE = dataclasses.replace(BASE, seq_len=32)
SWEEP_WIDTHS = (16, 32, 64)
"""Widths of a sweep; the first is the width of `SWEEP_BASE`."""
SWEEP_RATES = tuple(float(octave) for octave in range(-9, -1))
"""Base-2 logarithms of the learning rates of a sweep."""
SWEEP_STEPS = 100
"""Optimizer steps of each run of a sweep."""


def sweep_rates(store, *, own_base=(), rates=None, num_seeds=4, clip_norm=1.0, **changes):
    """Train every width, rate and seed, one bank per width, and return a `Point` for each run.

    Args:
        own_base: Widths at which each model is its own base shape, which is a mistake.
        rates: Base-2 logarithms of the rates by width; `SWEEP_RATES` where absent.
        changes: Other fields of each run's spec.
    """
    points = []
    for width in SWEEP_WIDTHS:
        shape = SWEEP_BASE.at_width(width)
        rates_and_seeds = [
            (rate, seed)
            for rate in (rates or {}).get(width, SWEEP_RATES)
            for seed in range(num_seeds)
        ]
        specs = [
            make_run_spec(
                store.manifest.data_id,
                shape=shape,
                base_shape=shape if width in own_base else SWEEP_BASE,
                learning_rate=2.0**rate,
                clip_norm=clip_norm,
                seed=seed,
                num_slots=len(rates_and_seeds),
                schedule=Schedule(
                    kind="cosine", num_steps=SWEEP_STEPS, warmup_steps=SWEEP_STEPS // 10
                ),
                batch_tokens=8 * shape.seq_len,
                **changes,
            )
            for rate, seed in rates_and_seeds
        ]
        engine = Bank(
            shape, specs[0].batch_tokens, specs[0].numerics, store, optimizer=specs[0].optimizer
        )
        for slot, spec in enumerate(specs):
            engine.admit(slot, spec)
        outcomes = finish_runs(engine)
        for (rate, seed), spec in zip(rates_and_seeds, specs, strict=True):
            result, _ = outcomes[spec.id]
            points.append(Point(size=width, log2_value=rate, loss_nats=result.loss_nats, seed=seed))
    return points


def judge_points(points, *, target=128, **options):
    """Return the verdict on the base's best rate at a larger width."""
    return judge(points, Question(target_size=target, base_size=SWEEP_WIDTHS[0], **options))


def format_verdict(verdict):
    """Return the outcome, the drift per doubling and the regret at the target as text."""
    parts = [verdict.outcome.replace("_", " ")]
    if verdict.drift is not None:
        drift = format_slope(verdict.drift)
        parts.append(f"drift {drift} octaves a doubling")
    if verdict.regret_nats is not None:
        regret = verdict.regret_nats
        parts.append(f"regret {regret.estimate:.4f} [{regret.low:.4f}, {regret.high:.4f}] nats")
    return ", ".join(parts)
