"""Describe a factory's model for a run.

A description has three parts: the numbers that each parameter is trained with, a factor for its
initial values, which gives them the parametrization's std, and the modules to which the forward
multipliers apply. The model is compared with models of base shapes from the same factory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from forerun._proxies.core.hyperparameters import HYPERPARAMETERS
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.numbers import ForwardNumbers, ParameterNumbers
from forerun._proxies.core.optimizers import RECIPES
from forerun._proxies.core.programs import FactoryError
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import RunSpec
from forerun._proxies.external.construction import (
    Build,
    InitialSpread,
    construct_on_meta,
    find_block_prefixes,
    get_factory_name,
    measure_spreads,
    takes_forward,
)
from forerun._proxies.external.parameter_usage import find_usage
from forerun._proxies.external.roles import Roles, find_roles
from forerun._proxies.parametrization.parametrization import (
    Parameter,
    compute_forward_numbers,
    compute_table,
)

_EMBEDDING_KEY = next(
    hyperparameter.name
    for hyperparameter in HYPERPARAMETERS.values()
    if hyperparameter.multiplies == "embedding"
)
"""Name of the hyperparameter that is the embedding multiplier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """The numbers that a factory's model is trained with, and the modules that are multiplied."""

    numbers: tuple[ParameterNumbers, ...]
    """Numbers of each parameter, in the module's order; a tied matrix appears once."""
    forward: ForwardNumbers
    embeddings: tuple[str, ...]
    """Modules whose output the embedding multiplier scales."""
    readouts: tuple[str, ...]
    """Modules whose input the output multiplier scales."""
    factors: dict[str, float]
    """Factor for the initial values of each parameter; 1.0 at the base shape, and without muP.
    Empty in a description by `describe_outline`."""


def describe_outline(build: Build, spec: RunSpec) -> Description:
    """Describe a run's model without allocating a model of that shape, and so without factors.

    Raises:
        FactoryError: The model cannot be trained under the run's parametrization.
        SpecError: Scaled betas are outside [0, 1).
    """
    return _describe(build, spec, {})


def find_called_blocks(build: Build, shape: Shape) -> tuple[str, ...]:
    """Return the lists of blocks of a model whose members are all called, as `model.layers.*`.

    A list whose members share parameters with other modules is left out, because they cannot be
    sharded separately.

    Raises:
        FactoryError: The factory fails.
    """
    module, called = construct_on_meta(build, shape), find_usage(build, shape).called
    # The longest prefix of a name comes first, because a prefix may begin with another one
    prefixes = sorted(find_block_prefixes(module, shape.num_layers), reverse=True)

    # Members of lists that own each parameter; "" stands for all other modules
    owners: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        owners.setdefault(id(parameter), set()).add(
            prefix + name[len(prefix) :].split(".")[0] if prefix else ""
        )
    sharing = {owner for sharers in owners.values() if len(sharers) > 1 for owner in sharers}
    patterns = []
    for prefix in reversed(prefixes):
        members = [
            prefix + name for name, _ in module.get_submodule(prefix.rstrip(".")).named_children()
        ]
        if members and called.issuperset(members) and sharing.isdisjoint(members):
            patterns.append(f"{prefix}*")
    return tuple(patterns)


def describe_model(build: Build, spec: RunSpec) -> Description:
    """Describe the factory's model of a run.

    Raises:
        FactoryError: The model cannot be trained under the run's parametrization; lists every
            problem.
        SpecError: Scaled betas are outside [0, 1).
    """
    return _describe(build, spec, measure_spreads(build, spec.shape))


def _describe(build: Build, spec: RunSpec, run_spreads: Mapping[str, InitialSpread]) -> Description:
    """Describe the factory's model of a run.

    Args:
        build: The factory.
        spec: The run.
        run_spreads: Spreads of the initial values at the run's shape; empty for `describe_outline`.
    """
    roles, problems = _find_roles(build, spec)
    init_shape, is_mup = _get_init_shape(spec), spec.parametrization.width == "mup"
    base_spreads = measure_spreads(build, init_shape) if is_mup else run_spreads
    groups = dict.fromkeys(role.group for role in roles.parameters)
    problems += [
        f"{group} is missing at the base depth: keep the blocks, and nothing else, in an "
        "nn.ModuleList"
        for group in groups
        if base_spreads and group not in base_spreads
    ]
    if problems:
        raise FactoryError(get_factory_name(build), problems)
    numbers = _compute_numbers(spec, roles, base_spreads)
    factors = {}
    for role, row in zip(roles.parameters, numbers, strict=True) if run_spreads else ():
        spread, base_spread = run_spreads[role.group], base_spreads[role.group]
        is_scaled = is_mup and init_shape != spec.shape
        is_drawn = spread.is_random and base_spread.is_random
        factors[role.name] = row.init_std / spread.std if is_scaled and is_drawn else 1.0
    return Description(
        numbers=numbers,
        forward=compute_forward_numbers(spec),
        factors=factors,
        embeddings=roles.embeddings,
        readouts=roles.readouts,
    )


