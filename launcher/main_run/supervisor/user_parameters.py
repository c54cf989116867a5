"""The kind of each parameter of a user's training script, from its reports at two widths, and its
frozen numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun._launcher.main_run.frozen.frozen import Decision, OwnTrainer
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS, USER_TRAINER_HPARAMS, Hparams
from forerun._proxies.core.numbers import Kind, ParameterNumbers
from forerun._proxies.core.optimizers import RECIPES
from forerun._proxies.core.powers import Ratios
from forerun._proxies.core.programs import PLACEHOLDERS
from forerun._proxies.parametrization.parametrization import Parameter, compute_table


@dataclass(frozen=True, kw_only=True, slots=True)
class HookParameter:
    """One parameter in the report of `forerun.hook`."""

    name: str
    names: tuple[str, ...]
    """All of its names; a tied parameter has several."""
    modules: tuple[str, ...]
    """Classes of the modules that hold it."""
    shape: tuple[int, ...]
    dtype: str
    trained: bool
    groups: tuple[int, ...]
    """Numbers of the optimizer groups that train it."""
    mean: float
    std: float

    @property
    def folded(self) -> str:
        """Name with the number of the block, which is the first number, as `*`."""
        return re.sub(r"(?<![^.])\d+(?![^.])", "*", self.name, count=1)

    @property
    def fan_in(self) -> int:
        """Fan-in of a matrix: GPT-2's `Conv1D` holds [in, out], other modules [out, in]."""
        return self.shape[0 if self.modules[0] == "Conv1D" else -1]


def infer_kind(parameter: HookParameter, reference: HookParameter) -> Kind:
    """Infer a parameter's kind from the dimensions that differ at the reference width.

    The rules are the same as in `forerun._proxies.external.roles`, but no module is called here. A
    tensor of more than two dimensions, such as stacked experts, counts as a hidden matrix if its
    last one grows.
    """
    grows = [
        size != reference_size
        for size, reference_size in zip(parameter.shape, reference.shape, strict=True)
    ]
    in_block = "*" in parameter.folded
    if sum(size > 1 for size in parameter.shape) < 2:
        if parameter.std > 0 or parameter.mean == 0:
            return "block_bias" if in_block else "final_bias"
        if not in_block:
            return "final_gain"
        return "block_gain" if any(grows) else "qk_gain"
    if "Embedding" in parameter.modules:
        return "embedding"
    if in_block or all(grows[-2:]):
        return "hidden"
    module = parameter.modules[0]
    fan_in_grows = grows[0] if module == "Conv1D" else grows[-1]
    return "readout" if fan_in_grows and module == "Linear" else "embedding"


def list_user_rates(trainer: OwnTrainer) -> list[float]:
    """Return the values of the plan's own axes: a learning rate may be one of them."""
    return [
        float(value)
        for name, value in trainer.named.items()
        if name not in PLACEHOLDERS and isinstance(value, (int, float)) and value > 0
    ]


def compute_frozen_numbers(
    decision: Decision,
    trainer: OwnTrainer,
    parameters: tuple[HookParameter, ...],
    references: Mapping[str, HookParameter],
) -> dict[str, ParameterNumbers]:
    """Return the parametrization's numbers of each parameter that has a reference, by name.

    Their `init_std` is a factor on the std that the script gives the reference parameter.

    Args:
        decision: The config.
        trainer: The user's trainer, with the hyperparameters at the base width.
        parameters: Parameters at the main run's width.
        references: Parameters at the reference width, by folded name.
    """
    shape, base = decision.shape, decision.base_shape
    ratios = Ratios(width=shape.width / base.width, depth=shape.num_layers / base.num_layers)
    rows = []
    for parameter in parameters:
        reference = references.get(parameter.folded)
        if reference is None or len(reference.shape) != len(parameter.shape):
            continue
        kind = infer_kind(parameter, reference)
        multiplier = ratios.width
        if multiplier != 1 and kind in ("hidden", "readout"):
            multiplier = parameter.fan_in / reference.fan_in
        rows.append(
            Parameter(
                name=parameter.name,
                size=parameter.shape,
                kind=kind,
                width_multiplier=multiplier,
                base_std=1.0,
            )
        )
    values: dict[str, Any] = {}
    for name in USER_TRAINER_HPARAMS:
        value = trainer.values[HYPERPARAMETERS[name].placeholder_name]
        values[name] = HYPERPARAMETERS[name].off if value is None else value
    table = compute_table(
        decision.parametrization, RECIPES[decision.optimizer], rows, ratios, Hparams(**values)
    )
    return {numbers.name: numbers for numbers in table}
