"""A factory's model called once at the base shape: how each parameter is used, and whether it can be a proxy at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from proxies.core.shape import Shape
from proxies.external.construction import Build, construct, logits_of, quoted

LONGEST_SEQUENCE = 64
How = Literal["table", "map", "other"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """What one module does with a parameter of its own."""

    module: str
    how: How
    """`table`: looked up by ids. `map`: a product over its last dimension, [out, in]."""
    called: bool
    """Whether the module itself is called, so that a hook on it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What a forward and backward pass showed."""

    uses: dict[str, tuple[Use, ...]]
    """Per parameter of two or more dimensions; a tied one has several."""
    problems: tuple[str, ...]


@dataclass(slots=True)
class _Call:
    ids: bool
    sizes: tuple[int, int]
    """Last dimensions of what a module takes and gives."""


@lru_cache(maxsize=32)
def usage_of(build: Build, shape: Shape) -> Usage:
    """Build the model of a shape and call it.

    Raises:
        FactoryError: the factory fails.
    """
    # Roles do not depend on the length, and the logits of a long sequence over a large vocabulary take gigabytes.
    shape = dataclasses.replace(shape, seq_len=min(shape.seq_len, LONGEST_SEQUENCE))
    module = construct(build, shape)
    calls: dict[str, _Call] = {}
    handles = [
        child.register_forward_hook(_recorder(name, calls), with_kwargs=True)
        for name, child in module.named_modules()
        if any(p is not None and p.dim() > 1 for p in child._parameters.values())
    ]
    problems = _draws(module, construct(build, shape)) + _passes(module.train(), shape)
    for handle in handles:
        handle.remove()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    uses: dict[str, tuple[Use, ...]] = {}
    for path, child in module.named_modules():
        for parameter in child._parameters.values():
            if parameter is not None and parameter.dim() > 1:
                name = names[id(parameter)]
                uses[name] = (*uses.get(name, ()), _use(path, child, parameter, calls.get(path)))
    return Usage(uses=uses, problems=tuple(problems))


def _recorder(name: str, calls: dict[str, _Call]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if given is not None and isinstance(output, Tensor):
            last = given.shape[-1] if given.dim() else 0
            calls[name] = _Call(ids=not given.is_floating_point(), sizes=(last, output.shape[-1]))

    return hook


def _use(path: str, module: nn.Module, parameter: nn.Parameter, call: _Call | None) -> Use:
    """By the module's type; of one of the user's own that holds no others, by what it takes and gives."""
    how: How = "other"
    alone = call is not None and next(module.children(), None) is None
    if isinstance(module, nn.Embedding) or (alone and call and call.ids):
        how = "table"
    elif isinstance(module, nn.Linear) or (alone and call and call.sizes == tuple(parameter.shape)[::-1]):
        how = "map"
    return Use(module=path, how=how, called=call is not None)


def _draws(module: nn.Module, again: nn.Module) -> list[str]:
    """The same seed must give the same weights."""
    first, second = dict(module.named_parameters()), dict(again.named_parameters())
    unlike = [name for name in first if name not in second or not torch.equal(first[name], second[name])]
    said = f"starts {_some(unlike)} from other values at every call: draw from torch's generator, which is seeded"
    return [said] if unlike else []


def _passes(module: nn.Module, shape: Shape) -> list[str]:
    """What a forward and a backward pass over random ids shows to be wrong."""
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(shape.vocab_size, (2, shape.seq_len), generator=generator)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():  # the caller may be drawing initial values
        try:
            logits_BTV = logits_of(module, ids_BT)
            wanted = (*ids_BT.shape, shape.vocab_size)
            if not isinstance(logits_BTV, Tensor) or tuple(logits_BTV.shape) != wanted:
                got = list(logits_BTV.shape) if isinstance(logits_BTV, Tensor) else type(logits_BTV).__name__
                return [f"its model returns {got} for ids {list(ids_BT.shape)}: it must be logits {list(wanted)}"]
            if not logits_BTV.isfinite().all():
                return [f"its model's logits are not finite at width {shape.width}, before any step"]
            logits_BTV.square().mean().backward()  # type: ignore[no-untyped-call]
            unreached = [name for name, parameter in module.named_parameters() if parameter.grad is None]
            said = f"{_some(unreached)}: no part in the logits, so no gradient: remove it"
            with torch.no_grad():
                return _repeats(module, ids_BT, logits_BTV) + ([said] if unreached else [])
        except Exception as error:
            return [f"its model fails on ids {list(ids_BT.shape)} at width {shape.width}: {quoted(error)}"]


def _repeats(module: nn.Module, ids_BT: Tensor, logits_BTV: Tensor) -> list[str]:
    if not torch.equal(logits_of(module, ids_BT), logits_BTV):
        return ["its model gives other logits at every call, as dropout does: set what draws at random to zero"]
    changed_BT = ids_BT.clone()
    changed_BT[:, -1] = (changed_BT[:, -1] + 1) % (int(ids_BT.max()) + 1)
    early_BTV = logits_of(module, changed_BT)[:, :-1]
    close = torch.allclose(early_BTV, logits_BTV[:, :-1], rtol=1e-3, atol=1e-5)
    return [] if close else ["its model looks ahead: logits change with a later token; it needs a causal mask"]


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
