"""Sizes of every layer's output on a batch that the model was trained on, for the coordinate check.

`read_run` trains a run and reads it on the way, on this process's device: a worker's, as training
is.

Works on any module by hooks: the output of every module that owns parameters, of every block (a
member of an outermost `nn.ModuleList`: the residual stream), and the logits of every call of
`scaled_dot_product_attention`. Sizes are mean absolute values, mup's own (`mup.coord_check`,
statistic `l1`).
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

from proxies.coordinates.coordinates import CoordinateProbe, RunReadings, recorded_steps
from proxies.coordinates.verdict import LayerReading, Role
from proxies.core.numbers import Kind
from proxies.core.spec import RunSpec
from proxies.data.tokens import TokenStore
from proxies.parametrization.parametrization import parameter_table
from proxies.training.outcome import batch_of
from proxies.training.solo import Solo
from proxies.training.trainable_model import BuiltModel

PROBE_TOKENS = 512
"""Tokens of the probe batch (at least one sequence), and the most rows kept of an output to compare
with later."""
LOGIT_ROWS = 128
"""Queries, over all sequences, whose attention logits are looked at: their number grows with the
square of length."""
MAX_NONLINEAR_SHARE = 0.05
"""Maximum deviation from linearity of a module whose rate is measured; the rounding of bfloat16 is
far below it."""
_ROLES: dict[Kind, Role] = {"embedding": "embedding", "hidden": "hidden", "readout": "readout"}


@dataclass(slots=True)
class _Start:
    """A matrix at step 0: its input with its size and its output, and an unrelated input with its
    output.
    """

    args: Any
    kwargs: Any
    entering: float
    output: Tensor | None = None
    unrelated: Tensor | None = None
    """Gaussian noise of the input's shape and size; None if the fan-in is unknown or the module is
    not linear."""
    unrelated_output: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _OwnUpdate:
    """Effect of a matrix's own update since step 0."""

    effect: float
    """Size of the change in the output for the input of step 0."""
    entering: float
    """Size of that input."""
    rate: float
    """Size of the change for unrelated input of that size, times the root of the fan-in; NaN if
    unknown."""


