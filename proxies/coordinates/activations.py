"""Measure the size of every layer's output while a model trains, for the coordinate check.

`measure_run` trains a run on this process's device, and measures its layers on the first batch.
Hooks work on any module: they record the output of every module that owns parameters, of every
block (a member of an outermost `nn.ModuleList`; its output is the residual stream), and the logits
of every call of `scaled_dot_product_attention`. Sizes are mean absolute values, as in the package
`mup` (`mup.coord_check`, statistic `l1`).

Shape suffixes: B sequences, T tokens of a sequence, V words of the vocabulary, N rows of an output,
F features of a row, R queries, X logits of all attention heads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from forerun._proxies.coordinates.coordinate_check import (
    CoordinateProbe,
    RunReadings,
    get_recorded_steps,
)
from forerun._proxies.coordinates.verdict import LayerReading, Role
from forerun._proxies.core.numbers import Kind
from forerun._proxies.core.spec import RunSpec
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.training.run_progress import read_batch
from forerun._proxies.training.single_trial import SingleTrialEngine
from forerun._proxies.training.trainable_model import BuiltModel

PROBE_TOKENS = 512
"""Number of tokens in the probe batch (at least one sequence), and maximum number of rows that are
kept of an output."""
LOGIT_ROWS = 128
"""Maximum number of queries, over all sequences, whose attention logits are measured; the number of
logits grows with the square of the length."""
MAX_NONLINEAR_SHARE = 0.05
"""Maximum deviation from linearity of a module whose rate (`LayerReading.rate`) is measured, as a
share of its output; the rounding of bfloat16 is far below it."""
_ROLES: dict[Kind, Role] = {"embedding": "embedding", "hidden": "hidden", "readout": "readout"}


@dataclass(slots=True)
class _Start:
    """The inputs and outputs of a matrix at step 0, on the batch and on unrelated noise."""

    args: Any
    kwargs: Any
    output: Tensor | None = None
    """Rows of the output for the batch; None until they are measured."""
    unrelated: Tensor | None = None
    """Input of Gaussian noise, of the same shape and size as the batch's; None if the fan-in is
    unknown or the module is not linear."""
    unrelated_output: Tensor | None = None
    """Output for `unrelated`, without the bias; None until it is measured."""

    @property
    def batch_input(self) -> Tensor | None:
        """First tensor of the input; None if there is none."""
        return _find_input(self.args, self.kwargs)


def measure_run(
    probe: CoordinateProbe, store: TokenStore, build: Callable[[RunSpec], BuiltModel] | None
) -> RunReadings:
    """Train the run of a probe, and measure its layers at the recorded steps.

    Args:
        probe: The run.
        store: The corpus of the run.
        build: Builds the model of a run that has a factory; None if this run has none.

    Returns:
        The readings, up to the first step at which a loss, gradient or output is not finite.
    """
    # Hooks do not work in a compiled model, and the run is trained alone, not in a bank.
    spec = dataclasses.replace(
        probe.spec, numerics=dataclasses.replace(probe.spec.numerics, compiled=False, num_slots=1)
    )
    # Do not end a run whose loss is large: a blow-up is what this check has to measure.
    engine = SingleTrialEngine(store, build=build, diverged_above_nats=math.inf)
    engine.admit(0, spec)
    kinds = {numbers.name: numbers.kind for numbers in engine.numbers}
    # Measure on the batch of the first update: on other tokens, the effect of an update from few
    # tokens is mostly noise.
    num_sequences = max(1, min(spec.batch_sequences, PROBE_TOKENS // spec.shape.seq_len))
    ids_BT = read_batch(store, spec, 0, num_sequences)[:, :-1]
    activations = ActivationProbe(engine.model, kinds, by_depth=probe.axis == "depth")
    readings: list[tuple[LayerReading, ...]] = []
    steps = get_recorded_steps(spec.schedule.num_steps - 1)
    for last_step, step in zip((0, *steps), steps, strict=False):
        # The engine ends a run before the end of its schedule only if a step is not finite
        if ended := engine.advance(step - last_step):
            return RunReadings(steps=tuple(readings), not_finite_step=ended[0][1].num_steps + 1)
        layers = tuple(activations.record(engine.predict, ids_BT).values())
        if not all(layer.is_finite for layer in layers):
            # Optimizer steps count from 1: outputs that are not finite at step 0 count as step 1
            return RunReadings(steps=tuple(readings), not_finite_step=max(step, 1))
        readings.append(layers)
    return RunReadings(steps=tuple(readings))


class ActivationProbe:
    """Measures the layers of one model at several steps of its training.

    The first call of `record` is the reference, so it must come before the first step.

    Args:
        module: The model, not compiled.
        kinds: Kinds of the model's parameters by name. A parameter without a kind is shared with
            another module, like the matrix of a tied readout.
        by_depth: Whether to name blocks `first`, `middle` and `last`, so that models of different
            depths have the same names of layers.
    """

    def __init__(
        self, module: nn.Module, kinds: Mapping[str, Kind], *, by_depth: bool = False
    ) -> None:
        self._module = module
        self._blocks = _name_blocks(module, by_depth)
        self._roles = {
            name: _find_role(name, owner, kinds)
            for name, owner in module.named_modules()
            if _owns_parameters(owner)
        }
        self._first: dict[str, Tensor] = {}
        """Output of each layer at step 0."""
        self._starts: dict[str, _Start] = {}
        self._within: list[str] = []
        """Blocks that the forward pass is in, outermost first."""
        self._is_measuring = False
        """Whether a matrix's own update is being measured, so that its forward pass must not be
        recorded."""
        self._readings: dict[str, LayerReading] = {}

    @torch.no_grad()
    def record(
        self, predict: Callable[[Tensor], Tensor], ids_BT: Tensor
    ) -> dict[str, LayerReading]:
        """Run one forward pass, and return the reading of every layer, in the order of the calls.

        Args:
            predict: Returns the logits, [B * T, V], of token ids.
            ids_BT: Token ids, [B, T].
        """
        self._readings = {}
        with ExitStack() as stack:
            stack.enter_context(self._register_hooks())
            stack.enter_context(_AttentionLogits(self._keep_logits))
            logits_NV = predict(ids_BT)
        size = _compute_size(_to_rows(logits_NV))
        for name, reading in self._readings.items():
            if reading.role == "readout":
                # Include a multiplier after the readout, because the loss depends on the logits.
                multiplier = size / reading.size if reading.size else 1.0
                rate = None if reading.rate is None else reading.rate * multiplier
                change = reading.change * multiplier
                self._readings[name] = dataclasses.replace(
                    reading, size=size, change=change, rate=rate
                )
        return self._readings

    @contextmanager
    def _register_hooks(self) -> Iterator[None]:
        """Register the hooks of all layers, and remove them at the end."""
        handles = []
        for name in self._blocks:
            block = self._module.get_submodule(name)
            handles.append(block.register_forward_pre_hook(functools.partial(self._enter, name)))
            handles.append(block.register_forward_hook(functools.partial(self._leave, name)))
        for name in self._roles:
            owner = self._module.get_submodule(name)
            handles.append(
                owner.register_forward_hook(
                    functools.partial(self._keep_output, name), with_kwargs=True
                )
            )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._within.clear()

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        if not self._is_measuring:
            self._within.append(name)

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._is_measuring:
            return
        self._within.pop()
        block_name = self._blocks[name]
        if block_name and (out := _find_tensor(output)) is not None:
            self._keep(f"{block_name}.stream", "stream", _to_rows(out))

    def _keep_logits(self, logits_X: Tensor, head_dim: int) -> None:
        if self._is_measuring:
            return
        name = self._within[-1] if self._within else ""
        block_name = self._blocks.get(name, "")
        if block_name or not name:
            layer = f"{block_name}.attention_logits" if block_name else "attention_logits"
            self._keep(layer, "attention_logits", logits_X, head_dim=head_dim)

    def _keep_output(
        self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """Record the output of a module, and measure the effect of its own update."""
        out, layer = _find_tensor(output), self._get_layer_name(name)
        if self._is_measuring or out is None or not layer:
            return
        rows_NF, role = _to_rows(out), self._roles[name]
        gain = _compute_size(rows_NF) / _compute_input_size(_find_input(args, kwargs))
        own_update: dict[str, Any] = {}
        if role in ("hidden", "readout"):
            start = self._starts.setdefault(self._make_key(layer), _Start(args, kwargs))
            self._is_measuring = True
            try:
                own_update = _measure_update(module, role, start)
            finally:
                self._is_measuring = False
        self._keep(layer, role, rows_NF, gain=gain, **own_update)

    def _keep(
        self,
        name: str,
        role: Role,
        rows: Tensor,
        *,
        change: float | None = None,
        head_dim: int = 0,
        **ratios: float,
    ) -> None:
        """Record the output of a layer. `ratios` are its update, gain, and rate where known."""
        name = self._make_key(name)
        first = self._first.setdefault(name, rows)
        self._readings[name] = LayerReading(
            layer=name,
            role=role,
            size=_compute_size(rows),
            change=_compute_size(rows - first) if change is None else change,
            head_dim=head_dim,
            **{name: ratio if math.isfinite(ratio) else None for name, ratio in ratios.items()},
        )

    def _make_key(self, name: str) -> str:
        """Return the name under which the next call of a module in this pass is recorded.

        Each call in one pass is a layer of its own: `wq`, then `wq#2`, `wq#3`, ...
        """
        number = 1 + sum(key == name or key.startswith(f"{name}#") for key in self._readings)
        return name if number == 1 else f"{name}#{number}"

    def _get_layer_name(self, name: str) -> str:
        """Return the name that a module is recorded under; empty if its block is not recorded."""
        for block, block_name in self._blocks.items():
            if name.startswith(f"{block}."):
                return block_name + name[len(block) :] if block_name else ""
        return name


def _name_blocks(module: nn.Module, by_depth: bool) -> dict[str, str]:
    """Return the name under which each member of an outermost module list is recorded.

    By depth, only the first, middle and last member are recorded; the names of the others are
    empty.
    """
    lists = [name for name, child in module.named_modules() if isinstance(child, nn.ModuleList)]
    names: dict[str, str] = {}
    for outer in lists:
        if any(outer.startswith(f"{parent}.") for parent in lists):
            continue
        count = len(list(module.get_submodule(outer).children()))
        places = {0: "first", count // 2: "middle", count - 1: "last"}
        for index in range(count):
            place = places.get(index, "") if by_depth else str(index)
            names[f"{outer}.{index}"] = f"{outer}.{place}" if place else ""
    return names


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _find_role(name: str, module: nn.Module, kinds: Mapping[str, Kind]) -> Role:
    """Return the role of a module, by the kind of its first parameter."""
    parameter = next(parameter for parameter, _ in module.named_parameters(recurse=False))
    kind = kinds.get(f"{name}.{parameter}" if name else parameter)
    # Only the parameter of a tied readout has no kind of its own
    return "readout" if kind is None else _ROLES.get(kind, "norm")


def _find_tensor(values: Any) -> Tensor | None:
    """Return the first tensor of a module's inputs or outputs; None if there is none."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, (tuple, list)):
        return next((item for item in values if isinstance(item, Tensor)), None)
    return None


