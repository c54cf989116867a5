"""Describe a factory's model for a run.

A description has the numbers that each parameter is trained with, the factors that scale initial
values to the parametrization's law, and the modules that the forward multipliers apply to. The
model is compared with models of base shapes that the same factory builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proxies.core.hyperparameters import HYPERPARAMETERS
from proxies.core.notation import counted
from proxies.core.numbers import ForwardNumbers, ParameterNumbers
from proxies.core.optimizers import RECIPES
from proxies.core.programs import FactoryError
from proxies.core.shape import Shape
from proxies.core.spec import RunSpec
from proxies.external.construction import (
    Build,
    Spread,
    block_prefixes,
    name_of,
    outline,
    spreads,
    takes_forward,
)
from proxies.external.parameter_usage import usage_of
from proxies.external.roles import Roles, roles_of
from proxies.parametrization.parametrization import Parameter, forward_numbers, table_of

_EMBEDDING_KEY = next(
    hyperparameter.name
    for hyperparameter in HYPERPARAMETERS.values()
    if hyperparameter.multiplies == "embedding"
)
"""Name of the hyperparameter that is the embedding multiplier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOutline:
    """The numbers that a factory's model is trained with, and the modules of its multipliers."""

    numbers: tuple[ParameterNumbers, ...]
    """Numbers of each parameter, in the module's order; a tied matrix appears once."""
    forward: ForwardNumbers
    embeddings: tuple[str, ...]
    """Modules whose output the embedding multiplier scales."""
    readouts: tuple[str, ...]
    """Modules whose input the output multiplier scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description(ModelOutline):
    """An outline of a factory's model, with the factors for its initial values."""

    factors: dict[str, float]
    """Factor for the initial values of each parameter; 1.0 at the base shape, and without muP."""


def outline_of(build: Build, spec: RunSpec) -> ModelOutline:
    """Return the outline of a run's model, without allocating a model of that shape.

    Raises:
        FactoryError: The model cannot be trained under the run's parametrization.
        SpecError: Scaled betas are outside [0, 1).
    """
    roles, problems = _find_roles(build, spec)
    if problems:
        raise FactoryError(name_of(build), problems)
    is_mup = spec.parametrization.width == "mup"
    base_spreads = spreads(build, _get_init_shape(spec)) if is_mup else {}
    return ModelOutline(
        numbers=_compute_numbers(spec, roles, base_spreads),
        forward=forward_numbers(spec),
        embeddings=roles.embeddings,
        readouts=roles.readouts,
    )


def called_blocks(build: Build, shape: Shape) -> tuple[str, ...]:
    """Return the lists of blocks of a model whose members are all called, as `model.layers.*`.

    A list whose members share parameters with other modules is left out, because they cannot be
    sharded separately.

    Raises:
        FactoryError: The factory fails.
    """
    module, called = outline(build, shape), usage_of(build, shape).called
    owners: dict[int, set[str]] = {}
    blocks = block_prefixes(module, shape.num_layers)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        prefix = next((block for block in blocks if name.startswith(block)), "")
        owners.setdefault(id(parameter), set()).add(
            prefix + name[len(prefix) :].split(".")[0] if prefix else ""
        )
    sharing = {owner for sharers in owners.values() if len(sharers) > 1 for owner in sharers}
    patterns = []
    for prefix in sorted(blocks):
        members = [
            prefix + name for name, _ in module.get_submodule(prefix.rstrip(".")).named_children()
        ]
        if members and called.issuperset(members) and sharing.isdisjoint(members):
            patterns.append(f"{prefix}*")
    return tuple(patterns)


