"""Parametrizations as plain numbers: per parameter an init std, a learning rate, a weight decay, an
eps; and forward multipliers. The only module that imports `mup`, whose infinite dimensions are the
source of the width multipliers. Numbers alone load no torch.

The rules are data (`proxies.core.rules`); here they meet a model's parameters. `mup` gives what mup
1.0.0 gives, tensor by tensor (tested). At the base shape every parametrization is the same
function. What is handed on is these numbers, never `infshape`: FSDP2, deepcopy and meta tensors
drop it, and a wrong base is silent.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxies.core.checks import SpecError
from proxies.core.hyperparameters import HYPERPARAMETERS, LEARNING_RATE, Hparams
from proxies.core.muon import shape_factor
from proxies.core.notation import counted
from proxies.core.numbers import ForwardNumbers, Kind, ParameterNumbers, kind_of
from proxies.core.optimizers import RECIPES, WEIGHT_DECAY, Recipe
from proxies.core.powers import Powers, Ratios
from proxies.core.rules import KindRule, Parametrization, decays, forward_rule, kind_rule, moments
from proxies.core.shape import Shape, parameter_shapes
from proxies.core.spec import RunSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from proxies.model.decoder import Multipliers

EMBEDDING_STD = 1.0
POSITION_STD = 0.5
"""Half the token table's, as in GPT-2's code (0.01 to 0.02)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """What a parameter is, before a parametrization gives it numbers."""

    name: str
    size: tuple[int, ...]
    kind: Kind
    width_multiplier: float
    """mup's, against the base shape."""
    base_std: float
    """Init std before its rule: the base shape's; without a width rule, the shape's own; 0 for
    gains and biases."""


def width_multipliers(
    sizes: Mapping[str, tuple[int, ...]],
    base: Mapping[str, tuple[int, ...]],
    delta: Mapping[str, tuple[int, ...]],
) -> dict[str, tuple[float, int]]:
    """Per parameter mup's width multiplier against the base, and its number of infinite dimensions.

    Args:
        sizes: every parameter's name and dimensions.
        base: the same parameters' at the base shape.
        delta: at a shape that differs from the base in every dimension that is to count as
            infinite.

    Raises:
        SpecError: a parameter that not all have, a dimension that differs from the base's, yet not
            in `delta`, or a `delta` like the base, by which nothing would count as infinite; all at
            once.
    """
    if problems := _incomparable(sizes, base, delta):
        raise SpecError("base shapes", problems)
    mup, found = _mup_infshape(), {}
    for name, size in sizes.items():
        inf = mup.zip_infshape(mup.zip_infshape(base[name], delta[name]), size)
        found[name] = (float(inf.width_mult()), int(inf.ninf()))
    return found


