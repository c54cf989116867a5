import dataclasses

import pytest
import torch
from proxy_cases import TINY, run_spec
from torch import nn

from proxies.core.hyperparameters import Hparams
from proxies.model.decoder import Decoder
from proxies.model.optimizer import BankAdamW, adamw, grouped, set_rates
from proxies.parametrization.parametrization import initial_tensor, parameter_table

SHAPE = dataclasses.replace(TINY, vocab_size=7)
WIDE = SHAPE.at_width(32).at_depth(2)
TRIALS = (
    Hparams(learning_rate=0.1, weight_decay=0.5, beta1=0.9, beta2=0.95, eps=1e-8, clip_norm=1.0),
    Hparams(learning_rate=0.01, weight_decay=0.0, beta1=0.0, beta2=0.0, eps=1e-3, clip_norm=None),
    Hparams(learning_rate=1.0, weight_decay=0.1, beta1=0.4, beta2=0.999, eps=1e-12, clip_norm=1e6),
)
NUM_STEPS = 10
BOTH_FORMS = pytest.mark.parametrize("by_row", [True, False], ids=["row by row", "rows at once"])


def bank_of(trials, dtype=torch.float64, **options):
    """A bank of muP models with weights, and each trial's own table of numbers."""
    model = Decoder(WIDE, num_trials=len(trials))
    optimizer = BankAdamW(model, len(trials), dtype, **options)
    for trial, hparams in enumerate(trials):
        admit(optimizer, trial, hparams)
    return model, optimizer


def table(hparams):
    """CompleteP at twice the width and depth: rates, decays and eps that differ from parameter to parameter."""
    changes = {field.name: getattr(hparams, field.name) for field in dataclasses.fields(hparams)}
    return parameter_table(run_spec("data", shape=WIDE, base_shape=SHAPE, parametrization="completep", **changes))


def admit(optimizer, trial, hparams):
    numbers = table(hparams)
    weights = {n.name: initial_tensor(n, trial) for n in numbers}
    optimizer.admit(trial, numbers, weights, hparams)


def gradients_at(step, model, scale=3.0):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale for p in model.parameters()]


def step_bank(model, optimizer, gradients, multiplier=1.0, active=None):
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient.to(parameter.dtype)
    norms = optimizer.gather_gradients()
    num_trials = len(norms)
    active = torch.ones(num_trials, 1, dtype=torch.bool) if active is None else active
    shares = torch.full((num_trials, 1), multiplier, dtype=norms.dtype)
    optimizer.step(shares, active, norms[:, None])
    return norms


def torch_trial(trial, hparams, shares):
    """The same trial on torch's own AdamW, one group per parameter, after `clip_grad_norm_`."""
    numbers = table(hparams)
    weights = [nn.Parameter(initial_tensor(n, trial).double()) for n in numbers]
    groups = [
        {"params": [weight], "lr": n.learning_rate, "weight_decay": n.weight_decay, "eps": n.eps,
         "betas": (n.beta1, n.beta2)}
        for weight, n in zip(weights, numbers, strict=True)
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(groups)
    bank = Decoder(WIDE, num_trials=len(TRIALS), device="meta")
    for step, share in enumerate(shares):
        for group, n, weight, gradient in zip(
            optimizer.param_groups, numbers, weights, gradients_at(step, bank), strict=True
        ):
            group["lr"] = n.learning_rate * share
            weight.grad = gradient[trial].clone()
        if hparams.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(weights, hparams.clip_norm)
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in weights])


