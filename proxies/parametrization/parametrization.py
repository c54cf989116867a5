"""Apply a parametrization to a model: compute each parameter's init std and optimizer settings.

`forerun._proxies.core.rules` defines the parametrizations: the powers by which numbers scale. This
module evaluates these powers for the parameters of one model, and draws the initial values.

The width multipliers come from the infinite dimensions of the package `mup` (those that grow with
the width), and this is the only module that imports it. The parametrization `mup` gives the same
numbers as mup 1.0.0, tensor by tensor (tested). At the base shape all parametrizations are the same
function.

The results are plain numbers, never mup's attribute `infshape` of a tensor: FSDP2, deepcopy, and
meta tensors drop this attribute, and then a wrong base shape would not be noticed. Computing the
numbers does not load torch.
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

from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS, LEARNING_RATE, Hparams
from forerun._proxies.core.muon import compute_shape_factor
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.numbers import ForwardNumbers, Kind, ParameterNumbers, get_kind
from forerun._proxies.core.optimizers import RECIPES, WEIGHT_DECAY, Recipe
from forerun._proxies.core.powers import Powers, Ratios
from forerun._proxies.core.rules import (
    KindRule,
    Parametrization,
    has_decay,
    make_forward_rule,
    make_kind_rule,
    scale_moments,
)
from forerun._proxies.core.shape import Shape, list_parameter_shapes
from forerun._proxies.core.spec import RunSpec

if TYPE_CHECKING:
    from torch import Tensor

Sizes = Mapping[str, tuple[int, ...]]
"""Dimensions of every parameter by name."""

# ---- Width multipliers ----


def compute_width_multipliers(
    sizes: Sizes, base: Sizes, delta: Sizes
) -> dict[str, tuple[float, int]]:
    """Return the width multiplier and the number of infinite dimensions of every parameter.

    Args:
        sizes: Dimensions at the shape.
        base: Dimensions at the base shape.
        delta: Dimensions at another shape. The dimensions in which it differs from the base are
            those that grow with the width: mup calls them infinite.

    Raises:
        SpecError: A parameter is missing in one of the three, a dimension of `sizes` differs from
            the base although that of `delta` does not, or `delta` equals the base, so that nothing
            would scale (all problems at once).
    """
    if problems := _compare_sizes(sizes, base, delta):
        raise SpecError("base shapes", problems)
    mup, multipliers = _load_mup_infshape(), {}
    for name, size in sizes.items():
        infshape = mup.zip_infshape(mup.zip_infshape(base[name], delta[name]), size)
        multipliers[name] = float(infshape.width_mult()), int(infshape.ninf())
    return multipliers


@functools.cache
def _load_mup_infshape() -> Any:
    """Return mup's module of infinite dimensions; `import mup` would load torch, for seconds.

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


def _compare_sizes(sizes: Sizes, base: Sizes, delta: Sizes) -> list[str]:
    """Return why these dimensions cannot be compared; mup itself would accept some of them."""
    shared = [name for name in sizes if name in base and name in delta]
    problems = [
        f"{name} is not in all of model, base and delta"
        for name in dict.fromkeys((*sizes, *base, *delta))
        if name not in shared
    ]
    if shared and all(base[name] == delta[name] for name in shared):
        problems.append(
            "base and delta are of equal width, so nothing would scale; delta must differ from the "
            "base in every dimension that grows"
        )
        return problems
    for name in shared:
        size, base_size, delta_size = sizes[name], base[name], delta[name]
        if not len(size) == len(base_size) == len(delta_size):
            problems.append(
                f"{name} has {format_counted(len(size), 'dimension')}, {len(base_size)} at the "
                f"base and {len(delta_size)} in delta"
            )
            continue
        problems += [
            f"{name}: dimension {i} is {here} here and {at_base} at the base, but does not vary "
            "between base and delta"
            for i, (here, at_base) in enumerate(zip(size, base_size, strict=True))
            if here != at_base == delta_size[i]
        ]
    return problems


# ---- Parameters ----

EMBEDDING_STD = 1.0
POSITION_STD = 0.5
"""Init std of learned positions: half that of tokens, as in GPT-2's code (0.01 and 0.02)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A parameter of a model, without the numbers that a parametrization gives it."""

    name: str
    size: tuple[int, ...]
    kind: Kind
    width_multiplier: float
    """Ratio of the fan-in or width to that at the base shape, from mup."""
    base_std: float
    """Init std before the rule scales it: the std at the base shape, or at the model's own shape if
    there is no width rule; 0 for gains and biases."""


