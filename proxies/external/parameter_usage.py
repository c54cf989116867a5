"""Find out how a factory's model uses its parameters, in one forward and one backward pass.

The passes also show whether the model can be a proxy at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from forerun._proxies.core.shape import Shape
from forerun._proxies.external.construction import Build, compute_logits, construct, describe_error

MAX_SEQUENCE_TOKENS = 64
"""Length of the sequences that the model is called with, at most."""
How = Literal["table", "map", "convolution", "other"]
"""Way in which a module uses a parameter (`ParameterUse.how`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterUse:
    """The way in which a module uses one of its own parameters."""

    module: str
    """Path of the module."""
    how: How
    """`table`: looked up by ids; `map`: a product over the last dimension, [out, in];
    `convolution`: [out, in, tap]."""
    called: bool
    """Whether the module itself is called, so that a hook on it runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelUsage:
    """The use of a model's parameters in a forward and a backward pass, and the problems found."""

    uses: dict[str, tuple[ParameterUse, ...]]
    """Uses of each parameter with two or more dimensions; a tied one has several."""
    called: frozenset[str]
    """Paths of the modules that the model calls."""
    problems: tuple[str, ...]


@dataclass(slots=True)
class _Call:
    """The last call of a module."""

    takes_ids: bool
    sizes: tuple[int, int]
    """Last dimensions of the module's input and output."""


@lru_cache(maxsize=32)
def find_usage(build: Build, shape: Shape) -> ModelUsage:
    """Build the model of a shape, and find out how it uses its parameters.

    Raises:
        FactoryError: The factory fails.
    """
    # Roles do not depend on the sequence length, and the logits of a long sequence over a large
    # vocabulary take gigabytes.
    shape = dataclasses.replace(shape, seq_len=min(shape.seq_len, MAX_SEQUENCE_TOKENS))
    module = construct(build, shape)
    calls: dict[str, _Call] = {}
    called: set[str] = set()
    handles = [
        child.register_forward_hook(_make_recorder(name, calls, called), with_kwargs=True)
        for name, child in module.named_modules()
    ]
    problems = _find_seed_problems(module, construct(build, shape))
    problems += _find_pass_problems(module.train(), shape)
    for handle in handles:
        handle.remove()

    # Collect the uses of each parameter over all modules that own it.
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    uses: dict[str, tuple[ParameterUse, ...]] = {}
    for path, child in module.named_modules():
        for parameter in child._parameters.values():
            if parameter is not None and parameter.dim() > 1:
                name = names[id(parameter)]
                use = _find_use(path, child, parameter, calls.get(path))
                uses[name] = (*uses.get(name, ()), use)
    return ModelUsage(uses=uses, called=frozenset(called), problems=tuple(problems))


def _make_recorder(name: str, calls: dict[str, _Call], called: set[str]) -> Callable[..., None]:
    """Return a forward hook that records the calls of a module."""

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        called.add(name)
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        first = next(tensors, None)
        if first is not None and isinstance(output, Tensor):
            size = first.shape[-1] if first.dim() else 0
            calls[name] = _Call(
                takes_ids=not first.is_floating_point(), sizes=(size, output.shape[-1])
            )

    return hook


def _find_use(
    path: str, module: nn.Module, parameter: nn.Parameter, call: _Call | None
) -> ParameterUse:
    """Find out how a module uses one of its parameters.

    The module's type decides. For a module of the user's own class without submodules, the sizes of
    its input and output decide.
    """
    how: How = "other"
    is_leaf = call is not None and next(module.children(), None) is None
    if isinstance(module, nn.Embedding) or (is_leaf and call and call.takes_ids):
        how = "table"
    elif isinstance(module, nn.Linear) or (
        # A parameter [out, in] between an input and an output of these sizes
        is_leaf and call and call.sizes == tuple(parameter.shape)[::-1]
    ):
        how = "map"
    elif isinstance(module, nn.modules.conv._ConvNd) and not module.transposed:
        how = "convolution"
    return ParameterUse(module=path, how=how, called=call is not None)


def _find_seed_problems(module: nn.Module, second_module: nn.Module) -> list[str]:
    """Return a problem if two models that were built with the same seed have different weights."""
    first, second = dict(module.named_parameters()), dict(second_module.named_parameters())
    different = [
        name for name in first if name not in second or not torch.equal(first[name], second[name])
    ]
    if not different:
        return []
    return [
        (
            f"starts {list_names(different)} from different values at every call: draw them from "
            "torch's generator, which is seeded"
        )
    ]


def _find_pass_problems(module: nn.Module, shape: Shape) -> list[str]:
    """Return the problems that a forward and a backward pass over random ids show."""
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(shape.vocab_size, (2, shape.seq_len), generator=generator)
    # Keep torch's own generator as it is: the caller may be drawing initial values.
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            logits_BTV = compute_logits(module, ids_BT)
            expected = (*ids_BT.shape, shape.vocab_size)
            if not isinstance(logits_BTV, Tensor) or tuple(logits_BTV.shape) != expected:
                returned = (
                    list(logits_BTV.shape)
                    if isinstance(logits_BTV, Tensor)
                    else type(logits_BTV).__name__
                )
                return [
                    (
                        f"its model returns {returned} for ids {list(ids_BT.shape)}: it must be "
                        f"logits {list(expected)}"
                    )
                ]
            if not logits_BTV.isfinite().all():
                return [
                    f"its model's logits are not finite at width {shape.width}, before any step"
                ]
            logits_BTV.square().mean().backward()  # type: ignore[no-untyped-call]
            unreached = [
                name for name, parameter in module.named_parameters() if parameter.grad is None
            ]
            with torch.no_grad():
                problems = _find_repeat_problems(module, ids_BT, logits_BTV)
            if unreached:
                problems.append(
                    f"{list_names(unreached)}: does not affect the logits, so it gets no "
                    "gradient: remove it"
                )
            return problems
        except Exception as error:
            return [
                (
                    f"its model fails on ids {list(ids_BT.shape)} at width {shape.width}: "
                    f"{describe_error(error)}"
                )
            ]


def _find_repeat_problems(module: nn.Module, ids_BT: Tensor, logits_BTV: Tensor) -> list[str]:
    """Return a problem if another call gives other logits, or a token affects earlier logits."""
    if not torch.equal(compute_logits(module, ids_BT), logits_BTV):
        return [
            (
                "its model gives different logits at every call, as with dropout: set its random "
                "parts to zero"
            )
        ]
    # Change the last token of each sequence to another id that occurs
    changed_BT = ids_BT.clone()
    changed_BT[:, -1] = (changed_BT[:, -1] + 1) % (int(ids_BT.max()) + 1)
    earlier_BTV = compute_logits(module, changed_BT)[:, :-1]
    if torch.allclose(earlier_BTV, logits_BTV[:, :-1], rtol=1e-3, atol=1e-5):
        return []
    return ["its model looks ahead: logits change with a later token; add a causal mask"]


def list_names(names: list[str]) -> str:
    """Return the first three names, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