def _find_roles(build: Build, spec: RunSpec) -> tuple[Roles, list[str]]:
    """Return the roles of the parameters, and the problems of multipliers and depth."""
    # No tensor has the depth as a dimension, so the base shape has the depth of the run.
    base = spec.base_shape.at_depth(spec.shape.num_layers)
    roles = find_roles(build, spec.shape, base, spec.factory.dimensions if spec.factory else ())
    problems = _find_multiplier_problems(build, spec, roles, compute_forward_numbers(spec))
    return roles, problems + _find_depth_problems(build, spec)


def _get_init_shape(spec: RunSpec) -> Shape:
    """Return the shape at which the base stds of the initial values are measured.

    If the parametrization has a rule for depth, this is the base shape. Otherwise the shape has the
    base width and the depth of the run, so that the factory's own scaling with depth is kept.
    """
    has_depth_rule = spec.parametrization.depth_alpha is not None
    return spec.base_shape if has_depth_rule else spec.base_shape.at_depth(spec.shape.num_layers)


def _compute_numbers(
    spec: RunSpec, roles: Roles, base_spreads: Mapping[str, InitialSpread]
) -> tuple[ParameterNumbers, ...]:
    """Return the numbers of each parameter, from its role and its spread at the base shape."""
    stds = {group: spread.std for group, spread in base_spreads.items() if spread.is_random}
    parameters = (
        Parameter(
            name=role.name,
            size=role.size,
            kind=role.kind,
            width_multiplier=role.width_multiplier,
            base_std=stds.get(role.group, 0.0),
        )
        for role in roles.parameters
    )
    return compute_table(
        spec.parametrization, RECIPES[spec.optimizer], parameters, spec.ratios, spec.hparams
    )


def _find_multiplier_problems(
    build: Build, spec: RunSpec, roles: Roles, forward: ForwardNumbers
) -> list[str]:
    """Return a problem for each forward multiplier that no module would apply."""
    problems = []
    if forward.residual != 1 and not takes_forward(build):
        problems.append(
            f"{spec.parametrization} multiplies the branches by {forward.residual:.4g} at "
            f"{format_counted(spec.shape.num_layers, 'layer')} (base "
            f"{spec.base_shape.num_layers}), which only the model can do: the factory must be "
            "build(shape, forward), and the model must apply forward.residual"
        )
    if forward.embedding != 1 and (roles.unscaled_embeddings or not roles.embeddings):
        reason = ", ".join(roles.unscaled_embeddings) or "no embedding module is found"
        problems.append(
            f"{_EMBEDDING_KEY} = {forward.embedding:g} cannot be applied ({reason}): keep tables "
            "in nn.Embedding"
        )
    is_absorbed = spec.parametrization.output == "absorbed" and spec.ratios.width != 1
    if is_absorbed and not any(role.kind == "readout" for role in roles.parameters):
        problems.append(
            f"{spec.parametrization} puts the output multiplier into the readout's init and rate, "
            "and the model has no readout of its own (it may be tied to the embedding): set "
            'output = "multiplier"'
        )
    if forward.output != 1 and not roles.readouts:
        problems.append(
            f"the output multiplier {forward.output:.4g} cannot be applied: no module is found "
            f"that maps the width to the {spec.shape.vocab_size} tokens; keep the readout (tied or "
            "not) in an nn.Linear that is called"
        )
    return problems


def _find_depth_problems(build: Build, spec: RunSpec) -> list[str]:
    """Return a problem if the parameters of the model do not depend on the depth.

    The parameters of blocks in a Python list are not parameters of the module. The model would
    train without them, and look like a small model.
    """
    depths = spec.shape.num_layers, spec.shape.num_layers + 1
    names = [
        {
            name
            for name, _ in construct_on_meta(
                build, spec.base_shape.at_depth(depth)
            ).named_parameters()
        }
        for depth in depths
    ]
    if names[0] != names[1]:
        return []
    return [
        (
            f"has the same parameters with {format_counted(depths[0], 'layer')} as with "
            f"{depths[1]}: the factory must read num_layers, and the blocks must be in an "
            "nn.ModuleList"
        )
    ]