def _find_input(args: Any, kwargs: Any) -> Tensor | None:
    """Return the first tensor of a module's input; None if there is none."""
    return _find_tensor(args or tuple(kwargs.values()))


def _measure_update(module: nn.Module, role: Role, start: _Start) -> dict[str, float]:
    """Return the effects of a module's update since step 0, by the names of `LayerReading`.

    The effects are measured on the input of step 0 and on an unrelated input. They are empty if the
    module's output has no tensor.
    """
    # Call `forward` directly, without hooks: a hook may multiply the output, which is not part of
    # the matrix.
    out = _find_tensor(module.forward(*start.args, **start.kwargs))
    if out is None:
        return {}
    rows_NF = _to_rows(out)
    if start.output is None:
        start.output, start.unrelated = rows_NF, _make_unrelated_input(module, start)
    effect = _compute_size(rows_NF - start.output)
    input_size = _compute_input_size(start.batch_input)
    measures = {"update": effect / input_size}
    if role == "readout":
        measures["change"] = effect
    if start.unrelated is not None:
        unrelated_NF = _compute_odd_part(module, start, start.unrelated)
        if start.unrelated_output is None:
            start.unrelated_output = unrelated_NF
        fan_in = start.unrelated.shape[-1]
        rate = _compute_size(unrelated_NF - start.unrelated_output) * math.sqrt(fan_in)
        # The input of the readout contains its multiplier, which must count: only the rate of a
        # hidden matrix is relative to its input.
        measures["rate"] = rate / input_size if role == "hidden" else rate
    return measures


