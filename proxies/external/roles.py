"""Find the role of each parameter of a factory's model.

The role follows from the dimensions that grow with the width, and from how the model uses the
parameter in one forward pass at the base shape (`forerun._proxies.external.parameter_usage`). A
matrix between two dimensions that grow is hidden (arXiv 2203.03466, Table 8), a table that ids look
up is an embedding, and the map from the width to the vocabulary is the readout. Any other matrix
with one fixed dimension is scaled by its own fan-in: if the fan-in grows, the std and the rate
shrink like those of a hidden matrix; otherwise they stay.

A parameter with more than two dimensions is a stack of matrices, one for each tap of a
convolution's kernel or for each expert. The matrix of an expert has the two dimensions that grow.
If input and output cannot be distinguished, or only one dimension grows, the user must name the
dimensions in the plan.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.numbers import Kind
from forerun._proxies.core.programs import FactoryError
from forerun._proxies.core.shape import Shape
from forerun._proxies.external.construction import (
    Build,
    InitialSpread,
    construct_on_meta,
    find_block_prefixes,
    get_factory_name,
    get_group_name,
    measure_spreads,
)
from forerun._proxies.external.parameter_usage import ParameterUse, find_usage, list_names
from forerun._proxies.parametrization.parametrization import (
    compute_width_multipliers,
    make_delta_shape,
)

Dimensions = tuple[tuple[str, str], ...]
"""Names of the dimensions of parameters, as `forerun._proxies.core.programs.Factory.dimensions`."""
Sizes = dict[str, tuple[int, ...]]
"""Size of each parameter by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """The role of one parameter in its model."""

    name: str
    group: str
    """Name of the parameter with a star for the block's number."""
    size: tuple[int, ...]
    kind: Kind
    width_multiplier: float
    """Ratio of the fan-in of a matrix to that at the base shape; for other parameters, the width
    multiplier of the package `mup`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Roles:
    """The roles of a model's parameters, and the modules that its multipliers apply to."""

    parameters: tuple[Role, ...]
    embeddings: tuple[str, ...]
    """Modules whose output the embedding multiplier scales."""
    unscaled_embeddings: tuple[str, ...]
    """Parameters whose use no hook can scale."""
    readouts: tuple[str, ...]
    """Modules whose input the output multiplier scales."""


def find_roles(build: Build, shape: Shape, base: Shape, dimensions: Dimensions = ()) -> Roles:
    """Find the roles of the parameters of a model.

    Args:
        build: The factory.
        shape: Shape of the model.
        base: Base shape that the width is compared with, of the same depth.
        dimensions: Names that the user gave to dimensions of parameters.

    Raises:
        FactoryError: The model cannot be trained as a proxy; lists every problem.
    """
    # The dimensions that differ between the base and the delta shape grow with the width.
    delta = make_delta_shape(shape, base)
    models, problems = [], list[str]()
    for model_shape in (shape, base, delta):
        try:
            models.append(construct_on_meta(build, model_shape))
        except FactoryError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if not problems:
        problems = _find_parameter_problems(models[0], dimensions)
    if len(models) < 3:
        raise FactoryError(get_factory_name(build), problems)
    sizes, base_sizes, delta_sizes = (_get_sizes(model) for model in models)

    multipliers: dict[str, tuple[float, int]] = {}
    if base_sizes == delta_sizes:
        problems.append(
            f"no parameter grows from width {base.width} to {delta.width}: base and delta are the "
            "same model, so nothing could be scaled; the factory must read shape.width"
        )
    else:
        try:
            multipliers = compute_width_multipliers(sizes, base_sizes, delta_sizes)
        except SpecError as error:
            problems += error.problems
    usage = find_usage(build, base)
    if problems := [*problems, *usage.problems]:
        raise FactoryError(get_factory_name(build), problems)

    finder = _RoleFinder(
        sizes=sizes,
        base_sizes=base_sizes,
        grows={
            name: tuple(base != delta for base, delta in zip(size, delta_sizes[name], strict=True))
            for name, size in base_sizes.items()
        },
        uses=usage.uses,
        blocks=find_block_prefixes(models[0], shape.num_layers),
        base_spreads=measure_spreads(build, base),
        vocab_size=shape.vocab_size,
        dimensions=dimensions,
    )
    parameters = tuple(finder.find_role(name, multipliers[name][0]) for name in sizes)
    if finder.problems:
        raise FactoryError(get_factory_name(build), finder.problems)
    return finder.find_modules(parameters)


