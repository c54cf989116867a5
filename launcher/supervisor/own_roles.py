"""What the parameters of a user's own training script are, from its reports at two widths, and
their frozen numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from launcher.frozen.frozen import Decision
from proxies.core.hyperparameters import HYPERPARAMETERS, USER_TRAINER_HPARAMS, Hparams
from proxies.core.numbers import Kind, ParameterNumbers
from proxies.core.optimizers import RECIPES
from proxies.core.powers import Ratios
from proxies.core.programs import PLACEHOLDERS
from proxies.parametrization.parametrization import Parameter, table_of


@dataclass(frozen=True, kw_only=True, slots=True)
class HookParameter:
    """One parameter, as `forerun.hook` found it."""

    name: str
    names: tuple[str, ...]
    """All of its names; a tied one has several."""
    modules: tuple[str, ...]
    """Classes of the modules that hold it."""
    shape: tuple[int, ...]
    dtype: str
    trained: bool
    groups: tuple[int, ...]
    """Optimizer groups that train it."""
    mean: float
    std: float

    @property
    def folded(self) -> str:
        """Its name with the block's number, which is the first, taken out."""
        return re.sub(r"(?<![^.])\d+(?![^.])", "*", self.name, count=1)

    @property
    def fan_in(self) -> int:
        """Of a matrix; GPT-2's `Conv1D` holds [in, out], others [out, in]."""
        return self.shape[0 if self.modules[0] == "Conv1D" else -1]


def kind_of(here: HookParameter, there: HookParameter) -> Kind:
    """What it is, by the dimensions in which two widths differ: the rules of
    `proxies.external.roles`, without calls.

    More than two dimensions, such as stacked experts, count as a hidden matrix if their last one
    grows.
    """
    grows = [one != other for one, other in zip(here.shape, there.shape, strict=True)]
    in_block = "*" in here.folded
    if sum(dim > 1 for dim in here.shape) < 2:
        if here.std > 0 or here.mean == 0:
            return "block_bias" if in_block else "final_bias"
        if not in_block:
            return "final_gain"
        return "block_gain" if any(grows) else "qk_gain"
    if "Embedding" in here.modules:
        return "embedding"
    if in_block or all(grows[-2:]):
        return "hidden"
    fan_in_grows = grows[0] if here.modules[0] == "Conv1D" else grows[-1]
    return "readout" if fan_in_grows and here.modules[0] == "Linear" else "embedding"


def hparams_of(decision: Decision) -> Hparams:
    """The hyperparameters at the base width, as the command is told them."""
    assert decision.own is not None
    told = {
        name: decision.own.values[HYPERPARAMETERS[name].told_as] for name in USER_TRAINER_HPARAMS
    }
    values = {
        name: HYPERPARAMETERS[name].off if value is None else value for name, value in told.items()
    }
    return Hparams(**values)  # type: ignore[arg-type]


def own_rates(decision: Decision) -> tuple[float, ...]:
    """Values of the plan's own axes: a rate may be one of them, as it is."""
    assert decision.own is not None
    named = decision.own.named
    return tuple(
        float(value)
        for name, value in named.items()
        if name not in PLACEHOLDERS and isinstance(value, (int, float)) and value > 0
    )


def frozen_numbers(
    decision: Decision,
    parameters: tuple[HookParameter, ...],
    reference: Mapping[str, HookParameter],
) -> dict[str, ParameterNumbers]:
    """What the parametrization gives each parameter that the reference has too, by name; `init_std`
    as a multiple of the reference's.
    """
    at_base = decision.shape.width == decision.base_shape.width
    ratios = Ratios(
        width=decision.shape.width / decision.base_shape.width,
        depth=decision.shape.num_layers / decision.base_shape.num_layers,
    )
    found = []
    for one in parameters:
        if (other := reference.get(one.folded)) is None or len(other.shape) != len(one.shape):
            continue
        kind = kind_of(one, other)
        own = kind in ("hidden", "readout")
        multiplier = 1.0 if at_base else one.fan_in / other.fan_in if own else ratios.width
        found.append(
            Parameter(
                name=one.name, size=one.shape, kind=kind, width_multiplier=multiplier, base_std=1.0
            )
        )
    return {
        row.name: row
        for row in table_of(
            decision.parametrization,
            RECIPES[decision.optimizer],
            found,
            ratios,
            hparams_of(decision),
        )
    }
