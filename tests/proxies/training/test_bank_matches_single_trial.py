"""Tests that a trial in a bank gives the losses of the same trial trained alone, within 1e-9.

A bank trains several trials as one batched model. The engine of a single trial steps with torch's
AdamW, so these tests compare banks with torch.
"""

import dataclasses

import pytest
from proxy_cases import TINY, make_run_spec, replace_settings, set_row_updates

from forerun._proxies.core.checks import SpecError
from forerun._proxies.model.bank_adamw import BankAdamW
from forerun._proxies.training import bank as bank_module
from forerun._proxies.training.bank import Bank
from forerun._proxies.training.single_trial import SingleTrialEngine

pytestmark = pytest.mark.usefixtures("few_windows")

FAMILIES = {
    "llama": {},
    "gpt2": {"family": "gpt2"},
    "gpt2, all options": {"family": "gpt2", "tied": True, "qk_norm": True, "num_kv_heads": 1},
}
MANY_STEPS = 10**6
"""More steps than any run has: the engine trains until a run ends."""
PARAMETRIZATIONS = ("mup", "completep", "completedp", "umup")
BASE_TOKENS = {"base_batch_tokens": 32, "base_num_tokens": 576}
"""Half of the runs' batch, and three quarters of their tokens."""


def make_runs(store, family, **changes):
    """Return one run of every parametrization that the family allows.

    The runs have twice the base's width and depth, and differ in all hyperparameters.
    """
    base = dataclasses.replace(TINY, **{"num_kv_heads": 2, **FAMILIES[family]})
    shape = base.at_width(32).at_depth(2)
    specs = []
    for number, name in enumerate(PARAMETRIZATIONS):
        base_tokens = BASE_TOKENS if name == "completedp" else {}
        hparams = {
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
            spec = make_run_spec(
                store.manifest.data_id,
                parametrization=name,
                shape=shape,
                base_shape=base,
                seed=number,
                num_slots=len(PARAMETRIZATIONS),
                **{**hparams, **base_tokens, **changes},
            )
        except SpecError as error:
            # Complete(d)P does not allow tied matrices.
            assert "tied" in str(error)
            continue
        specs.append(spec)
    return specs


def train_in_bank(specs, store):
    """Train all runs in one bank; return their (result, curve)."""
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
    outcomes = sorted(bank.advance(100), key=lambda outcome: outcome[0])
    return [(result, curve) for _, result, curve in outcomes]


def train_single(spec, store):
    """Train a run on the engine of a single trial; return its (result, curve)."""
    engine = SingleTrialEngine(store, device="cpu")
    numerics = dataclasses.replace(spec.numerics, num_slots=1)
    engine.admit(0, dataclasses.replace(spec, numerics=numerics))
    ((_, result, curve),) = engine.advance(MANY_STEPS)
    return result, curve


def measure_distance(outcome, expected_outcome):
    """Return the largest difference of two outcomes.

    Differences of losses are in nats. Those of gradient norms are relative.
    """
    (result, curve), (expected_result, expected_curve) = outcome, expected_outcome
    losses = [*curve.train_loss_nats, result.loss_nats]
    expected_losses = [*expected_curve.train_loss_nats, expected_result.loss_nats]
    loss_differences = [abs(a - b) for a, b in zip(losses, expected_losses, strict=True)]
    norms = zip(curve.grad_norm, expected_curve.grad_norm, strict=True)
    return max(*loss_differences, *(abs(a / b - 1) for a, b in norms))


def measure_distance_to_single_trials(specs, store):
    """Return the largest difference between runs in one bank and the same runs alone."""
    outcomes = train_in_bank(specs, store)
    return max(
        measure_distance(outcome, train_single(spec, store))
        for outcome, spec in zip(outcomes, specs, strict=True)
    )


@pytest.mark.parametrize(
    ("family", "fused_loss", "by_row"),
    [("llama", True, True), ("gpt2", False, False), ("gpt2, all options", True, True)],
)
def test_trials_in_a_bank_match_single_trials(store, monkeypatch, family, fused_loss, by_row):
    set_row_updates(monkeypatch, "adamw", by_row=by_row)
    specs = make_runs(store, family, dtype="float64", fused_loss=fused_loss)
    # Complete(d)P does not allow tied matrices.
    num_refused = 1 if "tied" in FAMILIES[family] else 0
    assert len(specs) == len(PARAMETRIZATIONS) - num_refused
    assert measure_distance_to_single_trials(specs, store) < 1e-9


def change_admitted_numbers(patch, change):
    """Let banks admit a trial with `change(numbers)` in place of the numbers of its parameters."""
    real_admit = BankAdamW.admit

    def admit(optimizer, trial, numbers, weights, hparams):
        real_admit(optimizer, trial, change(numbers), weights, hparams)

    patch.setattr(BankAdamW, "admit", admit)


def plant_equal_rates(patch):
    """Give all parameters of a trial the largest learning rate."""

    def equalize(numbers):
        largest = max(parameter.learning_rate for parameter in numbers)
        return [replace_settings(parameter, learning_rate=largest) for parameter in numbers]

    change_admitted_numbers(patch, equalize)


def plant_multipliers_of_the_next_slot(patch):
    """Give each slot the forward multipliers of the next one."""
    real_stack = bank_module.stack_forward_numbers

    def stack(numbers, dtype, device):
        return real_stack(numbers[1:] + numbers[:1], dtype, device)

    patch.setattr(bank_module, "stack_forward_numbers", stack)


def plant_default_eps(patch):
    """Give all parameters the default eps."""
    change_admitted_numbers(
        patch, lambda numbers: [replace_settings(parameter, eps=1e-8) for parameter in numbers]
    )


@pytest.mark.parametrize(
    ("plant", "by_row"),
    [
        (plant_equal_rates, True),
        (plant_multipliers_of_the_next_slot, True),
        (plant_default_eps, True),
        (plant_default_eps, False),
    ],
)
def test_mistakes_in_the_bank_are_noticed(store, monkeypatch, plant, by_row):
    """The comparison above can fail: it notices each planted mistake."""
    set_row_updates(monkeypatch, "adamw", by_row=by_row)
    specs = make_runs(store, "llama", dtype="float64", eps=1e-6)
    plant(monkeypatch)
    assert measure_distance_to_single_trials(specs, store) > 1e-9
