"""AdamW (arXiv 1711.05101) for the trials of a bank.

Weights, gradients, and moments are flat [K, P] buffers: one row per trial, and all parameters of
the model are views into them. Every operation is by row or by element, so that a trial's results do
not depend on the other trials.

Shape suffixes: K trials, P weights of a trial, S parameter tensors of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.numbers import ParameterNumbers
from forerun._proxies.model.compilation import separate_recompile_counts


class BankAdamW:
    """Decoupled AdamW for K trials of P weights in S tensors.

    It equals `clip_grad_norm_` and `torch.optim.AdamW` with one parameter group per tensor. On a
    CPU, torch's fused kernel updates one trial after the other, in one pass over the memory.
    Elsewhere all rows are updated at once, by the same few kernels for any K, and without
    synchronizing with the host, so that a step can be recorded as a CUDA graph.

    Args:
        model: The bank's model. Its parameters become views into the buffer of weights.
        num_trials: Number of trials, K.
        dtype: Dtype of the buffers.
        device: Device of the buffers.
        by_row: Whether trials are updated one after the other; None for yes on a CPU, and no on
            other devices.
        compiled: Whether the update of all rows is compiled to one kernel.
    """

    excluded: frozenset[str] = frozenset()
    """Names of parameters that another optimizer updates."""

    def __init__(
        self,
        model: nn.Module,
        num_trials: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        by_row: bool | None = None,
        compiled: bool = False,
    ) -> None:
        parameters = dict(model.named_parameters())
        num_tensors, sizes = len(parameters), [p[0].numel() for p in parameters.values()]
        make = partial(torch.zeros, dtype=dtype, device=device)
        self.weights_KP, self.gradients_KP, self.first_KP, self.second_KP = (
            make(num_trials, sum(sizes)) for _ in range(4)
        )
        # Numbers of a trial in float64: in float32, 1 - beta2 ** updates would lose most digits
        self.beta1_K1, self.beta2_K1, self.updates_K1 = (
            make(num_trials, 1, dtype=torch.float64) for _ in range(3)
        )
        self.clip_K1 = torch.full_like(self.beta1_K1, torch.inf)
        # Numbers of a trial's tensors
        self.peak_lr_KS, self.decay_KS = (
            make(num_trials, num_tensors, dtype=torch.float64) for _ in range(2)
        )
        self.eps_KS = torch.ones_like(self.peak_lr_KS)

        # Parameters are views into the weights
        self._parameters = list(parameters.values())
        self.spans: dict[str, tuple[int, int]] = {}
        start = 0
        for (name, parameter), size in zip(parameters.items(), sizes, strict=True):
            self.spans[name] = (start, start + size)
            parameter.data = self._view(self.weights_KP, name, parameter)
            start += size

        self._by_row = self.weights_KP.device.type == "cpu" if by_row is None else by_row
        self._update: Callable[..., None] = _update_rows
        if compiled:
            self._update = torch.compile(
                _update_rows, fullgraph=True, **separate_recompile_counts()
            )
        self._gradient_views: list[Tensor] | None = None
        """Views of the gradient buffer, one for each parameter, if there is a single trial on a
        GPU. They are contiguous then, and copies into them are faster than a concatenation."""
        if num_trials == 1 and not self._by_row:
            self._gradient_views = [
                self._view(self.gradients_KP, name, parameter)
                for name, parameter in parameters.items()
            ]
        self._tensor_P: Tensor | None = None
        """Index of the tensor that each weight belongs to, by which `_update_rows` finds the
        weight's settings; None if trials are updated one after the other."""
        if not self._by_row:
            indices_S = torch.arange(num_tensors, dtype=torch.int32, device=device)
            self._tensor_P = indices_S.repeat_interleave(torch.tensor(sizes, device=device))

    def _view(self, buffer_KP: Tensor, name: str, parameter: Tensor) -> Tensor:
        """Return the part of a buffer that belongs to a parameter, in the parameter's shape."""
        start, stop = self.spans[name]
        return buffer_KP[:, start:stop].view(parameter.shape)

    # ---- Trials ----

    def admit(
        self,
        trial: int,
        numbers: Sequence[ParameterNumbers],
        weights: Mapping[str, Tensor],
        hparams: Hparams,
    ) -> None:
        """Give a row to a new trial, with zero moments.

        Args:
            trial: Index of the row.
            numbers: Numbers of every parameter; betas are the same for all.
            weights: Initial weights by parameter name.
            hparams: Hyperparameters of the run, of which the clipping is used.
        """
        self.clear(trial)
        numbers_by_name = {parameter.name: parameter for parameter in numbers}
        for index, (name, (start, stop)) in enumerate(self.spans.items()):
            self.weights_KP[trial, start:stop] = weights[name].flatten().to(self.weights_KP)
            if name not in self.excluded:
                learning_rate, decay, eps = self.get_tensor_settings(numbers_by_name[name])
                self.peak_lr_KS[trial, index] = learning_rate
                self.decay_KS[trial, index] = decay
                self.eps_KS[trial, index] = eps
        settings = next(p.settings for p in numbers if p.name not in self.excluded)
        self.beta1_K1[trial], self.beta2_K1[trial] = settings["beta1"], settings["beta2"]
        self.clip_K1[trial] = torch.inf if hparams.clip_norm is None else hparams.clip_norm

    def get_tensor_settings(self, parameter: ParameterNumbers) -> tuple[float, float, float]:
        """Return a tensor's peak learning rate, weight decay, and eps."""
        return parameter.learning_rate, parameter.weight_decay, parameter.settings["eps"]

    def get_state(self, trial: int) -> dict[str, Tensor]:
        """Return a trial's weights and moments, [P] each, as views into the buffers."""
        buffers = {"weights": self.weights_KP, "first": self.first_KP, "second": self.second_KP}
        return {name: buffer_KP[trial] for name, buffer_KP in buffers.items()}

    def restore(self, trial: int, state: Mapping[str, Tensor], num_updates: int) -> None:
        """Set the weights and moments of an admitted trial to those after `num_updates` updates."""
        for name, row_P in self.get_state(trial).items():
            row_P.copy_(state[name])
        self.updates_K1[trial] = num_updates

    def clear(self, trial: int) -> None:
        """Set a row's weights, moments, and rates to zero, so that it computes zeros."""
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

    # ---- Steps ----

    def gather_gradients(self) -> Tensor:
        """Move the parameters' gradients into the buffer, and return their norms [K]."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self._gradient_views is not None:
            torch._foreach_copy_(self._gradient_views, gradients)
        else:
            torch.cat([gradient.flatten(1) for gradient in gradients], dim=1, out=self.gradients_KP)
        for parameter in self._parameters:
            parameter.grad = None
        norms_K: Tensor = torch.linalg.vector_norm(self.gradients_KP, dim=1)
        return norms_K

    def compute_clip_factor(self, grad_norm_K1: Tensor) -> Tensor:
        """Return the factors by which gradients of these norms are clipped.

        The formula is that of `torch.nn.utils.clip_grad_norm_`, its 1e-6 included.
        """
        return (self.clip_K1 / (grad_norm_K1 + 1e-6)).clamp(max=1.0)

    @torch.no_grad()
    def step(self, lr_multiplier_K1: Tensor, active_K1: Tensor, grad_norm_K1: Tensor) -> None:
        """Make one update of the active trials; the weights and moments of others do not change.

        Args:
            lr_multiplier_K1: The schedules' learning rates as shares of the peak.
            active_K1: Whether a trial trains and has a finite gradient, as bool.
            grad_norm_K1: Norms of the gathered gradients.
        """
        shrink_K1 = self.compute_clip_factor(grad_norm_K1)
        self.updates_K1 += active_K1
        if self._by_row:
            columns = (active_K1, lr_multiplier_K1, shrink_K1)
            rows = zip(*(column_K1.flatten().tolist() for column_K1 in columns), strict=True)
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
        """Update one trial by torch's fused kernel, once for all tensors with equal settings."""
        # Clipping
        if shrink < 1.0:
            self.gradients_KP[trial] *= shrink

        # Indices of the tensors by their settings
        settings_KS = (self.peak_lr_KS, self.decay_KS, self.eps_KS)
        settings = zip(*(setting_KS[trial].tolist() for setting_KS in settings_KS), strict=True)
        indices_by_settings: dict[tuple[float, ...], list[int]] = {}
        for index, (name, tensor_settings) in enumerate(zip(self.spans, settings, strict=True)):
            if name not in self.excluded:
                indices_by_settings.setdefault(tensor_settings, []).append(index)

        # Updates
        buffers = (self.weights_KP, self.gradients_KP, self.first_KP, self.second_KP)
        sizes = [stop - start for start, stop in self.spans.values()]
        rows = [torch.split(buffer_KP[trial], sizes) for buffer_KP in buffers]
        beta1, beta2 = self.beta1_K1[trial].item(), self.beta2_K1[trial].item()
        for (learning_rate, decay, eps), indices in indices_by_settings.items():
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