def read_run(
    probe: CoordinateProbe, store: TokenStore, build: Callable[[RunSpec], BuiltModel] | None = None
) -> RunReadings:
    """Train the run of a probe, uncompiled and alone, and read its layers at the steps that are
    recorded.

    Args:
        probe: the run.
        store: its corpus.
        build: makes the model of a run that names a factory.
    """
    # Hooks do not see into a compiled model; and a run of a bank's is measured alone.
    spec = dataclasses.replace(
        probe.spec, numerics=dataclasses.replace(probe.spec.numerics, compiled=False, num_slots=1)
    )
    kinds: dict[str, Kind] = {}

    def built(wanted: RunSpec) -> BuiltModel:
        assert build is not None
        model = build(wanted)
        kinds.update({numbers.name: numbers.kind for numbers in model.numbers})
        return model

    # A loss that is merely large is what is being measured.
    solo = Solo(store, build=None if build is None else built, diverged_above_nats=math.inf)
    solo.admit(0, spec)
    if not kinds:
        kinds.update({numbers.name: numbers.kind for numbers in parameter_table(spec)})
    # The batch of the first update: on other tokens, an update made from few is mostly noise
    num_sequences = max(1, min(spec.batch_sequences, PROBE_TOKENS // spec.shape.seq_len))
    ids_BT = batch_of(store, spec, 0, num_sequences)[:, :-1]
    watched = ActivationProbe(solo.model, kinds, by_depth=probe.axis == "depth")
    found: list[tuple[LayerReading, ...]] = []
    steps = recorded_steps(spec.schedule.num_steps - 1)
    for before, step in zip((0, *steps), steps, strict=False):
        if ended := solo.advance(step - before):
            return RunReadings(steps=tuple(found), not_finite_step=ended[0][1].num_steps + 1)
        layers = tuple(watched.record(solo.predict, ids_BT).values())
        if not all(layer.finite for layer in layers):
            return RunReadings(steps=tuple(found), not_finite_step=max(step, 1))
        found.append(layers)
    return RunReadings(steps=tuple(found))


class ActivationProbe:
    """Watches one model through its training. Make it before the first step: what it finds is the
    start.

    Args:
        module: the model, uncompiled.
        kinds: of its parameters, by name; a module whose parameters have none shares them, as a
            tied readout does.
        by_depth: name blocks `first`, `middle` and `last`, so that models of other depths have the
            same names.
    """

    def __init__(
        self, module: nn.Module, kinds: Mapping[str, Kind], *, by_depth: bool = False
    ) -> None:
        self._module = module
        self._blocks = _blocks(module, by_depth)
        self._roles = {
            name: _role(name, owner, kinds)
            for name, owner in module.named_modules()
            if _owns(owner)
        }
        self._first: dict[str, Tensor] = {}
        self._starts: dict[str, _Start] = {}
        self._within: list[str] = []
        self._is_measuring = False
        """Whether a matrix's own update is being measured, so that its forward pass must not be
        recorded."""
        self._found: dict[str, LayerReading] = {}

    @torch.no_grad()
    def record(
        self, predict: Callable[[Tensor], Tensor], ids_BT: Tensor
    ) -> dict[str, LayerReading]:
        """One forward pass of `predict` (logits [N, V] of ids [B, T]); every layer's reading, in
        order of the calls.
        """
        self._found = {}
        with ExitStack() as stack:
            stack.enter_context(self._hooked())
            stack.enter_context(_AttentionLogits(self._keep_logits))
            logits_NV = predict(ids_BT)
        size = _size(_rows(logits_NV))
        for name, reading in self._found.items():
            if reading.role == "readout":
                # A multiplier after the readout counts: the logits are what the loss sees.
                after = size / reading.size if reading.size else 1.0
                rate = None if reading.rate is None else reading.rate * after
                change = reading.change * after
                self._found[name] = dataclasses.replace(
                    reading, size=size, change=change, rate=rate
                )
        return self._found

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        handles = []
        for name in self._blocks:
            block = self._module.get_submodule(name)
            handles.append(block.register_forward_pre_hook(functools.partial(self._enter, name)))
            handles.append(block.register_forward_hook(functools.partial(self._leave, name)))
        for name in self._roles:
            owner = self._module.get_submodule(name)
            handles.append(
                owner.register_forward_hook(functools.partial(self._called, name), with_kwargs=True)
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
        shown = self._blocks[name]
        if shown and (out := _tensor(output)) is not None:
            self._keep(f"{shown}.stream", "stream", _rows(out))

    def _keep_logits(self, logits_X: Tensor, head_dim: int) -> None:
        if self._is_measuring:
            return
        name = self._within[-1] if self._within else ""
        shown = self._blocks.get(name, "")
        if shown or not name:
            where = f"{shown}.attention_logits" if shown else "attention_logits"
            self._keep(where, "attention_logits", logits_X, head_dim=head_dim)

    def _called(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        out, shown = _tensor(output), self._shown(name)
        if self._is_measuring or out is None or not shown:
            return
        rows_NF, role = _rows(out), self._roles[name]
        entering = _entering(args, kwargs)
        own = (
            self._measure_update(self._key(shown), module, args, kwargs)
            if role in ("hidden", "readout")
            else None
        )
        # The readout's input holds its multiplier: only a hidden matrix's update counts relative to
        # its input
        scale = own.entering if own and role == "hidden" else 1.0
        self._keep(
            shown,
            role,
            rows_NF,
            update=own.effect / (own.entering or math.nan) if own else math.nan,
            rate=own.rate / (scale or math.nan) if own else math.nan,
            gain=_size(rows_NF) / (entering or math.nan),
            change=own.effect if own and role == "readout" else None,
        )

    def _measure_update(
        self, key: str, module: nn.Module, args: Any, kwargs: Any
    ) -> _OwnUpdate | None:
        self._is_measuring = True
        try:
            return self._own_update(key, module, args, kwargs)
        finally:
            self._is_measuring = False

    def _own_update(self, key: str, module: nn.Module, args: Any, kwargs: Any) -> _OwnUpdate | None:
        """Measure the effect of the update since step 0 on the input of step 0 and on unrelated
        input.
        """
        start = self._starts.setdefault(
            key, _Start(args=args, kwargs=kwargs, entering=_entering(args, kwargs))
        )
        # `forward`, not a call: no hook is to see this, and a multiplier's hook on the output is
        # none of its own.
        out = _tensor(module.forward(*start.args, **start.kwargs))
        if out is None:
            return None
        rows_NF = _rows(out)
        if start.output is None:
            start.output, start.unrelated = rows_NF, _unrelated_input(module, start)
        rate = math.nan
        if start.unrelated is not None:
            unrelated_NF = _odd_part(module, start, start.unrelated)
            if start.unrelated_output is None:
                start.unrelated_output = unrelated_NF
            rate = _size(unrelated_NF - start.unrelated_output) * math.sqrt(
                start.unrelated.shape[-1]
            )
        return _OwnUpdate(effect=_size(rows_NF - start.output), entering=start.entering, rate=rate)

    def _keep(
        self,
        name: str,
        role: Role,
        rows: Tensor,
        *,
        update: float = math.nan,
        gain: float = math.nan,
        rate: float = math.nan,
        change: float | None = None,
        head_dim: int = 0,
    ) -> None:
        name = self._key(name)
        first = self._first.setdefault(name, rows)
        self._found[name] = LayerReading(
            layer=name,
            role=role,
            size=_size(rows),
            change=_size(rows - first) if change is None else change,
            update=_known(update),
            gain=_known(gain),
            rate=_known(rate),
            head_dim=head_dim,
        )

    def _key(self, name: str) -> str:
        """The name of this call: a module called again in one pass is another layer."""
        calls = 1 + sum(key == name or key.startswith(f"{name}#") for key in self._found)
        return name if calls == 1 else f"{name}#{calls}"

    def _shown(self, name: str) -> str:
        """The name a module is recorded under; empty for one in a block that is not."""
        for block, shown in self._blocks.items():
            if name.startswith(f"{block}."):
                return shown + name[len(block) :] if shown else ""
        return name


def _blocks(module: nn.Module, by_depth: bool) -> dict[str, str]:
    """Names of the members of outermost module lists, and what they are recorded as; by depth some
    are not: empty.
    """
    lists = [name for name, child in module.named_modules() if isinstance(child, nn.ModuleList)]
    found: dict[str, str] = {}
    for outer in lists:
        if any(outer.startswith(f"{other}.") for other in lists):
            continue
        count = len(list(module.get_submodule(outer).children()))
        places = {0: "first", count // 2: "middle", count - 1: "last"}
        for index in range(count):
            place = places.get(index, "") if by_depth else str(index)
            found[f"{outer}.{index}"] = f"{outer}.{place}" if place else ""
    return found


def _owns(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _role(name: str, module: nn.Module, kinds: Mapping[str, Kind]) -> Role:
    own = [
        f"{name}.{parameter}" if name else parameter
        for parameter, _ in module.named_parameters(recurse=False)
    ]
    kind = kinds.get(own[0])
    return "readout" if kind is None else _ROLES.get(kind, "norm")


def _tensor(output: Any) -> Tensor | None:
    """The first tensor of what a module takes or gives."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, (tuple, list)):
        return next((item for item in output if isinstance(item, Tensor)), None)
    return None


def _unrelated_input(module: nn.Module, start: _Start) -> Tensor | None:
    """Return Gaussian noise like the first tensor of a module's input; None if it would not show
    the rate.
    """
    given = _tensor(start.args or tuple(start.kwargs.values()))
    if given is None or not given.is_floating_point() or not given.dim():
        return None
    if not any(
        given.shape[-1] in weights.shape
        for weights in module.parameters(recurse=False)
        if weights.dim() > 1
    ):
        return None
    # A generator of its own: the run's random numbers stay as they were
    noise = torch.randn(given.shape, generator=torch.Generator().manual_seed(0)).to(given.device)
    unrelated = (noise * given.float().square().mean().sqrt()).to(given.dtype)
    once_NF, twice_NF = _odd_part(module, start, unrelated), _odd_part(module, start, 2 * unrelated)
    # The size of an update is known by sampling only where twice the input gives twice the output
    return (
        unrelated
        if _size(twice_NF - 2 * once_NF) <= MAX_NONLINEAR_SHARE * _size(twice_NF)
        else None
    )


def _odd_part(module: nn.Module, start: _Start, unrelated: Tensor) -> Tensor:
    """Return half the difference of the outputs for an input and for its negative, in which a bias
    cancels.
    """
    given = _tensor(start.args or tuple(start.kwargs.values()))

    def run(replacement: Tensor) -> Tensor:
        args = tuple(replacement if value is given else value for value in start.args)
        kwargs = {
            name: replacement if value is given else value for name, value in start.kwargs.items()
        }
        out = _tensor(module.forward(*args, **kwargs))
        assert out is not None, "the module gave a tensor at the input of step 0"
        return _rows(out)

    return (run(unrelated) - run(-unrelated)) / 2


def _entering(args: Any, kwargs: Any) -> float:
    """Size of the first tensor a module is called with; 1 for ids."""
    given = _tensor(args or tuple(kwargs.values()))
    return 1.0 if given is None else _size(_rows(given))


def _rows(x: Tensor) -> Tensor:
    """[..., F] as [N, F], at most `PROBE_TOKENS` rows evenly spread, in float32 at least."""
    x_NF = x.detach().reshape(-1, x.shape[-1]) if x.dim() else x.detach().reshape(1, 1)
    x_NF = x_NF[:: -(-len(x_NF) // PROBE_TOKENS)]
    return x_NF.float() if x_NF.dtype in (torch.bfloat16, torch.float16) else x_NF.clone()


def _known(ratio: float) -> float | None:
    return ratio if math.isfinite(ratio) else None


def _size(x: Tensor) -> float:
    return float(x.abs().mean(dtype=torch.float64)) if x.is_floating_point() else 1.0


class _AttentionLogits(TorchFunctionMode):
    """Hands on the logits of every attention that is computed while it is entered."""

    def __init__(self, keep: Callable[[Tensor, int], None]) -> None:
        super().__init__()
        self._keep = keep

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            query = args[0] if args else (kwargs or {})["query"]
            self._keep(attention_logits(*args, **(kwargs or {})), query.shape[-1])
        return func(*args, **(kwargs or {}))


def attention_logits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Dot products q . k times the scale, where attention may look: one row, [1, X].

    Takes the arguments of `scaled_dot_product_attention`: query [..., H, T, E], key [..., G, S, E].
    At most `LOGIT_ROWS` queries are looked at, evenly spread, the last one among them.
    """
    num_queries, num_keys = query.shape[-2], key.shape[-2]
    sequences = max(1, query.shape[:-3].numel())
    stride = max(1, num_queries * sequences // LOGIT_ROWS)
    at_R = torch.arange(num_queries - 1, -1, -stride, device=query.device)
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    wide = torch.promote_types(query.dtype, torch.float32)
    logits = (
        query[..., at_R, :].to(wide)
        @ key.to(wide).mT
        * (query.shape[-1] ** -0.5 if scale is None else scale)
    )
    allowed = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
    if is_causal:
        allowed = allowed.tril()
    if attn_mask is not None:
        seen = (
            attn_mask
            if attn_mask.dtype == torch.bool
            else attn_mask > torch.finfo(attn_mask.dtype).min / 2
        )
        allowed = allowed & seen
    return logits[allowed[..., at_R, :].expand_as(logits)][None]
