"""The share of the peak that a run reaches over all the hours that are paid, by the runs that were published.

Its log is a line in the log of the parameters, and lower on accelerators of H100's class, with errors of Student's t at
4 degrees of freedom, so that one run which took six times as long does not set everybody's interval. Fitted by
maximum likelihood to `PUBLISHED_RUNS`; evaluations, restarts, stragglers and repeated steps are in it as far as they
are in the hours that its authors gave.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from launcher.base.reference import gpu
from launcher.estimates.published import PUBLISHED_RUNS, PublishedRun
from launcher.estimates.spans import Span

if TYPE_CHECKING:
    from launcher.estimates.machine import Machine

LEVEL = 0.9
PROGRESS = Span(value=0.95, low=0.9, high=1.0)
"""Share of the hours paid in which a run steps; Llama 3.1 405B on 16,384 H100 had more than 0.9 (arXiv 2407.21783)."""
_DEGREES = 4.0  # the usual robust choice (Lange, Little, Taylor, JASA 84(408), 1989)
_QUANTILE = 2.1318  # of Student's t with as many degrees, at 0.95
_FAST = (
    5e14  # peak FLOP/s from which an accelerator is of H100's class: A100 and TPUv4 lie below, H100 and all later above
)
_MIDDLE = 1e10  # parameters at which the line is centred
_ROUNDS = 200  # of reweighting, which has converged to 1e-9 by some fifty
SMALLEST_PUBLISHED = 5e7
"""Parameters: below, no run's hours are published, and the share is what is assumed of proxies."""
PROXY_MFU = Span(
    value=0.1, low=0.01, high=0.4,
    source="assumed of a proxy on a GPU: small ones wait for launches, 10M parameters at 16,384 tokens reach 0.4 by a "
    "roofline, not measured",
)  # fmt: skip

_Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """Log of the share, its scale, and of how many runs."""

    coefficients: _Vector
    scale: float
    num_runs: int


def utilization(params: float, peak_flops: float) -> Span:
    """The share over all hours paid, of a run of so many parameters on accelerators of such a peak."""
    return _span(_line(PUBLISHED_RUNS), params, peak_flops)


def paid_share(machine: Machine, params: float) -> Span:
    """The share over all hours paid on a machine: by its measured throughput, else as published."""
    if machine.measured:
        source = f"MFU {machine.mfu.source}, and steps in 0.9 to 1 of the hours paid"
        return replace(machine.mfu.times(PROGRESS), source=source)
    return utilization(params, machine.peak_flops)


def left_out(those: Sequence[PublishedRun], run: PublishedRun) -> Span:
    """The share of a published run, by all but those."""
    others = tuple(other for other in PUBLISHED_RUNS if other not in those)
    return _span(_line(others), run.params, gpu(run.gpu)[1].peak_flops)


def _span(line: _Line, params: float, peak_flops: float) -> Span:
    if params < SMALLEST_PUBLISHED:
        return PROXY_MFU
    middle = float(_row(params, peak_flops) @ line.coefficients)
    half = _QUANTILE * line.scale
    return Span(
        value=math.exp(middle), low=math.exp(middle - half), high=math.exp(middle + half),
        source=f"of the peak over all hours paid, attention's whole square counted: {line.num_runs} published runs, "
        f"{LEVEL:.0%} of them inside (docs/estimates.md)",
    )  # fmt: skip


def _row(params: float, peak_flops: float) -> _Vector:
    return np.array([1.0, float(peak_flops >= _FAST), math.log(params / _MIDDLE)])


@functools.cache
def _line(runs: Sequence[PublishedRun]) -> _Line:
    """By iterated reweighting, which is the likelihood's maximum under Student's t."""
    x_RP = np.array([_row(run.params, gpu(run.gpu)[1].peak_flops) for run in runs])
    y_R = np.log([run.utilization for run in runs])
    weights_R, theta_P, variance = np.ones(len(runs)), np.zeros(3), 1.0
    for _ in range(_ROUNDS):
        root_R = np.sqrt(weights_R)
        theta_P = np.linalg.lstsq(x_RP * root_R[:, None], y_R * root_R, rcond=None)[0]
        squares_R = (y_R - x_RP @ theta_P) ** 2
        variance = float(np.mean(weights_R * squares_R))
        weights_R = (_DEGREES + 1) / (_DEGREES + squares_R / variance)
    return _Line(coefficients=theta_P, scale=math.sqrt(variance), num_runs=len(runs))