def list_parameters(
    parametrization: Parametrization, shape: Shape, base_shape: Shape
) -> tuple[Parameter, ...]:
    """Return the parameters of `forerun._proxies.model.decoder.Decoder`, in the model's order."""
    base = base_shape.at_depth(shape.num_layers)  # depth is no dimension of a tensor
    sizes, base_sizes = list_parameter_shapes(shape), list_parameter_shapes(base)
    multipliers = compute_width_multipliers(
        sizes, base_sizes, list_parameter_shapes(make_delta_shape(shape, base))
    )
    # Without a width rule, the init std of every matrix follows its own fan-in
    std_sizes = sizes if parametrization.width == "none" else base_sizes
    return tuple(
        Parameter(
            name=name,
            size=size,
            kind=get_kind(name),
            width_multiplier=multipliers[name][0],
            base_std=_compute_base_std(name, std_sizes[name], shape.tied),
        )
        for name, size in sizes.items()
    )


def make_delta_shape(shape: Shape, base: Shape) -> Shape:
    """Return a shape that is larger than the base in every dimension that grows with the width.

    A model gets wider by more heads, by a larger head dim, or by both. What differs between the
    shape and the base is doubled, and so is the FFN width. If nothing differs, the number of heads
    is doubled.
    """
    head_dims = 2 if shape.head_dim != base.head_dim else 1
    heads = 2 if shape.num_heads != base.num_heads or head_dims == 1 else 1
    return dataclasses.replace(
        base,
        width=base.width * heads * head_dims,
        num_heads=base.num_heads * heads,
        num_kv_heads=base.num_kv_heads * heads,
        ffn_width=base.ffn_width * heads * head_dims,
    )


def _compute_base_std(name: str, size: tuple[int, ...], tied: bool) -> float:
    """Return the init std of a parameter of this size; a tied table is drawn like a readout."""
    kind = get_kind(name)
    if kind in ("hidden", "readout") or (tied and name.startswith("tok_embeddings")):
        return 1 / math.sqrt(size[-1])
    if kind == "embedding":
        return POSITION_STD if name.startswith("pos_embeddings") else EMBEDDING_STD
    return 0.0


# ---- Numbers ----


def compute_parameter_table(spec: RunSpec) -> tuple[ParameterNumbers, ...]:
    """Return the numbers of every parameter of a run's `forerun._proxies.model.decoder.Decoder`, in
    the model's order.
    """
    return compute_table(
        spec.parametrization,
        RECIPES[spec.optimizer],
        list_parameters(spec.parametrization, spec.shape, spec.base_shape),
        spec.ratios,
        spec.hparams,
    )


def compute_table(
    parametrization: Parametrization,
    recipe: Recipe,
    parameters: Iterable[Parameter],
    ratios: Ratios,
    hparams: Hparams,
) -> tuple[ParameterNumbers, ...]:
    """Return the numbers of some parameters.

    Raises:
        SpecError: Scaled betas are outside [0, 1).
    """
    betas = scale_moments(parametrization, ratios, hparams)
    return tuple(
        _compute_numbers(parametrization, recipe, parameter, ratios, hparams, betas)
        for parameter in parameters
    )