@functools.cache
def _mup_infshape() -> Any:
    """Mup's own module of infinite dimensions, which imports nothing; `import mup` would load
    torch, for seconds.

    Raises:
        ImportError: mup is not installed.
    """
    package = importlib.util.find_spec("mup")
    if package is None or package.origin is None:
        raise ImportError("mup is not installed: pip install mup==1.0.0", name="mup")
    spec = importlib.util.spec_from_file_location(
        "_mup_infshape", Path(package.origin).with_name("infshape.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _incomparable(
    sizes: Mapping[str, tuple[int, ...]],
    base: Mapping[str, tuple[int, ...]],
    delta: Mapping[str, tuple[int, ...]],
) -> list[str]:
    """What mup would pass over in silence, or stumble on."""
    shared = [name for name in sizes if name in base and name in delta]
    known = dict.fromkeys((*sizes, *base, *delta))
    problems = [
        f"{name} is not in all of model, base and delta" for name in known if name not in shared
    ]
    if shared and all(base[name] == delta[name] for name in shared):
        said = "base and delta are of equal width, so nothing would scale"
        return [*problems, f"{said}; delta must differ from the base in every dimension that grows"]
    for name in shared:
        if len({len(sizes[name]), len(base[name]), len(delta[name])}) > 1:
            problems.append(
                f"{name} has {counted(len(sizes[name]), 'dimension')}, {len(base[name])} at the "
                "base and "
                f"{len(delta[name])} in delta"
            )
            continue
        problems += [
            f"{name}: dimension {i} is {here} here and {there} at the base, but does not vary "
            "between base and delta"
            for i, (here, there, other) in enumerate(
                zip(sizes[name], base[name], delta[name], strict=True)
            )
            if here != there == other
        ]
    return problems


def parameters_of(
    parametrization: Parametrization, shape: Shape, base_shape: Shape
) -> tuple[Parameter, ...]:
    """The parameters of `proxies.model.decoder.Decoder`, in the module's own order."""
    base = base_shape.at_depth(shape.num_layers)  # depth is no dimension of a tensor
    sizes, base_sizes = parameter_shapes(shape), parameter_shapes(base)
    multipliers = width_multipliers(sizes, base_sizes, parameter_shapes(delta_shape(shape, base)))
    # The standard form starts every matrix from its own fan-in.
    where = sizes if parametrization.width == "none" else base_sizes
    return tuple(
        Parameter(
            name=name,
            size=size,
            kind=kind_of(name),
            width_multiplier=multipliers[name][0],
            base_std=_base_std(name, where[name], shape.tied),
        )
        for name, size in sizes.items()
    )


def delta_shape(shape: Shape, base: Shape) -> Shape:
    """The base widened in whatever grows: heads, unless it is the head dim."""
    head_dims = 2 if shape.head_dim != base.head_dim else 1
    heads = 2 if shape.num_heads != base.num_heads or head_dims == 1 else 1
    return dataclasses.replace(
        base,
        width=base.width * heads * head_dims,
        num_heads=base.num_heads * heads,
        num_kv_heads=base.num_kv_heads * heads,
        ffn_width=base.ffn_width * heads * head_dims,
    )


def _base_std(name: str, size: tuple[int, ...], tied: bool) -> float:
    kind = kind_of(name)
    if kind in ("hidden", "readout") or (tied and name.startswith("tok_embeddings")):
        return 1 / math.sqrt(size[-1])
    if kind == "embedding":
        return POSITION_STD if name.startswith("pos_embeddings") else EMBEDDING_STD
    return 0.0


def table_of(
    parametrization: Parametrization,
    recipe: Recipe,
    parameters: Iterable[Parameter],
    ratios: Ratios,
    hparams: Hparams,
) -> tuple[ParameterNumbers, ...]:
    """Return the numbers of every parameter.

    Raises:
        SpecError: scaled betas that leave [0, 1).
    """
    averages = moments(parametrization, ratios, hparams)
    return tuple(
        _numbers(parametrization, recipe, p, ratios, hparams, averages) for p in parameters
    )


def _numbers(
    parametrization: Parametrization,
    recipe: Recipe,
    parameter: Parameter,
    ratios: Ratios,
    hparams: Hparams,
    averages: dict[str, float],
) -> ParameterNumbers:
    kind, spec = parameter.kind, recipe.optimizer_for(parameter.kind, parameter.size)
    by_shape = spec.rates_by_shape
    rule = kind_rule(parametrization, kind, by_shape=by_shape)
    base = {name: recipe.value_at_base(hparams, spec.name, name) for name in spec.settings}
    # A matrix scales with its own fan-in, everything else with the width.
    own = kind in ("hidden", "readout")
    scale = dataclasses.replace(ratios, width=parameter.width_multiplier) if own else ratios
    # A width rule by shape is a function of the matrix's own shape; decay takes the share lr * wd
    # as given.
    factor = _shape_factor(parametrization, parameter) if by_shape else 1.0
    rated = dataclasses.replace(scale, width=1.0) if by_shape else scale
    learning_rate = base[LEARNING_RATE] * rule.learning_rate.at(rated) * factor
    decay = (
        base[WEIGHT_DECAY] * rule.weight_decay.at(rated) if decays(parametrization, kind) else 0.0
    )
    decay /= learning_rate if parametrization.weight_decay == "independent" else factor
    settings = {LEARNING_RATE: learning_rate, WEIGHT_DECAY: decay}
    settings |= {
        name: _at_shape(name, value, rule, scale, averages)
        for name, value in base.items()
        if name not in settings
    }
    return ParameterNumbers(
        name=parameter.name,
        size=parameter.size,
        kind=kind,
        width_multiplier=parameter.width_multiplier,
        init_std=parameter.base_std * rule.init_std.at(scale),
        optimizer=spec.name,
        settings=settings,
    )


def _at_shape(
    name: str, value: float, rule: KindRule, scale: Ratios, averages: Mapping[str, float]
) -> float:
    """Return a setting of the base at another shape, by the scaling of its hyperparameter."""
    scaling = HYPERPARAMETERS[name].scaling
    if scaling is None:
        return value
    if scaling == "moments":
        return averages[name]
    powers: Powers = getattr(rule, scaling)
    return value * powers.at(scale)


def _shape_factor(parametrization: Parametrization, parameter: Parameter) -> float:
    growth: float = parameter.width_multiplier**parametrization.muon_width_power
    return shape_factor(parametrization.muon_rate, parameter.size) * growth


def parameter_table(spec: RunSpec) -> tuple[ParameterNumbers, ...]:
    """The numbers of every parameter of the run's `proxies.model.decoder.Decoder`, in the module's
    own order.
    """
    return table_of(
        spec.parametrization,
        RECIPES[spec.optimizer],
        parameters_of(spec.parametrization, spec.shape, spec.base_shape),
        spec.ratios,
        spec.hparams,
    )


def forward_numbers(spec: RunSpec) -> ForwardNumbers:
    """Forward multipliers of the run's model."""
    return forward_of(spec.parametrization, spec.shape, spec.base_shape, spec.ratios, spec.hparams)


def forward_of(
    parametrization: Parametrization,
    shape: Shape,
    base_shape: Shape,
    ratios: Ratios,
    hparams: Hparams,
) -> ForwardNumbers:
    """Forward multipliers of a shape (mup's MuReadout for the output; its README for the
    attention).
    """
    rule = forward_rule(parametrization)
    growth = (
        base_shape.head_dim / shape.head_dim
        if parametrization.attention == "inverse_head_dim"
        else 1.0
    )
    return ForwardNumbers(
        embedding=hparams.embedding_multiplier,
        # In this order it is 1 / sqrt(head_dim) to the bit at the base.
        attention=math.sqrt(growth) / math.sqrt(shape.head_dim),
        residual=rule["residual"].at(ratios),
        output=hparams.output_multiplier * rule["output"].at(ratios),
    )


def name_seed(seed: int, name: str) -> int:
    """A generator seed for one parameter: the same whatever the order, the bank or the sharding."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")


def initial_tensor(numbers: ParameterNumbers, seed: int) -> Tensor:
    """The parameter's initial value, float32 on the CPU: ones for gains, zeros for biases, else
    normal(0, init_std).
    """
    return drawn(numbers.name, numbers.size, numbers.kind, numbers.init_std, seed)


def drawn(name: str, size: tuple[int, ...], kind: Kind, init_std: float, seed: int) -> Tensor:
    """An initial value from the numbers it depends on, for those who have no whole
    `ParameterNumbers`.
    """
    import torch

    # Said each time: torch's default dtype and device are the user's to set, and weights do not
    # depend on them.
    here: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    if kind.endswith("gain"):
        return torch.ones(size, **here)
    if kind.endswith("bias"):
        return torch.zeros(size, **here)
    generator = torch.Generator("cpu").manual_seed(name_seed(seed, name))
    return torch.randn(size, generator=generator, **here) * init_std


def stack_forward_numbers(
    numbers: list[ForwardNumbers], dtype: torch.dtype, device: torch.device | None = None
) -> Multipliers:
    """One forward multiplier per trial, as tensors [K, 1, 1]."""
    import torch

    from proxies.model.decoder import Multipliers

    columns: dict[str, Any] = {
        field.name: torch.tensor(
            [getattr(n, field.name) for n in numbers], dtype=dtype, device=device
        )[:, None, None]
        for field in dataclasses.fields(ForwardNumbers)
    }
    return Multipliers(**columns)
