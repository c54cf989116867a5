"""The negative anchors: known ways to lose transfer, each planted where it happens, and the guards
held up to them.
"""

import dataclasses
import math
from collections.abc import Callable

import planted
import torch
from planted import BASE, WIDTHS, planted_output, planted_table
from proxy_cases import run_spec

from proxies.core.rules import named
from proxies.core.schedule import Schedule
from proxies.model.bank_adamw import BankAdamW
from proxies.training import bank, solo, trainable_model
from proxies.training.bank import Bank
from transfer.question import Point, Question
from transfer.verdict.verdict import judge


@dataclasses.dataclass(frozen=True, kw_only=True)
class Anchor:
    """A mistake, and where the coordinate check reads it."""

    name: str
    says: str
    """What the check must name."""
    layer: str
    reads: str
    """The statistic that the mistake moves: `change`, `rate` (its own first update) or `start`
    (size at step 0)."""
    setting: dict = dataclasses.field(default_factory=dict)
    """Of the check, with and without the mistake."""
    wrong: dict = dataclasses.field(default_factory=dict)
    """Of the runs, with the mistake."""
    tied: bool = False
    plant: Callable = lambda patch: None

    def check(self, store, patch, *, mistaken):
        """The coordinate check with the mistake, or of the same set-up without it."""
        with patch.context() as here:
            if self.tied:
                here.setattr(planted, "BASE", dataclasses.replace(BASE, tied=True))
            if mistaken:
                self.plant(here)
            return planted.check(store, **{**self.setting, **(self.wrong if mistaken else {})})

    def number(self, found):
        """Slope of the statistic per doubling of width, with its interval: (slope, low, high)."""
        (layer,) = [layer for layer in found.layers if layer.layer == self.layer]
        slope = {"start": layer.start, "rate": layer.rate, "change": layer}[self.reads]
        return (slope.slope, *slope.interval)


def growing_tied_std(patch):
    """mup rescales a readout's initial weights by the root of the width ratio; tied, that is the
    embedding.
    """
    planted_table(patch, "embedding", init_std=lambda row, ratio: row.init_std * math.sqrt(ratio))


def overwritten_rates(patch, *, from_step=0):
    """A scheduler that sets one rate for all groups, from an optimizer step on: GPT-NeoX's first
    call comes when the scheduler is made, before any step. Planted in both engines.
    """
    real_rates, real_step = solo.set_rates, BankAdamW.step

    def set_rates(optimizer, rates, share):
        rates = list(rates)
        real_rates(optimizer, rates, share)
        done = max((int(state["step"]) for state in optimizer.state.values()), default=0)
        for group in optimizer.param_groups if done >= from_step else []:
            group["lr"] = max(rate.learning_rate for rate in rates) * share

    def step(self, lr_multiplier_K1, active_K1, grad_norm_K1):
        one = self.peak_lr_KS.amax(1, keepdim=True)
        self.peak_lr_KS = torch.where(self.updates_K1 >= from_step, one, self.peak_lr_KS)
        real_step(self, lr_multiplier_K1, active_K1, grad_norm_K1)

    patch.setattr(solo, "set_rates", set_rates)
    patch.setattr(BankAdamW, "step", step)


def unscaled_readout(patch):
    """In both engines."""
    planted_output(patch)
    patch.setattr(bank, "forward_numbers", trainable_model.forward_numbers)


def gradient_spike(patch, *, at_step, times):
    """Every run's gradient, once, so many times what it is."""
    real = BankAdamW.step

    def step(self, lr_multiplier_K1, active_K1, grad_norm_K1):
        self.gradients_KP.mul_(torch.where(self.updates_K1 == at_step, times, 1.0))
        real(self, lr_multiplier_K1, active_K1, grad_norm_K1)

    patch.setattr(BankAdamW, "step", step)


