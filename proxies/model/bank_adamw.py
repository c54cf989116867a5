"""AdamW (arXiv 1711.05101) for the trials of a bank, over a flat [K, P] buffer: all parameters are
views into it, and each row sees only itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from proxies.core.hyperparameters import Hparams
from proxies.core.numbers import ParameterNumbers

SHARED_RECOMPILE_LIMIT = 64
"""Of all banks of a process together, where torch counts them so: two graphs of each, training and
validation; torch's own limit of 8 is for one."""


def isolated() -> dict[str, Any]:
    """Options of `torch.compile` by which each bank counts its own recompilations.

    A torch without `isolate_recompiles`, which 2.13 has, counts those of all banks of the
    process together: there its limit is raised, and no option given.
    """
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        return {"isolate_recompiles": True}
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, SHARED_RECOMPILE_LIMIT)
    return {}


def fail_past_recompile_limit() -> None:
    """Have a model that is compiled again too often raise: torch would quietly run it
    uncompiled.
    """
    from torch._dynamo import config  # 2.9's `torch.compiler.config` lacks the name

    config.fail_on_recompile_limit_hit = True


class BankAdamW:
    """Decoupled AdamW (arXiv 1711.05101) for K trials of P parameters in S tensors each.

    Equal to `torch.optim.AdamW` with one group per tensor, after `clip_grad_norm_`. On a CPU
    torch's own fused kernel updates row by row, in one pass over the memory; elsewhere all rows are
    updated at once, by as few launches whatever K, and without a word from the host, so that a step
    can be recorded.
    """

    left_out: frozenset[str] = frozenset()
    """Parameters that another rule steps."""

    def __init__(
        self,
        model: nn.Module,
        num_trials: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        by_row: bool | None = None,
        compiled: bool = False,
    ) -> None:
        """`by_row` None: on a CPU. `compiled`: one kernel for the update of all rows, where that is
        how it is done.
        """
        parameters = list(model.named_parameters())
        num_params = sum(p[0].numel() for _, p in parameters)
        make = partial(torch.zeros, dtype=dtype, device=device)
        self.weights_KP, self.gradients_KP, self.first_KP, self.second_KP = (
            make(num_trials, num_params) for _ in range(4)
        )
        # A trial's own numbers in float64: 1 - beta2 ** updates in float32 would keep few of its
        # digits.
        self.beta1_K1, self.beta2_K1, self.updates_K1 = (
            make(num_trials, 1, dtype=torch.float64) for _ in range(3)
        )
        self.clip_K1 = torch.full_like(self.beta1_K1, torch.inf)
        self.peak_lr_KS, self.decay_KS = (
            make(num_trials, len(parameters), dtype=torch.float64) for _ in range(2)
        )
        self.eps_KS = torch.ones_like(self.peak_lr_KS)
        self._by_row = self.weights_KP.device.type == "cpu" if by_row is None else by_row
        self._update: Callable[..., None] = _update
        if compiled:
            self._update = torch.compile(_update, fullgraph=True, **isolated())
        self._parameters = [parameter for _, parameter in parameters]
        self.spans: dict[str, tuple[int, int]] = {}
        start = 0
        for name, parameter in parameters:
            stop = start + parameter[0].numel()
            self.spans[name] = (start, stop)
            parameter.data = self.weights_KP[:, start:stop].view(parameter.shape)
            start = stop
        self._alone: list[Tensor] | None = None
        """On a GPU, where a lone trial's gradients go: places in one piece each, copied to at full
        speed."""
        if num_trials == 1 and not self._by_row:
            self._alone = [
                self.gradients_KP[:, start:stop].view(parameter.shape)
                for (start, stop), parameter in zip(
                    self.spans.values(), self._parameters, strict=True
                )
            ]
        # Which tensor a weight is of, alike in all trials: where all rows are updated at once,
        # rates are found by it.
        sizes_S = torch.tensor([stop - start for start, stop in self.spans.values()], device=device)
        order_S = torch.arange(len(parameters), dtype=torch.int32, device=device)
        self._tensor_P = None if self._by_row else order_S.repeat_interleave(sizes_S)

    def admit(
        self,
        trial: int,
        numbers: Sequence[ParameterNumbers],
        weights: Mapping[str, Tensor],
        hparams: Hparams,
    ) -> None:
        """Give a trial its weights and rates, by parameter name, with fresh moments; betas are
        alike for all.
        """
        self.clear(trial)
        named = {parameter.name: parameter for parameter in numbers}
        rates = []
        for name, (start, stop) in self.spans.items():
            parameter = named[name]
            self.weights_KP[trial, start:stop] = weights[name].flatten().to(self.weights_KP)
            # which change nothing
            rates.append((0.0, 0.0, 1.0) if name in self.left_out else self.rates_of(parameter))
        columns_3S = torch.tensor(rates, dtype=torch.float64).T
        for rate_KS, column_S in zip(
            (self.peak_lr_KS, self.decay_KS, self.eps_KS), columns_3S, strict=True
        ):
            rate_KS[trial] = column_S
        one = next(parameter for parameter in numbers if parameter.name not in self.left_out)
        self.beta1_K1[trial], self.beta2_K1[trial] = one.settings["beta1"], one.settings["beta2"]
        self.clip_K1[trial] = torch.inf if hparams.clip_norm is None else hparams.clip_norm

    def rates_of(self, parameter: ParameterNumbers) -> tuple[float, float, float]:
        """Return a tensor's peak learning rate, weight decay, and eps."""
        return parameter.learning_rate, parameter.weight_decay, parameter.settings["eps"]

    def state(self, trial: int) -> dict[str, Tensor]:
        """A trial's weights and moments, [P] each: views into the buffers."""
        buffers = {"weights": self.weights_KP, "first": self.first_KP, "second": self.second_KP}
        return {name: buffer_KP[trial] for name, buffer_KP in buffers.items()}

    def restore(self, trial: int, state: Mapping[str, Tensor], num_updates: int) -> None:
        """Give an admitted trial the weights and moments of `state` after so many updates."""
        for name, row_P in self.state(trial).items():
            row_P.copy_(state[name])
        self.updates_K1[trial] = num_updates

    def clear(self, trial: int) -> None:
        """Empty a trial's row: weights, moments and rates to zero, so that it computes zeros."""
        for tensor in (
            self.weights_KP,
            self.first_KP,
            self.second_KP,
            self.peak_lr_KS,
            self.decay_KS,
            self.beta1_K1,
            self.beta2_K1,
            self.updates_K1,
        ):
            tensor[trial] = 0
        self.eps_KS[trial] = 1
        self.clip_K1[trial] = torch.inf

    def gather_gradients(self) -> Tensor:
        """Move the parameters' gradients into the flat buffer; returns their norms per trial,
        [K].
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._alone is not None:
            torch._foreach_copy_(self._alone, gradients)
        else:
            torch.cat([gradient.flatten(1) for gradient in gradients], dim=1, out=self.gradients_KP)
        for parameter in self._parameters:
            parameter.grad = None
        norms_K: Tensor = torch.linalg.vector_norm(self.gradients_KP, dim=1)
        return norms_K

    def shrink(self, grad_norm_K1: Tensor) -> Tensor:
        """What clipping multiplies gradients of these norms with:
        `torch.nn.utils.clip_grad_norm_`'s own form, its 1e-6 included.
        """
        return (self.clip_K1 / (grad_norm_K1 + 1e-6)).clamp(max=1.0)

    @torch.no_grad()
    def step(self, lr_multiplier_K1: Tensor, active_K1: Tensor, grad_norm_K1: Tensor) -> None:
        """One update of the active trials, clipped by their gradient norms; an inactive row does
        not move.

        Args:
            lr_multiplier_K1: the schedule's share of the peak rates.
            active_K1: bool; which trials train, and have a finite gradient.
            grad_norm_K1: of the gradients that were gathered.
        """
        shrink_K1 = self.shrink(grad_norm_K1)
        self.updates_K1 += active_K1
        if self._by_row:
            rows = zip(
                *(t_K1.flatten().tolist() for t_K1 in (active_K1, lr_multiplier_K1, shrink_K1)),
                strict=True,
            )
            for trial, (active, lr_multiplier, shrink) in enumerate(rows):
                if active:
                    self._update_row(trial, lr_multiplier, shrink)
            return
        self._update(
            (self.weights_KP, self.gradients_KP, self.first_KP, self.second_KP),
            (self.peak_lr_KS, self.decay_KS, self.eps_KS),
            self._tensor_P,
            (self.beta1_K1, self.beta2_K1, self.updates_K1, lr_multiplier_K1, shrink_K1),
            active_K1,
        )

    def _update_row(self, trial: int, lr_multiplier: float, shrink: float) -> None:
        if shrink < 1.0:  # times one changes nothing
            self.gradients_KP[trial] *= shrink
        buffers = (self.weights_KP, self.gradients_KP, self.first_KP, self.second_KP)
        sizes = [stop - start for start, stop in self.spans.values()]
        rows = [torch.split(buffer_KP[trial], sizes) for buffer_KP in buffers]
        alike: dict[tuple[float, ...], list[int]] = {}
        rates_KS = (self.peak_lr_KS, self.decay_KS, self.eps_KS)
        each = zip(self.spans, *(rate_KS[trial].tolist() for rate_KS in rates_KS), strict=True)
        for index, (name, *rates) in enumerate(each):
            if name not in self.left_out:
                alike.setdefault(tuple(rates), []).append(index)
        beta1, beta2 = self.beta1_K1[trial].item(), self.beta2_K1[trial].item()
        for (learning_rate, decay, eps), indices in alike.items():
            weights, gradients, first, second = ([row[index] for index in indices] for row in rows)
            torch._fused_adamw_(
                weights,
                gradients,
                first,
                second,
                [],
                [self.updates_K1[trial]] * len(indices),
                lr=learning_rate * lr_multiplier,
                beta1=beta1,
                beta2=beta2,
                weight_decay=decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
            )


def _update(
    buffers_KP: tuple[Tensor, ...],
    rates_KS: tuple[Tensor, ...],
    tensor_P: Tensor,
    numbers_K1: tuple[Tensor, ...],
    active_K1: Tensor,
) -> None:
    """The rule for all rows at once; every operation is by row or by element."""
    weights_KP, gradients_KP, first_KP, second_KP = buffers_KP
    beta1_K1, beta2_K1, updates_K1, lr_multiplier_K1, shrink_K1 = numbers_K1
    dtype = weights_KP.dtype
    correction1_K1 = torch.where(active_K1, 1 - beta1_K1**updates_K1, 1)
    correction2_K1 = torch.where(active_K1, 1 - beta2_K1**updates_K1, 1)
    share_K1 = torch.where(active_K1, lr_multiplier_K1, 0)
    # where, not times: NaN * 0 is NaN, and a diverged row must not write.
    gradients_KP = torch.where(active_K1, gradients_KP * shrink_K1.to(dtype), 0)
    first_KP.lerp_(gradients_KP, (1 - beta1_K1).to(dtype))
    second_KP.mul_(beta2_K1.to(dtype)).addcmul_(
        gradients_KP, gradients_KP * (1 - beta2_K1).to(dtype)
    )
    peak_lr_KS, decay_KS, eps_KS = (rate_KS.to(dtype) for rate_KS in rates_KS)
    kept_KP, rate_KP, eps_KP = (
        own_KS.index_select(1, tensor_P)
        for own_KS in (
            1 - peak_lr_KS * share_K1.to(dtype) * decay_KS,
            peak_lr_KS * (share_K1 / correction1_K1).to(dtype),
            eps_KS,
        )
    )
    weights_KP.mul_(kept_KP)
    denominator_KP = (second_KP / correction2_K1.to(dtype)).sqrt_().add_(eps_KP)
    weights_KP.sub_(rate_KP.mul_(first_KP).div_(denominator_KP))
