"""Forward multipliers moved into the weights they multiply, for a trainer that has none. Standard library only.

With c * W = W' as the weight, the gradient shrinks by c. The optimizer then takes the same path from an init std times
c and the numbers of `GroupNumbers.for_weights_times`. The same function at every step, but only without clipping: the
gradient's norm is another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Literal, get_args

from proxies.core.checks import SpecError
from proxies.core.numbers import ForwardNumbers, ParameterNumbers

Part = Literal["embedding", "residual", "output"]
PARTS: tuple[Part, ...] = get_args(Part)
_LAST_OF_BRANCH = (".attention.wo.", ".feed_forward.w2.")


def absorbed(
    table: tuple[ParameterNumbers, ...], forward: ForwardNumbers, parts: Collection[Part] = PARTS
) -> tuple[tuple[ParameterNumbers, ...], ForwardNumbers]:
    """The same function of `proxies.model.decoder.Decoder` with the multipliers of these parts at 1.

    The attention's stays: with QK-norm no matrix follows the norm, and every trainer has a softmax scale to set.

    Args:
        table: every parameter's numbers.
        forward: the multipliers.
        parts: which to absorb.

    Raises:
        SpecError: a multiplier that no parameter can take: the embedding's or the output's where the two are one
            matrix, or any in a model whose parameters have other names.
    """
    owners = {p.name: _part(p) for p in table}
    moved: dict[str, float] = {part: getattr(forward, part) for part in parts if getattr(forward, part) != 1}
    tied = "output" not in owners.values()
    problems = [
        f"{part} = {value:g} cannot be absorbed: "
        + ("embedding and readout are one matrix" if tied else "no parameter of this model can take it")
        for part, value in moved.items()
        if part not in owners.values() or (tied and part != "residual")
    ]
    if problems:
        raise SpecError("multipliers", problems)
    rows = tuple(_times(p, moved.get(owners[p.name], 1.0)) for p in table)
    return rows, dataclasses.replace(forward, **dict.fromkeys(moved, 1.0))


def _part(parameter: ParameterNumbers) -> str:
    """The multiplier that multiplies what a parameter gives; none for most."""
    if parameter.kind in ("embedding", "readout"):
        return "embedding" if parameter.kind == "embedding" else "output"
    return "residual" if any(last in parameter.name for last in _LAST_OF_BRANCH) else ""


def _times(parameter: ParameterNumbers, factor: float) -> ParameterNumbers:
    return dataclasses.replace(parameter.for_weights_times(factor), init_std=parameter.init_std * factor)