def describe(build: Build, spec: RunSpec) -> Description:
    """Describe the factory's model of a run.

    Raises:
        FactoryError: The model cannot be trained under the run's parametrization; lists every
            problem.
        SpecError: Scaled betas are outside [0, 1).
    """
    roles, problems = _find_roles(build, spec)
    run_spreads = spreads(build, spec.shape)
    is_mup = spec.parametrization.width == "mup"
    base_spreads = spreads(build, _get_init_shape(spec)) if is_mup else run_spreads
    groups = dict.fromkeys(role.group for role in roles.parameters)
    problems += [
        f"{group} is missing at the base depth: keep the blocks, and nothing else, in an "
        "nn.ModuleList"
        for group in groups
        if group not in base_spreads
    ]
    if problems:
        raise FactoryError(name_of(build), problems)
    numbers = _compute_numbers(spec, roles, base_spreads)
    factors = {
        role.name: _compute_factor(
            spec, parameter_numbers, run_spreads[role.group], base_spreads[role.group]
        )
        for role, parameter_numbers in zip(roles.parameters, numbers, strict=True)
    }
    return Description(
        numbers=numbers,
        forward=forward_numbers(spec),
        factors=factors,
        embeddings=roles.embeddings,
        readouts=roles.readouts,
    )


def _find_roles(build: Build, spec: RunSpec) -> tuple[Roles, list[str]]:
    """Return the roles of the parameters, and the problems of multipliers and depth."""
    # No tensor has the depth as a dimension, so the base shape has the depth of the run.
    base = spec.base_shape.at_depth(spec.shape.num_layers)
    roles = roles_of(build, spec.shape, base, spec.factory.dimensions if spec.factory else ())
    problems = _find_multiplier_problems(build, spec, roles, forward_numbers(spec))
    return roles, problems + _find_depth_problems(build, spec)


def _get_init_shape(spec: RunSpec) -> Shape:
    """Return the shape whose initial values the factory's are compared with.

    If the parametrization has a rule for depth, it is the base shape. Otherwise it has the depth of
    the run, so that what the factory does with depth is kept.
    """
    has_depth_rule = spec.parametrization.depth_alpha is not None
    return spec.base_shape if has_depth_rule else spec.base_shape.at_depth(spec.shape.num_layers)


def _compute_numbers(
    spec: RunSpec, roles: Roles, base_spreads: Mapping[str, Spread]
) -> tuple[ParameterNumbers, ...]:
    """Return the numbers of each parameter, from its role and its spread at the base shape."""
    stds = {group: spread.std for group, spread in base_spreads.items() if spread.random}
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
    return table_of(
        spec.parametrization, RECIPES[spec.optimizer], parameters, spec.ratios, spec.hparams
    )


def _compute_factor(
    spec: RunSpec, numbers: ParameterNumbers, spread: Spread, base_spread: Spread
) -> float:
    """Return the factor that gives a parameter the initial std of the parametrization."""
    if spec.parametrization.width != "mup" or spread is base_spread:
        return 1.0
    if not (base_spread.random and spread.random):
        return 1.0
    return numbers.init_std / spread.std


def _find_multiplier_problems(
    build: Build, spec: RunSpec, roles: Roles, forward: ForwardNumbers
) -> list[str]:
    """Return a problem for each forward multiplier that no module would apply."""
    problems = []
    if forward.residual != 1 and not takes_forward(build):
        problems.append(
            f"{spec.parametrization} multiplies the branches by {forward.residual:.4g} at "
            f"{counted(spec.shape.num_layers, 'layer')} (base {spec.base_shape.num_layers}), which "
            "only the model can do: the factory must be build(shape, forward), and the model must "
            "apply forward.residual"
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

    Blocks in a Python list are no submodules: the model would train without their parameters, and
    look like a small model.
    """
    depths = spec.shape.num_layers, spec.shape.num_layers + 1
    names = [
        {name for name, _ in outline(build, spec.base_shape.at_depth(depth)).named_parameters()}
        for depth in depths
    ]
    if names[0] != names[1]:
        return []
    return [
        (
            f"has the same parameters with {counted(depths[0], 'layer')} as with {depths[1]}: the "
            "factory must read num_layers, and the blocks must be in an nn.ModuleList"
        )
    ]