def _get_sizes(module: nn.Module) -> Sizes:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def _find_parameter_problems(module: nn.Module, dimensions: Dimensions) -> list[str]:
    """Return the problems of parameters that cannot be trained, and of names of dimensions."""
    sizes = {name: list(parameter.shape) for name, parameter in module.named_parameters()}
    problems = [
        f"{name} is frozen (requires_grad = False): make it a buffer"
        for name, parameter in module.named_parameters()
        if not parameter.requires_grad
    ]
    for pattern, words in dimensions:
        matches = fnmatch.filter(sizes, pattern)
        if not matches:
            problems.append(f"proxy.dimensions: no parameter is named {pattern!r}")
        if misfits := [name for name in matches if len(words.split()) != len(sizes[name])]:
            problems.append(
                f"proxy.dimensions.{pattern!r} = {words!r}: {list_names(misfits)} has the "
                f"dimensions {sizes[misfits[0]]}: must be one word for each"
            )
    return problems + [
        f"proxy.dimensions: {name} has two patterns"
        for name in sizes
        if sum(fnmatch.fnmatchcase(name, pattern) for pattern, _ in dimensions) > 1
    ]


@dataclass(kw_only=True, slots=True)
class _RoleFinder:
    """Finds the roles of parameters, and collects a problem for each parameter with an unclear
    role.
    """

    sizes: Sizes
    base_sizes: Sizes
    grows: Mapping[str, tuple[bool, ...]]
    """Whether each dimension of a parameter grows with the width."""
    uses: Mapping[str, tuple[ParameterUse, ...]]
    blocks: frozenset[str]
    """Paths of the lists of blocks."""
    base_spreads: Mapping[str, InitialSpread]
    """Spread of the initial values at the base shape, by group."""
    vocab_size: int
    dimensions: Dimensions
    problems: list[str] = field(default_factory=list)

    def find_role(self, name: str, width_multiplier: float) -> Role:
        """Return the role of a parameter.

        Args:
            name: Name of the parameter.
            width_multiplier: Width multiplier of the package `mup`.
        """
        group, size = get_group_name(name, self.blocks), self.sizes[name]
        uses = self.uses.get(name, ())
        has_known_use = any(use.how != "other" for use in uses)
        patterns = (
            words.split()
            for pattern, words in self.dimensions
            if fnmatch.fnmatchcase(name, pattern)
        )
        kind: Kind
        if words := next(patterns, None):
            kind, width_multiplier = self._classify_named(name, group, words)
        elif len(size) < 2 or (not has_known_use and sum(dim > 1 for dim in size) < 2):
            kind = self._classify_vector(name, group)
        elif any(use.how == "table" for use in uses):
            kind = "embedding"
        elif uses[0].how in ("map", "convolution"):
            kind, width_multiplier = self._classify_map(name, group, 0, 1)
        elif sum(dim > 1 for dim in size) > 2:
            kind, width_multiplier = "hidden", self._find_stack_multiplier(name)
        else:
            kind = self._classify_unused(name)
        return Role(name=name, group=group, size=size, kind=kind, width_multiplier=width_multiplier)

    def find_modules(self, parameters: tuple[Role, ...]) -> Roles:
        """Return the roles with the modules that the multipliers apply to."""
        embeddings = [
            role.name for role in parameters if role.kind == "embedding" and role.group == role.name
        ]
        tables = [
            use
            for name in embeddings
            for use in self.uses[name]
            if use.how == "table" and use.called
        ]
        readouts = [
            use.module
            for role in parameters
            for use in self.uses.get(role.name, ())
            if role.kind in ("readout", "embedding")
            and use.how == "map"
            and use.called
            and self._is_readout(role.name)
        ]
        return Roles(
            parameters=parameters,
            embeddings=tuple(dict.fromkeys(use.module for use in tables)),
            unscaled_embeddings=tuple(
                name for name in embeddings if not any(use in tables for use in self.uses[name])
            ),
            readouts=tuple(dict.fromkeys(readouts)),
        )

    def _classify_vector(self, name: str, group: str) -> Kind:
        """Return the kind of a parameter that is a vector: a bias or a gain.

        It has one dimension that is larger than 1, or several that no product or look-up uses.
        """
        spread = self.base_spreads[group]
        is_bias = spread.is_random or (spread.is_constant and spread.mean == 0)
        if group == name:
            return "final_bias" if is_bias else "final_gain"
        if is_bias:
            return "block_bias"
        return "block_gain" if any(self.grows[name]) else "qk_gain"

    def _is_readout(self, name: str, out_dim: int = 0, in_dim: int = 1) -> bool:
        """Return whether the input of a map grows, and its output is the vocabulary."""
        grows = self.grows[name]
        is_vocab = self.sizes[name][out_dim] == self.vocab_size
        return grows[in_dim] and not grows[out_dim] and is_vocab

    def _classify_map(self, name: str, group: str, out_dim: int, in_dim: int) -> tuple[Kind, float]:
        """Return the kind of a map, and the ratio of its fan-in to that at the base shape."""
        size, base_size, grows = self.sizes[name], self.base_sizes[name], self.grows[name]
        if self._is_readout(name, out_dim, in_dim) and group == name:
            return "readout", size[in_dim] / base_size[in_dim]
        if not grows[in_dim] and grows[out_dim] and group == name:
            return "embedding", size[out_dim] / base_size[out_dim]
        return "hidden", size[in_dim] / base_size[in_dim]

    def _classify_named(self, name: str, group: str, words: list[str]) -> tuple[Kind, float]:
        """Return the kind and the multiplier of a parameter whose dimensions the user named.

        A parameter without a dimension `in` is a vector, and one without `out` is a weighted sum
        over its input.
        """
        if "in" not in words:
            return self._classify_vector(name, group), 1.0
        in_dim = words.index("in")
        if "out" not in words:
            return "hidden", self.sizes[name][in_dim] / self.base_sizes[name][in_dim]
        return self._classify_map(name, group, words.index("out"), in_dim)

    def _find_stack_multiplier(self, name: str) -> float:
        """Return the ratio of the fan-in of a stack's matrices to that at the base shape.

        Each matrix has the two dimensions that grow.
        """
        size, base_size = self.sizes[name], self.base_sizes[name]
        ratios = {
            dim / base_dim
            for dim, base_dim, grows in zip(size, base_size, self.grows[name], strict=True)
            if grows
        }
        if sum(self.grows[name]) == 2 and len(ratios) == 1:
            return ratios.pop()
        self.problems.append(
            f"{name} {list(size)}: cannot tell which dimension is its input and which its output: "
            f'name them, such as proxy.dimensions = {{ "{name}" = "expert in out" }}'
        )
        return 1.0

    def _classify_unused(self, name: str) -> Kind:
        """Return the kind of a matrix that no module looks up or multiplies by.

        It may be a table of positions, or a matrix of a block that is used in a function.
        """
        grows, size = self.grows[name], self.sizes[name]
        if len(size) == 2 and all(grows):
            return "hidden"
        fixed = [dim for dim, is_growing in zip(size, grows, strict=True) if not is_growing]
        if get_group_name(name, self.blocks) != name or self.vocab_size in fixed or not any(grows):
            self.problems.append(
                f"{name} {list(size)}: cannot tell whether it is an embedding, a readout or "
                "hidden; keep it in an nn.Embedding or nn.Linear that the model calls, or name its "
                f'dimensions, such as proxy.dimensions = {{ "{name}" = "out in" }}'
            )
        return "embedding"
