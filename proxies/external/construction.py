"""A user's model factory, called: what it may be, what it returns, and what went wrong, in words.

A factory is `build(shape) -> nn.Module`, or `build(shape, forward)` where it applies the attention
scale and the residual multiplier of `forward` itself. The module takes ids [B, T] (int64) and
returns logits [B, T, V], or an object with `.logits`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from proxies.core.notation import counted, with_article
from proxies.core.numbers import ForwardNumbers
from proxies.core.programs import FactoryError
from proxies.core.shape import Shape

# How widely a factory's initial tensors are spread, measured; and what brings them to a
# parametrization's law.
#
# A factory starts its weights by a law of its own (constant 0.02, 1 / sqrt(fan-in), ...). At the
# base shape that law stands. Elsewhere a tensor is multiplied by the wanted ratio of stds, wide
# over base, over its own law's.

SAMPLES = 50_000
"""Elements an std is measured from: its standard error is then 0.3 %, that of a ratio of two 0.45
%."""
MAX_BUILDS = 64
MAX_ELEMENTS = 2 * 10**8
"""Drawn per shape in all: a large model is built once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The values a group of parameters starts from."""

    mean: float
    std: float
    """0 where all are one constant."""
    constant: bool

    @property
    def random(self) -> bool:
        """Drawn around zero: what a law of stds applies to. Values scattered around one are left
        alone.
        """
        return not self.constant and self.std > abs(self.mean)


@dataclass(slots=True)
class _Sum:
    total: float = 0.0
    squares: float = 0.0
    num_elements: int = 0
    least: float = math.inf
    most: float = -math.inf

    def add(self, parameter: nn.Parameter) -> None:
        values = parameter.detach().double()
        self.total += values.sum().item()
        self.squares += values.square().sum().item()
        self.num_elements += values.numel()
        self.least, self.most = (
            min(self.least, values.min().item()),
            max(self.most, values.max().item()),
        )

    def spread(self) -> Spread:
        mean = self.total / self.num_elements
        constant = self.least == self.most
        std = (
            0.0 if constant else math.sqrt(max(0.0, self.squares / self.num_elements - mean * mean))
        )
        return Spread(mean=mean, std=std, constant=constant)


def block_prefixes(module: nn.Module, num_layers: int) -> frozenset[str]:
    """Paths of the lists of blocks: module lists, and whatever else is numbered from 0 to
    `num_layers` - 1.
    """
    members: dict[str, set[str]] = {}
    for name, _ in module.named_parameters():
        if (prefix := _numbered(name)) is not None:
            members.setdefault(prefix, set()).add(name[len(prefix) :].split(".")[0])
    layers = {str(i) for i in range(num_layers)}
    named = dict(module.named_modules())
    listed = {
        prefix for prefix in members if isinstance(named.get(prefix.rstrip(".")), nn.ModuleList)
    }
    return frozenset(listed | {prefix for prefix, found in members.items() if found == layers})


def _numbered(name: str) -> str | None:
    """The path before its first number, with its last dot."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return None if first is None else "".join(f"{part}." for part in parts[:first])


def group_of(name: str, blocks: frozenset[str]) -> str:
    """One name for a parameter in all blocks: `layers.*.attention.wq.weight`."""
    prefix = _numbered(name)
    if prefix is None or prefix not in blocks:
        return name
    return f"{prefix}*.{name[len(prefix) :].partition('.')[2]}"


@lru_cache(maxsize=32)
def spreads(build: Build, shape: Shape) -> Mapping[str, Spread]:
    """The spread of every group of parameters, from as many models as it takes (seeds 0, 1, ...).

    Raises:
        FactoryError: the factory fails.
    """
    sums: dict[str, _Sum] = {}
    drawn = 0
    for seed in range(MAX_BUILDS):
        module = construct(build, shape, seed=seed)
        blocks = block_prefixes(module, shape.num_layers)
        for name, parameter in module.named_parameters():
            if parameter.numel():
                sums.setdefault(group_of(name, blocks), _Sum()).add(parameter)
                drawn += parameter.numel()
        varied = [group for group in sums.values() if group.least < group.most]
        enough = min((group.num_elements for group in varied), default=SAMPLES) >= SAMPLES
        if enough or drawn > MAX_ELEMENTS:
            break
    return {name: group.spread() for name, group in sums.items()}


Build = Callable[..., nn.Module]