def _make_unrelated_input(module: nn.Module, start: _Start) -> Tensor | None:
    """Return Gaussian noise of the shape and size of a module's input.

    Returns None if the noise would not show the rate: the input is not floating point, the fan-in
    is unknown, or the module is not linear.
    """
    batch_input = start.batch_input
    if batch_input is None or not batch_input.is_floating_point() or not batch_input.dim():
        return None
    if not any(
        batch_input.shape[-1] in weights.shape
        for weights in module.parameters(recurse=False)
        if weights.dim() > 1
    ):
        return None
    # Use a separate generator, so that the run's random numbers do not change.
    noise = torch.randn(batch_input.shape, generator=torch.Generator().manual_seed(0))
    noise = noise.to(batch_input.device)
    batch_root_mean_square = batch_input.float().square().mean().sqrt()
    unrelated = (noise * batch_root_mean_square).to(batch_input.dtype)
    # Random input shows the size of an update only if twice the input gives twice the output.
    once_NF = _compute_odd_part(module, start, unrelated)
    twice_NF = _compute_odd_part(module, start, 2 * unrelated)
    deviation = _compute_size(twice_NF - 2 * once_NF)
    return unrelated if deviation <= MAX_NONLINEAR_SHARE * _compute_size(twice_NF) else None


def _compute_odd_part(module: nn.Module, start: _Start, unrelated: Tensor) -> Tensor:
    """Return half the difference of the outputs for an input and its negative.

    A bias cancels in the difference.
    """

    def run(replacement: Tensor) -> Tensor:
        def replace_input(value: Any) -> Any:
            return replacement if value is start.batch_input else value

        args = map(replace_input, start.args)
        kwargs = {name: replace_input(value) for name, value in start.kwargs.items()}
        out = _find_tensor(module.forward(*args, **kwargs))
        assert out is not None, "the module returned a tensor for the input of step 0"
        return _to_rows(out)

    return (run(unrelated) - run(-unrelated)) / 2


