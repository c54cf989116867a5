"""What each parameter of a factory's model is, from the dimensions that grow with width and from how it is used.

A matrix between two dimensions that grow is hidden (arXiv 2203.03466, Table 8); a table that ids look up is an
embedding; the map from a width to the vocabulary is the readout. A matrix with one fixed side is treated by its own
fan-in: where that grows its std and rate shrink as any hidden matrix's, where it does not they stay.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from proxies.core.checks import SpecError
from proxies.core.numbers import Kind
from proxies.core.shape import Shape
from proxies.external.construction import Build, FactoryError, name_of, outline
from proxies.external.spreads import Spread, block_prefixes, group_of, spreads
from proxies.external.usage import Use, usage_of
from proxies.parametrization.parametrization import delta_shape, width_multipliers

Sizes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """What one parameter is."""

    name: str
    group: str
    """Its name with the block's number taken out."""
    size: tuple[int, ...]
    kind: Kind
    width_multiplier: float
    """Against the base: of its fan-in for a matrix, else mup's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """What the parameters of a model are, and where its multipliers can be applied."""

    parameters: tuple[Role, ...]
    embeddings: tuple[str, ...]
    """Modules whose output the embedding multiplier scales."""
    unscaled_embeddings: tuple[str, ...]
    """Parameters whose use no hook can scale."""
    readouts: tuple[str, ...]
    """Modules whose input the output multiplier scales."""
    notes: tuple[str, ...]


def roles_of(build: Build, shape: Shape, base: Shape) -> Roles:
    """The roles in the model of `shape`, whose width is compared with `base` (of the same depth).

    Raises:
        FactoryError: everything that stands in the way.
    """
    target, delta = name_of(build), delta_shape(shape, base)
    models, problems = _outlines(build, {"the model": shape, "base": base, "delta": delta})
    if problems:
        raise FactoryError(target, problems)
    here = models[0]
    problems = outline_problems(here)
    if problems and any(is_lazy(p) for p in here.parameters()):
        raise FactoryError(target, problems)
    sizes = [{name: tuple(p.shape) for name, p in model.named_parameters()} for model in models]
    multipliers: dict[str, tuple[float, int]] = {}
    if sizes[1] == sizes[2]:
        problems.append(
            f"no parameter grows from width {base.width} to {delta.width}: base and delta are one model, so nothing "
            "could be scaled (does the factory read shape.width?)"
        )
    else:
        try:
            multipliers = width_multipliers(sizes[0], sizes[1], sizes[2])
        except SpecError as error:
            problems += error.problems
    usage = usage_of(build, base)
    problems += usage.problems
    if problems:
        raise FactoryError(target, problems)
    blocks = block_prefixes(here, shape.num_layers)
    found = _Finder(sizes[0], sizes[1], sizes[2], usage.uses, blocks, spreads(build, base), shape.vocab_size)
    parameters = tuple(found.role(name, multipliers[name][0]) for name in sizes[0])
    if found.problems:
        raise FactoryError(target, found.problems)
    return found.roles(parameters)


def _outlines(build: Build, shapes: dict[str, Shape]) -> tuple[list[nn.Module], list[str]]:
    models, problems = [], []
    for shape in shapes.values():
        try:
            models.append(outline(build, shape))
        except FactoryError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    return models, problems


def outline_problems(module: nn.Module) -> list[str]:
    """What a model shows without being called: dropout, and parameters that cannot be trained or have no rule."""
    problems = _dropouts(module)
    parameters = dict(module.named_parameters())
    problems += [] if parameters else ["its model has no parameters"]
    for name, parameter in parameters.items():
        where = _starred(name)
        if is_lazy(parameter):
            problems.append(f"{where} has no size before the first call: no lazy module is wanted")
        elif not parameter.dtype.is_floating_point:
            problems.append(f"{where} is {str(parameter.dtype).removeprefix('torch.')}: make what is no float a buffer")
        elif not parameter.requires_grad:
            problems.append(f"{where} is frozen (requires_grad = False): make it a buffer")
        elif sum(size > 1 for size in parameter.shape) > 2:
            said = f"{where} has the dimensions {list(parameter.shape)}"
            problems.append(
                f"{said}: there are rules for vectors and matrices only (no convolution, no stacked experts)"
            )
    return list(dict.fromkeys(problems))


def _starred(name: str) -> str:
    """A path with its blocks' numbers taken out: what is wrong in one is wrong in all, and said once."""
    return re.sub(r"\.\d+\.", ".*.", name).lstrip(".")


def _dropouts(module: nn.Module) -> list[str]:
    """Dropout as modules, as attributes, and in the configuration that Hugging Face models carry."""
    found: dict[str, float] = {}
    for path, child in module.named_modules():
        if isinstance(child, nn.modules.dropout._DropoutNd):
            found[f"{path}.p"] = child.p
        config = getattr(child, "config", None)
        for where, holder in ((path, child), ("config", config)):
            for name, value in vars(holder).items() if hasattr(holder, "__dict__") else ():
                # A classifier's or a summary's is no part of the logits.
                named = ("dropout" in name or name.endswith("pdrop")) and not name.startswith(("classifier", "summary"))
                if named and isinstance(value, float):
                    found[f"{where}.{name}"] = value
    said = (
        f"{_starred(name)} = {value}: a proxy repeats exactly; set it to 0"
        for name, value in found.items()
        if value > 0
    )
    return list(dict.fromkeys(said))


