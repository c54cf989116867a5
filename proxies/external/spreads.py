"""How widely a factory's initial tensors are spread, measured; and what brings them to a parametrization's law.

A factory starts its weights by a law of its own (constant 0.02, 1 / sqrt(fan-in), ...). At the base shape that law
stands. Elsewhere a tensor is multiplied by the wanted ratio of stds, wide over base, over its own law's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch import nn

from proxies.core.shape import Shape
from proxies.external.construction import Build, construct

SAMPLES = 50_000
"""Elements an std is measured from: its standard error is then 0.3 %, that of a ratio of two 0.45 %."""
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
        """Drawn around zero: what a law of stds applies to. Values scattered around one are left alone."""
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
        self.least, self.most = min(self.least, values.min().item()), max(self.most, values.max().item())

    def spread(self) -> Spread:
        mean = self.total / self.num_elements
        constant = self.least == self.most
        std = 0.0 if constant else math.sqrt(max(0.0, self.squares / self.num_elements - mean * mean))
        return Spread(mean=mean, std=std, constant=constant)


def block_prefixes(module: nn.Module, num_layers: int) -> frozenset[str]:
    """Paths of the lists of blocks: module lists, and whatever else is numbered from 0 to `num_layers` - 1."""
    members: dict[str, set[str]] = {}
    for name, _ in module.named_parameters():
        if (prefix := _numbered(name)) is not None:
            members.setdefault(prefix, set()).add(name[len(prefix) :].split(".")[0])
    layers = {str(i) for i in range(num_layers)}
    named = dict(module.named_modules())
    listed = {prefix for prefix in members if isinstance(named.get(prefix.rstrip(".")), nn.ModuleList)}
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