HIDDEN_RATE = "hidden matrices' learning rate does not shrink with width"
MUON = {rate: named("mup", muon_rate=rate) for rate in ("original", "match_rms_adamw")}
TARGETS_OWN = [BASE.at_width(16)] * 3 + [BASE.at_width(128)]
ANCHORS = (
    Anchor(
        name="attention at 1/sqrt(head_dim), head dim growing",
        says="attention logits blow up with the head dim: q . k is scaled by 1 / sqrt(head_dim)",
        layer="layers.0.attention_logits",
        reads="start",
        setting={"grow_head": True},
        wrong={"parametrization": named("mup", attention="inverse_sqrt_head_dim")},
    ),
    Anchor(
        name="readout unscaled",
        says="unscaled readout",
        layer="lm_head",
        reads="rate",
        plant=unscaled_readout,
    ),
    Anchor(
        name="each model its own base (silent SP)",
        says="hidden matrices' learning rate does not shrink with width",
        layer="layers.0.attention.wq",
        reads="rate",
        wrong={"bases": [BASE.at_width(width) for width in WIDTHS]},
    ),
    Anchor(
        name="proxies on base 16, target 128 on its own",
        says="hidden matrices' learning rate does not shrink with width",
        layer="layers.0.attention.wq",
        reads="rate",
        wrong={"bases": TARGETS_OWN},
    ),
    Anchor(
        name="tied embeddings with mup's growing std",
        says="the embedding's initial std grows with width",
        layer="tok_embeddings",
        reads="start",
        tied=True,
        plant=growing_tied_std,
    ),
    Anchor(
        name="Muon by match_rms_adamw",
        says="hidden matrices' learning rate grows with width",
        layer="layers.0.attention.wq",
        reads="rate",
        setting={"optimizer": "muon", "parametrization": MUON["original"]},
        wrong={"parametrization": MUON["match_rms_adamw"]},
    ),
    Anchor(
        name="scheduler overwrites group rates when it is made",
        says=HIDDEN_RATE,
        layer="layers.0.attention.wq",
        reads="rate",
        plant=overwritten_rates,
    ),
    Anchor(
        name="scheduler overwrites group rates after the first step",
        # found, and where; that it is the rate is not said
        says="(layers.0.attention.wq and 10 more)",
        layer="layers.0.attention.wq",
        reads="change",
        plant=lambda patch: overwritten_rates(patch, from_step=1),
    ),
)


def told(anchor, guard, number, seconds):
    """One row of the table: seen under `pytest -s`."""
    print(f"\n| {anchor} | {guard} | {number} | {seconds:.1f} s |", end="")


def slope_said(number):
    return "{:+.2f} [{:+.2f}, {:+.2f}]".format(*number)


SWEEP_BASE = dataclasses.replace(BASE, seq_len=32)
SWEEP_WIDTHS = (16, 32, 64)
SWEEP_RATES = tuple(float(octave) for octave in range(-9, -1))
SWEEP_STEPS = 100


def sweep(store, *, own_base=(), rates=None, num_seeds=4, clip_norm=1.0, **changes):
    """Real runs at every width and rate, a bank per width: one `Point` each. `own_base`: widths
    given themselves; `changes` of each run.
    """
    points = []
    for width in SWEEP_WIDTHS:
        shape = SWEEP_BASE.at_width(width)
        cells = [
            (rate, seed)
            for rate in (rates or {}).get(width, SWEEP_RATES)
            for seed in range(num_seeds)
        ]
        specs = [
            run_spec(
                store.manifest.data_id,
                shape=shape,
                base_shape=shape if width in own_base else SWEEP_BASE,
                learning_rate=2.0**rate,
                clip_norm=clip_norm,
                seed=seed,
                num_slots=len(cells),
                schedule=Schedule(
                    kind="cosine", num_steps=SWEEP_STEPS, warmup_steps=SWEEP_STEPS // 10
                ),
                batch_tokens=8 * shape.seq_len,
                **changes,
            )
            for rate, seed in cells
        ]
        engine = Bank(
            shape, specs[0].batch_tokens, specs[0].numerics, store, optimizer=specs[0].optimizer
        )
        for slot, spec in enumerate(specs):
            engine.admit(slot, spec)
        losses = {}
        while len(losses) < len(cells):
            losses |= {
                cells[slot]: result.loss_nats for slot, result, _ in engine.advance(SWEEP_STEPS)
            }
        points += [
            Point(size=width, log2_value=rate, loss_nats=losses[rate, seed], seed=seed)
            for rate, seed in cells
        ]
    return points


def verdict(points, *, target=128, **options):
    """On the base's rate at a larger width."""
    return judge(points, Question(target_size=target, base_size=SWEEP_WIDTHS[0], **options))


def verdict_said(found):
    """Outcome, drift per doubling, regret at the target: each with its interval where there
    is one.
    """
    parts = [found.outcome.replace("_", " ")]
    if found.drift is not None:
        parts.append(
            f"drift {slope_said((found.drift.value, found.drift.low, found.drift.high))} octaves a "
            "doubling"
        )
    if found.regret_nats is not None:
        cost = found.regret_nats
        parts.append(f"costs {cost.value:.4f} [{cost.low:.4f}, {cost.high:.4f}] nats")
    return ", ".join(parts)