def _update_rows(
    buffers_KP: tuple[Tensor, ...],
    settings_KS: tuple[Tensor, ...],
    tensor_P: Tensor,
    numbers_K1: tuple[Tensor, ...],
    active_K1: Tensor,
) -> None:
    """Update all trials at once.

    Args:
        buffers_KP: Weights, gradients, first moments, and second moments.
        settings_KS: Peak learning rate, weight decay, and eps of each tensor.
        tensor_P: Index of the tensor of each weight.
        numbers_K1: Beta1, beta2, number of updates, learning rate as a share of the peak, and
            clipping factor.
        active_K1: Which trials are updated.
    """
    weights_KP, gradients_KP, first_KP, second_KP = buffers_KP
    beta1_K1, beta2_K1, updates_K1, lr_multiplier_K1, shrink_K1 = numbers_K1
    dtype = weights_KP.dtype
    peak_lr_KS, decay_KS, eps_KS = (setting_KS.to(dtype) for setting_KS in settings_KS)

    # An inactive trial gets the learning rate 0, and no bias correction
    lr_multiplier_K1 = torch.where(active_K1, lr_multiplier_K1, 0)
    correction1_K1 = torch.where(active_K1, 1 - beta1_K1**updates_K1, 1)
    correction2_K1 = torch.where(active_K1, 1 - beta2_K1**updates_K1, 1)

    # Clipping. `where` rather than a product: NaN * 0 is NaN, and a diverged trial must not write
    gradients_KP = torch.where(active_K1, gradients_KP * shrink_K1.to(dtype), 0)

    # Moments. Those of an inactive trial keep their values, and its gradient is 0
    new_share_K1 = torch.where(active_K1, 1 - beta1_K1, 0)
    kept_share_K1 = torch.where(active_K1, beta2_K1, 1)
    first_KP.lerp_(gradients_KP, new_share_K1.to(dtype))
    second_KP.mul_(kept_share_K1.to(dtype))
    second_KP.addcmul_(gradients_KP, gradients_KP * (1 - beta2_K1).to(dtype))

    # Decoupled weight decay, before the update
    kept_KS = 1 - peak_lr_KS * lr_multiplier_K1.to(dtype) * decay_KS
    weights_KP.mul_(kept_KS.index_select(1, tensor_P))

    # Update with bias correction
    rate_KS = peak_lr_KS * (lr_multiplier_K1 / correction1_K1).to(dtype)
    rate_KP, eps_KP = rate_KS.index_select(1, tensor_P), eps_KS.index_select(1, tensor_P)
    denominator_KP = (second_KP / correction2_K1.to(dtype)).sqrt_().add_(eps_KP)
    weights_KP.sub_(rate_KP.mul_(first_KP).div_(denominator_KP))
