"""What a budget buys of an integer shape when its FLOPs are counted exactly, not as 6 N D.

6 N leaves the attention out and counts an untied input embedding, a look-up, as a product: at long contexts and
small widths it is far off. Training then costs the shape's own FLOPs per token, serving a third of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scaling_fits.allocation import repeats
from scaling_fits.allocation.allocate import Allocation
from scaling_fits.allocation.shapes import ShapeOption
from scaling_fits.forecast.uncertainty import FittedRuns, predict


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactRun:
    """An integer shape, and the tokens the budget pays for."""

    tokens: float
    loss_nats: float
    interval: tuple[float, float] | None


def exact_run(fitted: FittedRuns, allocation: Allocation, option: ShapeOption) -> ExactRun | None:
    """The run of `option` that the allocation's budget pays for, exactly counted; None when serving alone eats it.

    The loss is of the law at the shape's own N and these tokens; the law knows nothing of contexts or aspects.
    """
    spending = allocation.spending
    served = spending.inference_cost * spending.inference_tokens * option.flops_per_token / 3
    tokens = (spending.flops - served) / option.flops_per_token
    if tokens < 1:
        return None
    if spending.unique_tokens is not None and spending.max_epochs is not None:
        tokens = min(tokens, spending.unique_tokens * spending.max_epochs)
    logs = np.log(np.array([float(option.params), tokens]))
    n, _ = repeats.counted(logs[:1], spending.unique_params, repeats.PARAMS_HALF)
    d, _ = repeats.counted(logs[1:], spending.unique_tokens, repeats.TOKENS_HALF)
    at = predict(fitted, math.exp(float(n[0])), math.exp(float(d[0])))
    ends = None if at.low is None or at.high is None else (at.low, at.high)
    return ExactRun(tokens=tokens, loss_nats=at.loss_nats, interval=ends)