def neutral(shape: Shape) -> ForwardNumbers:
    """The forward multipliers of a plain model: 1 / sqrt(head_dim) in the attention, nothing
    else.
    """
    return ForwardNumbers(
        embedding=1.0, attention=1 / math.sqrt(shape.head_dim), residual=1.0, output=1.0
    )


def name_of(build: Build) -> str:
    """`module:function`, for messages."""
    return f"{getattr(build, '__module__', '?')}:{getattr(build, '__qualname__', repr(build))}"


@lru_cache(maxsize=32)
def with_values(build: Build, values: tuple[tuple[str, float | int | str], ...]) -> Build:
    """The factory with values of a plan's own axes as keywords: one object for equal values."""
    bound: Any = partial(build, **dict(values))
    bound.__module__, bound.__qualname__ = build.__module__, name_of(build).partition(":")[2]
    return cast(Build, bound) if values else build


_SIGNATURE = "must be build(shape) or build(shape, forward), with the plan's own axes as keywords"


def takes_forward(build: Build) -> bool:
    """Whether the factory takes the forward multipliers too.

    Raises:
        FactoryError: it takes neither `(shape)` nor `(shape, forward)`.
    """
    try:
        own = build.keywords if isinstance(build, partial) else {}
        signature = inspect.signature(build.func if isinstance(build, partial) else build)
        second = "forward" in signature.parameters
        signature.bind(None, **own, **({"forward": None} if second else {}))
    except (TypeError, ValueError) as error:
        raise FactoryError(name_of(build), [f"{_SIGNATURE}: {error}"]) from None
    return second


def construct(
    build: Build,
    shape: Shape,
    forward: ForwardNumbers | None = None,
    *,
    seed: int = 0,
    device: str = "cpu",
) -> nn.Module:
    """The factory's model of a shape, drawn from `seed`; torch's own generator is left as it was.

    Embedding and output multipliers are never handed on: hooks apply them, and twice would be once
    too often.

    Args:
        build: the factory.
        shape: of the model.
        forward: its attention scale and residual multiplier; None: a plain model's.
        seed: of torch's generator on the CPU.
        device: torch's default device meanwhile.

    Raises:
        FactoryError: wrong signature; it raised; what it returned is no module.
    """
    target, given = name_of(build), {}
    if takes_forward(build):
        given["forward"] = dataclasses.replace(forward or neutral(shape), embedding=1.0, output=1.0)
    # What it prints belongs to nobody's standard output: `--json` promises one object there.
    quiet = contextlib.redirect_stdout(sys.stderr)
    try:
        with torch.random.fork_rng(devices=[]), torch.device(device), quiet:
            torch.default_generator.manual_seed(seed)
            module = build(shape, **given)
    except (Exception, SystemExit) as error:
        said = (
            f"fails at width {shape.width} with {counted(shape.num_layers, 'layer')}: "
            f"{quoted(error)}"
        )
        raise FactoryError(target, [said]) from error
    if not isinstance(module, nn.Module):
        raise FactoryError(
            target,
            [
                (
                    f"returns {with_article(type(module).__name__)} at width {shape.width}: must "
                    "be a "
                    "torch.nn.Module"
                )
            ],
        )
    return module


def outline(build: Build, shape: Shape, forward: ForwardNumbers | None = None) -> nn.Module:
    """The model without its numbers, on the meta device; on the CPU where that fails."""
    try:
        return construct(build, shape, forward, device="meta")
    except FactoryError:
        return construct(build, shape, forward)


def logits_of(module: nn.Module, ids_BT: Tensor) -> Tensor:
    """Logits [B, T, V] of token ids [B, T]: what the module returns, or its `.logits`."""
    out: Any = module(ids_BT)
    logits_BTV: Tensor = getattr(out, "logits", out)
    return logits_BTV


def quoted(error: BaseException) -> str:
    """An error with the line of the user's code it came from: the innermost that is no installed
    package's.
    """
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, SyntaxError):
        return (
            f"{Path(error.filename or '?').name}, line {error.lineno}: "
            f"`{(error.text or '').strip()}`: {said}"
        )
    ours = Path(__file__).parents[1]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        installed = {"site-packages", "importlib"} & {*path.parts}
        if path.is_file() and not path.is_relative_to(ours) and not installed:
            return f"{path.name}, line {frame.lineno}: `{frame.line}`: {said}"
    return said
