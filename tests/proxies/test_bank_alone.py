"""A trial in a bank against the same trial alone: in float64 to 1e-9, in float32 within what one
ulp grows to.
"""

import dataclasses
from functools import partial

import pytest
from proxy_cases import TINY, run_spec, with_settings

from proxies.core.checks import SpecError
from proxies.model.bank_adamw import BankAdamW
from proxies.model.optimizer import IMPLEMENTATIONS
from proxies.training import bank as bank_module
from proxies.training.bank import Bank
from proxies.training.solo import Solo

pytestmark = pytest.mark.usefixtures("few_windows")

FAMILIES = {
    "llama": {},
    "gpt2": {"family": "gpt2"},
    "gpt2, all of it": {"family": "gpt2", "tied": True, "qk_norm": True, "num_kv_heads": 1},
}
NAMES = ("mup", "completep", "completedp", "umup")
TOKENS = {"base_batch_tokens": 32, "base_num_tokens": 576}


def runs(store, family, **changes):
    """One run of every parametrization that the family allows, twice as wide, deep and with twice
    the batch.
    """
    base = dataclasses.replace(TINY, **{"num_kv_heads": 2, **FAMILIES[family]})
    shape = base.at_width(32).at_depth(2)
    found = []
    for number, name in enumerate(NAMES):
        tokens = TOKENS if name == "completedp" else {}
        rates = {
            "learning_rate": 0.005 * (number + 1),
            "clip_norm": (0.5, 2.0, None, 0.1)[number],
            "weight_decay": 0.1 * number,
            "beta1": 0.9 - 0.2 * number,
            "beta2": 0.99 - 0.02 * number,
            "eps": 10.0 ** (number - 8),
            "output_multiplier": 2.0,
            "embedding_multiplier": 1.0 + 0.1 * number,
        }
        try:
            spec = run_spec(
                store.manifest.data_id,
                parametrization=name,
                shape=shape,
                base_shape=base,
                seed=number,
                num_slots=len(NAMES),
                **{**rates, **tokens, **changes},
            )
        except SpecError as refusal:
            assert "tied" in str(refusal)
            continue
        found.append(spec)
    return found


def together(specs, store):
    """Outcomes by run, all in one bank."""
    bank = Bank(
        specs[0].shape,
        specs[0].batch_tokens,
        specs[0].numerics,
        store,
        optimizer="adamw",
        device="cpu",
    )
    for slot, spec in enumerate(specs):
        bank.admit(slot, spec)
    return [
        (result, curve)
        for _, result, curve in sorted(bank.advance(100), key=lambda ended: ended[0])
    ]


def alone(spec, store, change=None, **numerics):
    solo = Solo(store, device="cpu")
    solo.admit(
        0,
        dataclasses.replace(
            spec, numerics=dataclasses.replace(spec.numerics, num_slots=1, **numerics)
        ),
    )
    if change is not None:
        change(solo.model)
    ((_, result, curve),) = solo.advance(10**6)
    return result, curve


def distance(one, other):
    """Largest difference of losses in nats, validation's among them, and of norms relative to their
    size.
    """
    (result, curve), (their_result, their_curve) = one, other
    losses = zip(
        (*curve.train_loss_nats, result.loss_nats),
        (*their_curve.train_loss_nats, their_result.loss_nats),
        strict=True,
    )
    norms = zip(curve.grad_norm, their_curve.grad_norm, strict=True)
    return max(*(abs(a - b) for a, b in losses), *(abs(a / b - 1) for a, b in norms))


def largest_distance(specs, store, **numerics):
    banked = together(specs, store)
    return max(
        distance(one, alone(spec, store, **numerics))
        for one, spec in zip(banked, specs, strict=True)
    )


@pytest.mark.parametrize(
    ("family", "fused_loss", "by_row"),
    [("llama", True, True), ("gpt2", False, False), ("gpt2, all of it", True, True)],
)
def test_in_float64_it_is_the_trial_alone(store, monkeypatch, family, fused_loss, by_row):
    """Which is torch's own AdamW after clipping (`test_solo`); in both forms of the bank's."""
    built = dataclasses.replace(IMPLEMENTATIONS["adamw"], bank=partial(BankAdamW, by_row=by_row))
    monkeypatch.setitem(IMPLEMENTATIONS, "adamw", built)
    specs = runs(store, family, dtype="float64", fused_loss=fused_loss)
    # completedp refuses tied matrices
    assert len(specs) == len(NAMES) - ("tied" in FAMILIES[family])
    assert largest_distance(specs, store) < 1e-9


def swapped_rates(patch):
    real = BankAdamW.admit

    def admit(optimizer, trial, numbers, weights, clip_norm):
        one = max(n.learning_rate for n in numbers)
        real(
            optimizer,
            trial,
            [with_settings(n, learning_rate=one) for n in numbers],
            weights,
            clip_norm,
        )

    patch.setattr(BankAdamW, "admit", admit)


def next_slots_multipliers(patch):
    real = bank_module.stack_forward_numbers

    def stack(numbers, dtype, device):
        return real(numbers[1:] + numbers[:1], dtype, device)

    patch.setattr(bank_module, "stack_forward_numbers", stack)


def one_eps(patch):
    real = BankAdamW.admit

    def admit(optimizer, trial, numbers, weights, clip_norm):
        real(optimizer, trial, [with_settings(n, eps=1e-8) for n in numbers], weights, clip_norm)

    patch.setattr(BankAdamW, "admit", admit)


@pytest.mark.parametrize(
    ("plant", "by_row"),
    [(swapped_rates, True), (next_slots_multipliers, True), (one_eps, True), (one_eps, False)],
)
def test_the_comparison_can_fail(store, monkeypatch, plant, by_row):
    built = dataclasses.replace(IMPLEMENTATIONS["adamw"], bank=partial(BankAdamW, by_row=by_row))
    monkeypatch.setitem(IMPLEMENTATIONS, "adamw", built)
    specs = runs(store, "llama", dtype="float64", eps=1e-6)
    plant(monkeypatch)
    assert largest_distance(specs, store) > 1e-9