class _Finder:
    """Assigns roles, and collects what has none."""

    def __init__(self, here: Sizes, base: Sizes, delta: Sizes, uses: Mapping[str, tuple[Use, ...]],
                 blocks: frozenset[str], starts: Mapping[str, Spread], vocab_size: int) -> None:  # fmt: skip
        self.here, self.base, self.delta, self.uses = here, base, delta, uses
        self.blocks, self.starts, self.vocab_size = blocks, starts, vocab_size
        self.problems: list[str] = []
        self.notes: dict[str, str] = {}

    def role(self, name: str, width_multiplier: float) -> Role:
        """One parameter's."""
        group, size = group_of(name, self.blocks), self.here[name]
        uses = self.uses.get(name, ())
        if self._is_vector(name):
            kind = self._vector(name, group)
        elif any(use.how == "table" for use in uses):
            kind = "embedding"
        elif uses[0].how == "map":
            kind, width_multiplier = self._map(name, uses[0])
        else:
            kind = self._unseen(name)
        return Role(name=name, group=group, size=size, kind=kind, width_multiplier=width_multiplier)

    def roles(self, parameters: tuple[Role, ...]) -> Roles:
        """All of them, and the modules that multipliers hook."""
        embeddings = [r.name for r in parameters if r.kind == "embedding" and not self._in_block(r.name)]
        tables = [use for name in embeddings for use in self.uses[name] if use.how == "table" and use.called]
        hooked = [name for name in embeddings if any(use in tables for use in self.uses[name])]
        readouts = [
            use.module
            for r in parameters
            for use in self.uses.get(r.name, ())
            if r.kind in ("readout", "embedding") and use.how == "map" and use.called and self._is_readout(r.name, use)
        ]
        return Roles(
            parameters=parameters,
            embeddings=tuple(dict.fromkeys(use.module for use in tables)),
            unscaled_embeddings=tuple(name for name in embeddings if name not in hooked),
            readouts=tuple(dict.fromkeys(readouts)),
            notes=tuple(self.notes.values()),
        )

    def _in_block(self, name: str) -> bool:
        return group_of(name, self.blocks) != name

    def _grows(self, name: str) -> tuple[bool, ...]:
        return tuple(here != there for here, there in zip(self.base[name], self.delta[name], strict=True))

    def _is_vector(self, name: str) -> bool:
        """One dimension, or several of which one is more than 1 and which no product or look-up uses."""
        size = self.here[name]
        used = any(use.how in ("table", "map") for use in self.uses.get(name, ()))
        return len(size) < 2 or (not used and sum(dim > 1 for dim in size) < 2)

    def _vector(self, name: str, group: str) -> Kind:
        start = self.starts[group_of(name, self.blocks)]
        bias = start.random or (start.constant and start.mean == 0)
        if not self._in_block(name):
            return "final_bias" if bias else "final_gain"
        if bias:
            return "block_bias"
        return "block_gain" if any(self._grows(name)) else "qk_gain"

    def _is_readout(self, name: str, use: Use) -> bool:
        fan_in, fan_out = self._fans(use)
        grows = self._grows(name)
        return grows[fan_in] and not grows[fan_out] and self.here[name][fan_out] == self.vocab_size

    def _fans(self, use: Use) -> tuple[int, int]:
        return (0, 1) if use.transposed else (1, 0)

    def _map(self, name: str, use: Use) -> tuple[Kind, float]:
        (fan_in, fan_out), grows, size = self._fans(use), self._grows(name), self.here[name]
        multiplier = size[fan_in] / self.base[name][fan_in]
        if self._is_readout(name, use) and not self._in_block(name):
            return "readout", multiplier
        if not grows[fan_in] and grows[fan_out] and not self._in_block(name):
            return "embedding", size[fan_out] / self.base[name][fan_out]
        if not all(grows):
            fixed = "fan-in" if not grows[fan_in] else "fan-out"
            stays = size[fan_in if fixed == "fan-in" else fan_out]
            self.notes[group_of(name, self.blocks)] = (
                f"{group_of(name, self.blocks)}: its {fixed} stays {stays}; rate and std follow its own fan-in, times "
                f"{multiplier:g} at this width"
            )
        return "hidden", multiplier

    def _unseen(self, name: str) -> Kind:
        """A matrix that no module of its own looks up or multiplies by: positions, or one side of a block."""
        grows, size = self._grows(name), self.here[name]
        if len(size) == 2 and all(grows):
            return "hidden"
        fixed = [dim for dim, grown in zip(size, grows, strict=True) if not grown]
        if self._in_block(name) or self.vocab_size in fixed or not any(grows):
            self.problems.append(
                f"{name} {list(size)}: whether it is an embedding, a readout or hidden does not show; keep it in an "
                "nn.Embedding or nn.Linear that is called"
            )
        return "embedding"
