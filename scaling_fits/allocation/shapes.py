"""From a wanted number of parameters to a whole-numbered shape."""

from __future__ import annotations

import math
from dataclasses import dataclass

from proxies.flops import ParamCount, count_params, flops_per_token
from proxies.shape import Shape


class ShapeError(ValueError):
    """No shape of this family is possible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeChoice:
    """A shape near a wanted size, counted exactly."""

    shape: Shape
    wanted_params: float
    counts: ParamCount
    flops_per_token: int
    """Training FLOPs, causal convention."""

    @property
    def ratio(self) -> float:
        """Parameters it has over parameters wanted."""
        return self.counts.total / self.wanted_params


def shape_near(template: Shape, params: float, width_multiple: int) -> ShapeChoice:
    """The template at the width, a multiple of `width_multiple`, whose total parameters are nearest in log.

    Depth, head dim and the ratios of key-value heads and feed-forward width are the template's; widths at which
    these would not stay whole are passed over. Of two widths equally near the smaller is taken.

    Raises:
        ShapeError: `params` or `width_multiple` is not positive, or no such width keeps the ratios whole.
    """
    problems = []
    if not (math.isfinite(params) and params > 0):
        problems.append(f"params = {params}: a finite number > 0 is wanted")
    if width_multiple < 1:
        problems.append(f"width_multiple = {width_multiple}: a whole number >= 1 is wanted")
    if problems:
        raise ShapeError("; ".join(problems))
    step = _whole_step(template, width_multiple)
    below, above = 0, 1  # in steps; parameters grow with width, so the answer is one of the two that bracket
    while count_params(template.at_width(above * step)).total < params:
        below, above = above, 2 * above
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (
            (middle, above) if count_params(template.at_width(middle * step)).total < params else (below, middle)
        )
    shapes = [template.at_width(count * step) for count in (below, above) if count > 0]
    best = min(shapes, key=lambda shape: abs(math.log(count_params(shape).total / params)))
    return ShapeChoice(
        shape=best, wanted_params=float(params), counts=count_params(best), flops_per_token=flops_per_token(best)
    )


def _whole_step(template: Shape, width_multiple: int) -> int:
    """The smallest width, a multiple of `width_multiple`, of which every multiple is a valid width."""
    group = template.head_dim * (template.num_heads // template.num_kv_heads)
    whole_ffn = template.width // math.gcd(template.width, template.ffn_width)
    return math.lcm(group, whole_ffn, width_multiple)