def _compute_numbers(
    parametrization: Parametrization,
    recipe: Recipe,
    parameter: Parameter,
    ratios: Ratios,
    hparams: Hparams,
    betas: Mapping[str, float],
) -> ParameterNumbers:
    """Return the numbers of one parameter; `betas` are the scaled betas by name."""
    kind = parameter.kind
    optimizer = recipe.get_optimizer(kind, parameter.size)
    by_shape = optimizer.rates_by_shape
    rule = make_kind_rule(parametrization, kind, by_shape=by_shape)
    base = {
        name: recipe.get_base_value(hparams, optimizer.name, name) for name in optimizer.settings
    }

    # A matrix scales with its own fan-in, everything else with the model's width
    if kind in ("hidden", "readout"):
        ratios = dataclasses.replace(ratios, width=parameter.width_multiplier)

    # A rule by shape replaces the width in rate and decay by a factor of the matrix's own shape
    rate_ratios, factor = ratios, 1.0
    if by_shape:
        rate_ratios = dataclasses.replace(ratios, width=1.0)
        factor = compute_shape_factor(parametrization.muon_rate, parameter.size)
        factor *= parameter.width_multiplier**parametrization.muon_width_power

    # Learning rate and weight decay
    learning_rate = base[LEARNING_RATE] * rule.learning_rate.evaluate(rate_ratios) * factor
    decay = 0.0
    if has_decay(parametrization, kind):
        decay = base[WEIGHT_DECAY] * rule.weight_decay.evaluate(rate_ratios)
        # A step removes the share lr * decay of a weight. Independent decay sets this share itself,
        # so divide by the learning rate; otherwise the share must not change with the matrix's
        # shape, so divide by the factor of the shape that the learning rate contains.
        decay /= learning_rate if parametrization.weight_decay == "independent" else factor

    # All other settings
    settings = {LEARNING_RATE: learning_rate, WEIGHT_DECAY: decay}
    settings |= {
        name: _scale_setting(name, value, rule, ratios, betas)
        for name, value in base.items()
        if name not in settings
    }
    return ParameterNumbers(
        name=parameter.name,
        size=parameter.size,
        kind=kind,
        width_multiplier=parameter.width_multiplier,
        init_std=parameter.base_std * rule.init_std.evaluate(ratios),
        optimizer=optimizer.name,
        settings=settings,
    )


def _scale_setting(
    name: str, value: float, rule: KindRule, ratios: Ratios, betas: Mapping[str, float]
) -> float:
    """Return a setting other than learning rate and weight decay, from its value at the base."""
    scaling = HYPERPARAMETERS[name].scaling
    if scaling is None:
        return value
    if scaling == "moments":
        return betas[name]
    powers: Powers = getattr(rule, scaling)
    return value * powers.evaluate(ratios)


def compute_forward_numbers(spec: RunSpec) -> ForwardNumbers:
    """Return the forward multipliers of a run's model."""
    return compute_forward_of_shape(
        spec.parametrization, spec.shape, spec.base_shape, spec.ratios, spec.hparams
    )


def compute_forward_of_shape(
    parametrization: Parametrization,
    shape: Shape,
    base_shape: Shape,
    ratios: Ratios,
    hparams: Hparams,
) -> ForwardNumbers:
    """Return the forward multipliers of a shape.

    The output multiplier is that of mup's class `MuReadout`. The attention's scale is sqrt(base
    head_dim) / head_dim, as mup's README asks.
    """
    rule = make_forward_rule(parametrization)
    growth = 1.0
    if parametrization.attention == "inverse_head_dim":
        growth = base_shape.head_dim / shape.head_dim
    return ForwardNumbers(
        embedding=hparams.embedding_multiplier,
        # In this order it equals 1 / sqrt(head_dim) to the bit at the base
        attention=math.sqrt(growth) / math.sqrt(shape.head_dim),
        residual=rule["residual"].evaluate(ratios),
        output=hparams.output_multiplier * rule["output"].evaluate(ratios),
    )


# ---- Initial values ----


def derive_seed(seed: int, name: str) -> int:
    """Return the seed of one parameter.

    It depends on the run's seed and the parameter's name only, so the initial values are the same
    in any order of the parameters, in a bank or alone, and sharded or not. The text of which the
    hash is taken must never change: it determines the initial values of every recorded run.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")


def draw_initial_tensor(numbers: ParameterNumbers, seed: int) -> Tensor:
    """Return a parameter's initial value in float32 on the CPU."""
    return draw_tensor(numbers.name, numbers.size, numbers.kind, numbers.init_std, seed)


def draw_tensor(name: str, size: tuple[int, ...], kind: Kind, init_std: float, seed: int) -> Tensor:
    """Draw an initial value in float32 on the CPU: Normal(0, init_std), gains one, biases zero."""
    import torch

    # Dtype and device are explicit, because the user may have set torch's defaults
    options: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    if kind.endswith("gain"):
        return torch.ones(size, **options)
    if kind.endswith("bias"):
        return torch.zeros(size, **options)
    generator = torch.Generator("cpu").manual_seed(derive_seed(seed, name))
    return torch.randn(size, generator=generator, **options) * init_std
