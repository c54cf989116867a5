"""A factory's model described for a run: its parameters, the factors that bring their initial
values to the parametrization's law, and where the forward multipliers go. Base shapes come from the
same factory.
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
from proxies.external.roles import Roles, roles_of, usage_of
from proxies.parametrization.parametrization import Parameter, forward_numbers, table_of

_EMBEDDING_KEY = next(one.name for one in HYPERPARAMETERS.values() if one.multiplies == "embedding")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOutline:
    """What a factory's model is trained with, and where its multipliers go."""

    numbers: tuple[ParameterNumbers, ...]
    """In the module's own order; a tied matrix once."""
    forward: ForwardNumbers
    embeddings: tuple[str, ...]
    """Modules whose output the embedding multiplier scales."""
    readouts: tuple[str, ...]
    """Modules whose input the output multiplier scales."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description(ModelOutline):
    """All that is known of a factory's model before it trains."""

    factors: dict[str, float]
    """What each parameter's drawn values are multiplied by; 1.0 at the base shape, and in the
    standard form."""


def outline_of(build: Build, spec: RunSpec) -> ModelOutline:
    """What a run's model is trained with. Nothing of that shape is allocated, however large it is.

    Raises:
        FactoryError, SpecError: as `describe`.
    """
    roles, problems = _roles(build, spec)
    if problems:
        raise FactoryError(name_of(build), problems)
    return ModelOutline(
        numbers=_numbers(
            spec,
            roles,
            spreads(build, _origin(spec)) if spec.parametrization.width == "mup" else {},
        ),
        forward=forward_numbers(spec),
        embeddings=roles.embeddings,
        readouts=roles.readouts,
    )


def called_blocks(build: Build, shape: Shape) -> tuple[str, ...]:
    """Lists of modules of the model of a shape, as `model.layers.*`, each of which the model calls.

    One that shares a parameter with another is left out: the two cannot be sharded apart.

    Raises:
        FactoryError: the factory fails.
    """
    module, called = outline(build, shape), usage_of(build, shape).called
    owners: dict[int, set[str]] = {}
    blocks = block_prefixes(module, shape.num_layers)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        prefix = next((each for each in blocks if name.startswith(each)), "")
        owners.setdefault(id(parameter), set()).add(
            prefix + name[len(prefix) :].split(".")[0] if prefix else ""
        )
    shared = {owner for several in owners.values() if len(several) > 1 for owner in several}
    found = []
    for prefix in sorted(blocks):
        members = [
            prefix + name for name, _ in module.get_submodule(prefix.rstrip(".")).named_children()
        ]
        if members and called.issuperset(members) and shared.isdisjoint(members):
            found.append(f"{prefix}*")
    return tuple(found)


def describe(build: Build, spec: RunSpec) -> Description:
    """Describe the factory's model of a run.

    Raises:
        FactoryError: everything that prevents training it under the run's parametrization.
        SpecError: scaled betas that leave [0, 1).
    """
    roles, problems = _roles(build, spec)
    here = spreads(build, spec.shape)
    at_base = spreads(build, _origin(spec)) if spec.parametrization.width == "mup" else here
    groups = dict.fromkeys(role.group for role in roles.parameters)
    problems += [
        f"{group} is missing at the base depth: keep the blocks, and nothing else, in an "
        "nn.ModuleList"
        for group in groups
        if group not in at_base
    ]
    if problems:
        raise FactoryError(name_of(build), problems)
    numbers = _numbers(spec, roles, at_base)
    return Description(
        numbers=numbers,
        forward=forward_numbers(spec),
        factors={
            role.name: _factor(spec, numbers_of, here[role.group], at_base[role.group])
            for role, numbers_of in zip(roles.parameters, numbers, strict=True)
        },
        embeddings=roles.embeddings,
        readouts=roles.readouts,
    )


def _roles(build: Build, spec: RunSpec) -> tuple[Roles, list[str]]:
    """The roles, and what else is wrong."""
    base = spec.base_shape.at_depth(spec.shape.num_layers)  # depth is no dimension of a tensor
    roles = roles_of(build, spec.shape, base, spec.factory.dimensions if spec.factory else ())
    return roles, _multiplier_problems(build, spec, roles, forward_numbers(spec)) + _depth_problems(
        build, spec
    )


def _origin(spec: RunSpec) -> Shape:
    """Where initial values are meant: with a rule for depth at the base's own, else what the
    factory does with depth stays.
    """
    ruled = spec.parametrization.depth_alpha is not None
    return spec.base_shape if ruled else spec.base_shape.at_depth(spec.shape.num_layers)


def _numbers(
    spec: RunSpec, roles: Roles, at_base: Mapping[str, Spread]
) -> tuple[ParameterNumbers, ...]:
    """What each parameter is trained with, from its role and its spread at the base."""
    stds = {group: spread.std for group, spread in at_base.items() if spread.random}
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


def _factor(spec: RunSpec, numbers: ParameterNumbers, here: Spread, base: Spread) -> float:
    if spec.parametrization.width != "mup" or here is base or not (base.random and here.random):
        return 1.0
    return numbers.init_std / here.std


def _multiplier_problems(
    build: Build, spec: RunSpec, roles: Roles, forward: ForwardNumbers
) -> list[str]:
    """Forward multipliers that nothing would apply."""
    problems = []
    if forward.residual != 1 and not takes_forward(build):
        problems.append(
            f"{spec.parametrization} multiplies the branches by {forward.residual:.4g} at "
            f"{counted(spec.shape.num_layers, 'layer')} (base {spec.base_shape.num_layers}), which "
            "only the model "
            "can do: the factory must be build(shape, forward), and the model must apply "
            "forward.residual"
        )
    if forward.embedding != 1 and (roles.unscaled_embeddings or not roles.embeddings):
        what = ", ".join(roles.unscaled_embeddings) or "no embedding module is found"
        problems.append(
            f"{_EMBEDDING_KEY} = {forward.embedding:g} cannot be applied ({what}): keep tables in "
            "nn.Embedding"
        )
    absorbed = spec.parametrization.output == "absorbed" and spec.ratios.width != 1
    if absorbed and not any(role.kind == "readout" for role in roles.parameters):
        problems.append(
            f"{spec.parametrization} puts the output multiplier into the readout's init and rate, "
            "and the model has no "
            'readout of its own (is it tied?): set output = "multiplier"'
        )
    if forward.output != 1 and not roles.readouts:
        problems.append(
            f"the output multiplier {forward.output:.4g} cannot be applied: no module is found "
            "that maps the width to "
            f"the {spec.shape.vocab_size} tokens; keep the readout (tied or not) in an nn.Linear "
            "that is called"
        )
    return problems


def _depth_problems(build: Build, spec: RunSpec) -> list[str]:
    # Blocks in a plain list have no parameters: the model would train without them, and pass for a
    # small one.
    depths = spec.shape.num_layers, spec.shape.num_layers + 1
    names = [
        {name for name, _ in outline(build, spec.base_shape.at_depth(d)).named_parameters()}
        for d in depths
    ]
    same = (
        f"has the same parameters with {counted(depths[0], 'layer')} as with {depths[1]}: does the "
        "factory read "
        "num_layers, and are the blocks in an nn.ModuleList?"
    )
    return [same] if names[0] == names[1] else []
