"""What each parameter of a factory's model is, from the dimensions that grow with width and from
how it is used.

A matrix between two dimensions that grow is hidden (arXiv 2203.03466, Table 8); a table that ids
look up is an embedding; the map from a width to the vocabulary is the readout. A matrix with one
fixed side is treated by its own fan-in: where that grows its std and rate shrink as any hidden
matrix's, where it does not they stay.

A parameter of more dimensions is a stack of matrices: a convolution's over the taps of its kernel,
or one over experts, whose two dimensions that grow are the matrix. Where they cannot be told apart,
or one alone grows, the user names them.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from proxies.core.checks import SpecError
from proxies.core.numbers import Kind
from proxies.core.programs import FactoryError
from proxies.core.shape import Shape
from proxies.external.construction import (
    Build,
    Spread,
    block_prefixes,
    construct,
    group_of,
    logits_of,
    name_of,
    outline,
    quoted,
    spreads,
)
from proxies.parametrization.parametrization import delta_shape, width_multipliers

# A factory's model called once at the base shape: how each parameter is used, and whether it can be
# a proxy at all.

LONGEST_SEQUENCE = 64
How = Literal["table", "map", "convolution", "other"]
Dimensions = tuple[tuple[str, str], ...]
"""As `proxies.core.programs.Factory.dimensions`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterUse:
    """What one module does with a parameter of its own."""

    module: str
    how: How
    """`table`: looked up by ids; `map`: a product over the last dimension, [out, in];
    `convolution`: [out, in, tap]."""
    called: bool
    """Whether the module itself is called, so that a hook on it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelUsage:
    """What a forward and backward pass showed."""

    uses: dict[str, tuple[ParameterUse, ...]]
    """Per parameter of two or more dimensions; a tied one has several."""
    called: frozenset[str]
    """Paths of the modules that the model calls."""
    problems: tuple[str, ...]


@dataclass(slots=True)
class _Call:
    ids: bool
    sizes: tuple[int, int]
    """Last dimensions of what a module takes and gives."""


@lru_cache(maxsize=32)
def usage_of(build: Build, shape: Shape) -> ModelUsage:
    """Build the model of a shape and call it.

    Raises:
        FactoryError: the factory fails.
    """
    # Roles do not depend on the length, and the logits of a long sequence over a large vocabulary
    # take gigabytes.
    shape = dataclasses.replace(shape, seq_len=min(shape.seq_len, LONGEST_SEQUENCE))
    module = construct(build, shape)
    calls: dict[str, _Call] = {}
    called: set[str] = set()
    handles = [
        child.register_forward_hook(_recorder(name, calls, called), with_kwargs=True)
        for name, child in module.named_modules()
    ]
    problems = _draws(module, construct(build, shape)) + _passes(module.train(), shape)
    for handle in handles:
        handle.remove()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    uses: dict[str, tuple[ParameterUse, ...]] = {}
    for path, child in module.named_modules():
        for parameter in child._parameters.values():
            if parameter is not None and parameter.dim() > 1:
                name = names[id(parameter)]
                uses[name] = (*uses.get(name, ()), _use(path, child, parameter, calls.get(path)))
    return ModelUsage(uses=uses, called=frozenset(called), problems=tuple(problems))


def _recorder(name: str, calls: dict[str, _Call], called: set[str]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        called.add(name)
        given = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if given is not None and isinstance(output, Tensor):
            last = given.shape[-1] if given.dim() else 0
            calls[name] = _Call(ids=not given.is_floating_point(), sizes=(last, output.shape[-1]))

    return hook


def _use(path: str, module: nn.Module, parameter: nn.Parameter, call: _Call | None) -> ParameterUse:
    """By the module's type; of one of the user's own that holds no others, by what it takes and
    gives.
    """
    how: How = "other"
    alone = call is not None and next(module.children(), None) is None
    if isinstance(module, nn.Embedding) or (alone and call and call.ids):
        how = "table"
    elif isinstance(module, nn.Linear) or (
        alone and call and call.sizes == tuple(parameter.shape)[::-1]
    ):
        how = "map"
    elif isinstance(module, nn.modules.conv._ConvNd) and not module.transposed:
        how = "convolution"
    return ParameterUse(module=path, how=how, called=call is not None)


def _draws(module: nn.Module, again: nn.Module) -> list[str]:
    """The same seed must give the same weights."""
    first, second = dict(module.named_parameters()), dict(again.named_parameters())
    unlike = [
        name for name in first if name not in second or not torch.equal(first[name], second[name])
    ]
    said = (
        f"starts {_some(unlike)} from different values at every call: draw them from torch's "
        "generator, which is seeded"
    )
    return [said] if unlike else []


def _passes(module: nn.Module, shape: Shape) -> list[str]:
    """What a forward and a backward pass over random ids shows to be wrong."""
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(shape.vocab_size, (2, shape.seq_len), generator=generator)
    # the caller may be drawing initial values
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            logits_BTV = logits_of(module, ids_BT)
            wanted = (*ids_BT.shape, shape.vocab_size)
            if not isinstance(logits_BTV, Tensor) or tuple(logits_BTV.shape) != wanted:
                got = (
                    list(logits_BTV.shape)
                    if isinstance(logits_BTV, Tensor)
                    else type(logits_BTV).__name__
                )
                return [
                    (
                        f"its model returns {got} for ids {list(ids_BT.shape)}: it must be logits "
                        f"{list(wanted)}"
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
            said = (
                f"{_some(unreached)}: does not affect the logits, so it gets no gradient: remove it"
            )
            with torch.no_grad():
                return _repeats(module, ids_BT, logits_BTV) + ([said] if unreached else [])
        except Exception as error:
            return [
                (
                    f"its model fails on ids {list(ids_BT.shape)} at width {shape.width}: "
                    f"{quoted(error)}"
                )
            ]


def _repeats(module: nn.Module, ids_BT: Tensor, logits_BTV: Tensor) -> list[str]:
    if not torch.equal(logits_of(module, ids_BT), logits_BTV):
        return [
            (
                "its model gives different logits at every call, as with dropout: set its random "
                "parts "
                "to zero"
            )
        ]
    changed_BT = ids_BT.clone()
    changed_BT[:, -1] = (changed_BT[:, -1] + 1) % (int(ids_BT.max()) + 1)
    early_BTV = logits_of(module, changed_BT)[:, :-1]
    close = torch.allclose(early_BTV, logits_BTV[:, :-1], rtol=1e-3, atol=1e-5)
    return (
        []
        if close
        else ["its model looks ahead: logits change with a later token; add a causal mask"]
    )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


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


def roles_of(build: Build, shape: Shape, base: Shape, dimensions: Dimensions = ()) -> Roles:
    """The roles in the model of `shape`, whose width is compared with `base` (of the same depth).

    Args:
        build: the factory.
        shape: of the model.
        base: what its width is compared with, of the same depth.
        dimensions: what the user says of parameters.

    Raises:
        FactoryError: everything that stands in the way.
    """
    delta = delta_shape(shape, base)
    models, problems = [], list[str]()
    for each in (shape, base, delta):
        try:
            models.append(outline(build, each))
        except FactoryError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if not problems:
        problems = _parameter_problems(models[0], dimensions)
    if len(models) < 3:
        raise FactoryError(name_of(build), problems)
    here, at_base, at_delta = (
        {name: tuple(p.shape) for name, p in m.named_parameters()} for m in models
    )
    multipliers: dict[str, tuple[float, int]] = {}
    if at_base == at_delta:
        problems.append(
            f"no parameter grows from width {base.width} to {delta.width}: base and delta are the "
            "same model, so "
            "nothing could be scaled (does the factory read shape.width?)"
        )
    else:
        try:
            multipliers = width_multipliers(here, at_base, at_delta)
        except SpecError as error:
            problems += error.problems
    usage = usage_of(build, base)
    if problems := [*problems, *usage.problems]:
        raise FactoryError(name_of(build), problems)
    blocks = block_prefixes(models[0], shape.num_layers)
    found = _Finder(
        here,
        at_base,
        at_delta,
        usage.uses,
        blocks,
        spreads(build, base),
        shape.vocab_size,
        dimensions,
    )
    parameters = tuple(found.role(name, multipliers[name][0]) for name in here)
    if found.problems:
        raise FactoryError(name_of(build), found.problems)
    return found.roles(parameters)


def _parameter_problems(module: nn.Module, dimensions: Dimensions) -> list[str]:
    """Parameters that cannot be trained, and names of dimensions that do not fit them."""
    sizes = {name: list(parameter.shape) for name, parameter in module.named_parameters()}
    problems = [
        f"{name} is frozen (requires_grad = False): make it a buffer"
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    ]
    for pattern, words in dimensions:
        claimed = fnmatch.filter(sizes, pattern)
        if not claimed:
            problems.append(f"proxy.dimensions: no parameter is named {pattern!r}")
        if other := [name for name in claimed if len(words.split()) != len(sizes[name])]:
            said = f"{_some(other)} has the dimensions {sizes[other[0]]}"
            problems.append(
                f"proxy.dimensions.{pattern!r} = {words!r}: {said}: must be one word for each"
            )
    return problems + [
        f"proxy.dimensions: {name} has two patterns"
        for name in sizes
        if sum(fnmatch.fnmatchcase(name, pattern) for pattern, _ in dimensions) > 1
    ]


class _Finder:
    """Assigns roles, and collects what has none."""

    def __init__(
        self,
        here: Sizes,
        base: Sizes,
        delta: Sizes,
        uses: Mapping[str, tuple[ParameterUse, ...]],
        blocks: frozenset[str],
        starts: Mapping[str, Spread],
        vocab_size: int,
        dimensions: Dimensions,
    ) -> None:
        self._here, self._base, self._uses = here, base, uses
        self._grows = {
            name: tuple(one != other for one, other in zip(size, delta[name], strict=True))
            for name, size in base.items()
        }
        self._blocks, self._starts, self._vocab_size = blocks, starts, vocab_size
        self._dimensions = dimensions
        self.problems: list[str] = []

    def role(self, name: str, width_multiplier: float) -> Role:
        """One parameter's."""
        group, size, uses = group_of(name, self._blocks), self._here[name], self._uses.get(name, ())
        used = any(use.how != "other" for use in uses)
        kind: Kind
        if words := next(
            (w.split() for p, w in self._dimensions if fnmatch.fnmatchcase(name, p)), None
        ):
            kind, width_multiplier = self._told(name, group, words)
        elif len(size) < 2 or (not used and sum(dim > 1 for dim in size) < 2):
            kind = self._vector(name, group)
        elif any(use.how == "table" for use in uses):
            kind = "embedding"
        elif uses[0].how in ("map", "convolution"):
            kind, width_multiplier = self._map(name, group, 0, 1)
        elif sum(dim > 1 for dim in size) > 2:
            kind, width_multiplier = "hidden", self._stacked(name)
        else:
            kind = self._unseen(name)
        return Role(name=name, group=group, size=size, kind=kind, width_multiplier=width_multiplier)

    def roles(self, parameters: tuple[Role, ...]) -> Roles:
        """All of them, and the modules that multipliers hook."""
        embeddings = [r.name for r in parameters if r.kind == "embedding" and r.group == r.name]
        tables = [
            use
            for name in embeddings
            for use in self._uses[name]
            if use.how == "table" and use.called
        ]
        readouts = [
            use.module
            for r in parameters
            for use in self._uses.get(r.name, ())
            if r.kind in ("readout", "embedding")
            and use.how == "map"
            and use.called
            and self._is_readout(r.name)
        ]
        return Roles(
            parameters=parameters,
            embeddings=tuple(dict.fromkeys(use.module for use in tables)),
            unscaled_embeddings=tuple(
                n for n in embeddings if not any(use in tables for use in self._uses[n])
            ),
            readouts=tuple(dict.fromkeys(readouts)),
        )

    def _vector(self, name: str, group: str) -> Kind:
        """One dimension, or several of which one is more than 1 and which no product or look-up
        uses.
        """
        start = self._starts[group]
        bias = start.random or (start.constant and start.mean == 0)
        if group == name:
            return "final_bias" if bias else "final_gain"
        if bias:
            return "block_bias"
        return "block_gain" if any(self._grows[name]) else "qk_gain"

    def _is_readout(self, name: str, to: int = 0, of: int = 1) -> bool:
        """Whether dimension `of` grows, and `to` is the vocabulary."""
        grows = self._grows[name]
        return grows[of] and not grows[to] and self._here[name][to] == self._vocab_size

    def _map(self, name: str, group: str, to: int, of: int) -> tuple[Kind, float]:
        """A product over dimension `of` that gives `to`: its kind, and how often its fan-in is the
        base's.
        """
        here, base, grows = self._here[name], self._base[name], self._grows[name]
        if self._is_readout(name, to, of) and group == name:
            return "readout", here[of] / base[of]
        if not grows[of] and grows[to] and group == name:
            return "embedding", here[to] / base[to]
        return "hidden", here[of] / base[of]

    def _told(self, name: str, group: str, words: list[str]) -> tuple[Kind, float]:
        """As the user names its dimensions; without an input it is a vector, without an output a
        sum over the input.
        """
        if "in" not in words:
            return self._vector(name, group), 1.0
        of = words.index("in")
        if "out" not in words:
            return "hidden", self._here[name][of] / self._base[name][of]
        return self._map(name, group, words.index("out"), of)

    def _stacked(self, name: str) -> float:
        """Matrices in one parameter, of the two dimensions that grow: how often their fan-in is the
        base's.
        """
        here, base = self._here[name], self._base[name]
        ratios = {
            there / at
            for there, at, grows in zip(here, base, self._grows[name], strict=True)
            if grows
        }
        if sum(self._grows[name]) == 2 and len(ratios) == 1:
            return ratios.pop()
        self.problems.append(
            f"{name} {list(here)}: cannot tell which dimension is its input and which its output: "
            "name them, such as "
            f'proxy.dimensions = {{ "{name}" = "expert in out" }}'
        )
        return 1.0

    def _unseen(self, name: str) -> Kind:
        """A matrix that no module of its own looks up or multiplies by: positions, or one side of a
        block.
        """
        grows, size = self._grows[name], self._here[name]
        if len(size) == 2 and all(grows):
            return "hidden"
        fixed = [dim for dim, grown in zip(size, grows, strict=True) if not grown]
        if group_of(name, self._blocks) != name or self._vocab_size in fixed or not any(grows):
            self.problems.append(
                f"{name} {list(size)}: cannot tell whether it is an embedding, a readout or "
                "hidden; keep it in an "
                "nn.Embedding or nn.Linear that the model calls, or name its dimensions, such as "
                f'proxy.dimensions = {{ "{name}" = "out in" }}'
            )
        return "embedding"