@BOTH_FORMS
def test_it_is_torchs_adamw_after_clipping(by_row):
    shares = [(step + 1) / NUM_STEPS for step in range(NUM_STEPS)]
    model, optimizer = bank_of(TRIALS, by_row=by_row)
    for step, share in enumerate(shares):
        norms = step_bank(model, optimizer, gradients_at(step, model), share)
        assert (norms > 1).all()  # the first trial's clip is at work
    for trial, hparams in enumerate(TRIALS):
        wanted = torch_trial(trial, hparams, shares)
        torch.testing.assert_close(optimizer.weights_KP[trial], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spoil", ["weight_decay", "clip_norm", "beta1", "eps"])
def test_the_comparison_can_fail(spoil):
    changed = dataclasses.replace(TRIALS[0], **{spoil: getattr(TRIALS[0], spoil) * 0.5 + 1e-6})
    model, optimizer = bank_of((changed, *TRIALS[1:]))
    for step in range(3):
        step_bank(model, optimizer, gradients_at(step, model))
    wanted = torch_trial(0, TRIALS[0], [1.0] * 3)
    assert not torch.allclose(optimizer.weights_KP[0], wanted, rtol=1e-9, atol=1e-9)


@BOTH_FORMS
def test_an_inactive_row_does_not_move_and_its_nan_does_not_spread(by_row):
    model, optimizer = bank_of(TRIALS, torch.float32, by_row=by_row)
    alone_model, alone = bank_of(TRIALS, torch.float32, by_row=by_row)
    active = torch.tensor([[True], [False], [True]])
    held = optimizer.weights_KP[1].clone()
    for step in range(4):
        gradients = gradients_at(step, model)
        step_bank(alone_model, alone, gradients)
        spoiled = [gradient.clone() for gradient in gradients]
        for gradient, poison in zip(spoiled, (torch.nan, torch.inf, -torch.inf) * 5, strict=False):
            gradient[1] = poison
        step_bank(model, optimizer, spoiled, active=active)
    assert torch.equal(optimizer.weights_KP[1], held)
    assert torch.equal(optimizer.weights_KP[[0, 2]], alone.weights_KP[[0, 2]])
    assert optimizer.weights_KP.isfinite().all()
    assert optimizer.updates_K1.flatten().tolist() == [4, 0, 4]


@BOTH_FORMS
def test_a_row_of_nan_weights_does_not_spread_and_is_cleared(by_row):
    model, optimizer = bank_of(TRIALS, torch.float32, by_row=by_row)
    fresh_model, fresh = bank_of(TRIALS, torch.float32, by_row=by_row)
    optimizer.weights_KP[1] = optimizer.first_KP[1] = optimizer.second_KP[1] = torch.nan
    step_bank(model, optimizer, gradients_at(0, model))
    step_bank(fresh_model, fresh, gradients_at(0, model))
    assert torch.equal(optimizer.weights_KP[[0, 2]], fresh.weights_KP[[0, 2]])
    optimizer.clear(1)
    step_bank(model, optimizer, [g * torch.tensor([1, 0, 1]).view(3, *[1] * (g.dim() - 1))
                                 for g in gradients_at(1, model)])  # fmt: skip
    assert optimizer.weights_KP[1].eq(0).all()


@BOTH_FORMS
def test_a_trial_admitted_later_counts_its_own_updates(by_row):
    model, optimizer = bank_of(TRIALS, by_row=by_row)
    for step in range(3):
        step_bank(model, optimizer, gradients_at(100 + step, model))
    admit(optimizer, 0, TRIALS[0])
    for step in range(NUM_STEPS):
        step_bank(model, optimizer, gradients_at(step, model))
    torch.testing.assert_close(
        optimizer.weights_KP[0], torch_trial(0, TRIALS[0], [1.0] * NUM_STEPS), rtol=1e-12, atol=1e-12
    )


@BOTH_FORMS
def test_every_parameter_has_its_own_eps(by_row):
    """Planted: the base run's eps for all, where CompleteP divides the blocks' by width and depth."""
    numbers = table(TRIALS[1])
    assert {n.eps for n in numbers} == {1e-3, 1e-3 / 4}
    model, optimizer = bank_of(TRIALS, by_row=by_row)
    optimizer.eps_KS[1] = TRIALS[1].eps
    for eps_KP in optimizer._rates_KP[2:]:
        eps_KP[1] = TRIALS[1].eps
    for step in range(3):
        step_bank(model, optimizer, gradients_at(step, model))
    assert not torch.allclose(optimizer.weights_KP[1], torch_trial(1, TRIALS[1], [1.0] * 3), rtol=1e-6, atol=1e-6)
    assert torch.allclose(optimizer.weights_KP[0], torch_trial(0, TRIALS[0], [1.0] * 3), rtol=1e-9, atol=1e-9)


def test_betas_are_the_trials_not_the_parameters():
    numbers = list(table(TRIALS[0]))
    numbers[3] = dataclasses.replace(numbers[3], beta2=0.5)
    _, optimizer = bank_of(TRIALS)
    with pytest.raises(ValueError, match="one pair for all parameters"):
        optimizer.admit(0, numbers, {n.name: initial_tensor(n, 0) for n in numbers}, Hparams(learning_rate=1.0))


def test_torchs_own_groups_are_the_table():
    """What a trial alone trains with: few groups, every parameter in one of them, under its own numbers."""
    numbers = table(TRIALS[0])
    parameters = dict(Decoder(WIDE, device="meta").named_parameters())
    groups = grouped(numbers, parameters)
    optimizer = adamw(groups)
    set_rates(optimizer, [rates for rates, _ in groups], 0.25)
    names = {id(parameter): name for name, parameter in parameters.items()}
    live = {
        names[id(parameter)]: (group["lr"], group["weight_decay"], group["eps"], *group["betas"])
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    assert live == {n.name: (n.learning_rate * 0.25, n.weight_decay, n.eps, n.beta1, n.beta2) for n in numbers}
    assert len(groups) == 4 < len(numbers)
    assert type(optimizer) is torch.optim.AdamW