def _compute_input_size(batch_input: Tensor | None) -> float:
    """Return the size of a module's input, by which effects are divided: 1 for ids and for no
    tensor, NaN if the size is 0.
    """
    return 1.0 if batch_input is None else _compute_size(_to_rows(batch_input)) or math.nan


def _to_rows(x: Tensor) -> Tensor:
    """Return a tensor [..., F] as rows [N, F], in at least float32.

    At most `PROBE_TOKENS` evenly spaced rows are kept.
    """
    x_NF = x.detach().reshape(-1, x.shape[-1]) if x.dim() else x.detach().reshape(1, 1)
    x_NF = x_NF[:: math.ceil(len(x_NF) / PROBE_TOKENS)]
    return x_NF.float() if x_NF.dtype in (torch.bfloat16, torch.float16) else x_NF.clone()


def _compute_size(x: Tensor) -> float:
    """Return the mean absolute value of a tensor; 1 for ids."""
    return float(x.abs().mean(dtype=torch.float64)) if x.is_floating_point() else 1.0


class _AttentionLogits(TorchFunctionMode):
    """A mode of torch that passes the logits of every attention to a function."""

    def __init__(self, keep: Callable[[Tensor, int], None]) -> None:
        super().__init__()
        self._keep = keep

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            query = args[0] if args else (kwargs or {})["query"]
            self._keep(compute_attention_logits(*args, **(kwargs or {})), query.shape[-1])
        return func(*args, **(kwargs or {}))


def compute_attention_logits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the attention logits of the positions that are not masked, as one row [1, X].

    A logit is a dot product of a query and a key times the scale. The arguments are those of
    `scaled_dot_product_attention`: query [..., H, T, E], key [..., G, S, E]. At most `LOGIT_ROWS`
    evenly spaced queries are used, including the last query.
    """
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    sequences = max(1, query.shape[:-3].numel())
    stride = max(1, num_queries * sequences // LOGIT_ROWS)
    at_R = torch.arange(num_queries - 1, -1, -stride, device=query.device)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    dtype = torch.promote_types(query.dtype, torch.float32)  # at least float32
    logits = (
        query[..., at_R, :].to(dtype)
        @ key.to(dtype).mT
        * (query.shape[-1] ** -0.5 if scale is None else scale)
    )
    allowed = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
    if is_causal:
        allowed = allowed.tril()
    if attn_mask is not None:
        # A mask of numbers is added to the logits. It hides a logit by -inf, or by nearly the
        # smallest number
        allowed_by_mask = (
            attn_mask
            if attn_mask.dtype == torch.bool
            else attn_mask > torch.finfo(attn_mask.dtype).min / 2
        )
        allowed = allowed & allowed_by_mask
    return logits[allowed[..., at_R, :].expand_as(logits)][None]
