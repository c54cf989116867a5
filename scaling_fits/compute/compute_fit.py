"""Optima against compute: N*, D* and the loss there as laws of C, from IsoFLOP valleys or from the frontier.

`isoflop.fit_isoflop` and `frontier.fit_frontier` make a `ComputeFit`; here it is asked, printed and kept in a file.
The FLOPs are those of the table, whatever it counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from proxies.core import canon
from scaling_fits.compute.compute_laws import Inflation, Laws, Pair
from scaling_fits.compute.options import CellStatus, ComputeStatus, OptimaError
from scaling_fits.compute.power_laws import FloorLaw, PowerLaw
from scaling_fits.laws.law import CannotTellError, LawError
from scaling_fits.laws.table import DroppedRow, RunTable

FILE_KIND = "forerun.compute_fit/1"
_FAR = 30.0  # times the largest budget

ComputeForm = Literal["isoflop", "frontier"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimum:
    """The best size for one amount of compute, or why nobody can say. Numbers are None unless the status is ok."""

    flops: float
    status: CellStatus
    """`edge`: it may lie outside the sizes run; `flat`: within the noise it may; `no_valley`: not even a minimum."""
    reason: str | None
    """What is wrong and what to run; None where the status is ok."""
    params: float | None
    params_interval: Pair | None
    tokens: float | None
    tokens_interval: Pair | None
    loss_nats: float | None
    loss_interval: Pair | None
    num_runs: int
    num_sizes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeFit:
    """Laws of the optimum against compute, with the optima behind them."""

    kind: str
    form: ComputeForm
    method: str | None
    """How an IsoFLOP valley's bottom was found."""
    status: ComputeStatus
    optima: tuple[Optimum, ...]
    """By FLOPs, ascending."""
    params_law: PowerLaw | None
    """N* of C. None, like the other laws, where the optima identify none; where only losses are known, as D*'s is."""
    tokens_law: PowerLaw | None
    loss_law: FloorLaw | None
    inflation: Inflation
    level: float
    bootstrap: int
    """Draws behind the intervals; 0: no intervals."""
    seed: int
    num_runs: int
    largest_flops: float
    """Of any run."""
    flops_given: bool
    """Whether FLOPs are the table's own rather than 6 * N * D."""
    dropped: tuple[DroppedRow, ...]
    warnings: tuple[str, ...]
    rows: Literal["runs", "optima"] = dataclasses.field(default="runs", metadata=canon.LATER)
    """What a row of the table was taken for: one run, or the best of its budget."""

    def __post_init__(self) -> None:
        """Check that laws and status go together.

        Raises:
            OptimaError: they do not.
        """
        problems = [f"kind = {self.kind!r}: {FILE_KIND!r} is wanted"] if self.kind != FILE_KIND else []
        sizes = {law is not None for law in (self.params_law, self.tokens_law)}
        known = self.loss_law is not None
        if len(sizes) > 1 or known != (self.status == "converged") or known not in sizes | {self.rows == "optima"}:
            problems.append(f"status {self.status} does not go with the laws that are there")
        if not 0 < self.level < 1 or self.bootstrap < 0 or self.seed < 0 or not self.largest_flops > 0:
            problems.append("level, bootstrap, seed or largest_flops is out of range")
        if problems:
            raise OptimaError(problems)


def assembled(
    table: RunTable,
    form: ComputeForm,
    optima: tuple[Optimum, ...],
    laws: Laws | None,
    warnings: Sequence[str],
    *,
    method: str | None,
    bootstrap: int,
    level: float,
    seed: int,
) -> ComputeFit:
    """The fit of a table: its optima, and the laws through them, None where they identify none."""
    return ComputeFit(
        kind=FILE_KIND,
        form=form,
        method=method,
        status="unidentified" if laws is None else "converged",
        optima=optima,
        params_law=laws.params if laws else None,
        tokens_law=laws.tokens if laws else None,
        loss_law=laws.loss if laws else None,
        inflation=laws.inflation if laws else Inflation(),
        level=level,
        bootstrap=bootstrap,
        seed=seed,
        num_runs=table.num_runs,
        largest_flops=float(table.flops.max()),
        flops_given=table.flops_given,
        dropped=table.dropped,
        warnings=tuple(warnings),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputePrediction:
    """The best run for a budget."""

    flops: float
    params: float | None
    """None, like the tokens, where only losses are known."""
    params_interval: Pair | None
    tokens: float | None
    tokens_interval: Pair | None
    loss_nats: float
    interval: Pair | None
    """Of the loss of one new run at the best size."""
    level: float
    extrapolation: float
    """Budget over the largest FLOPs of any run."""
    warnings: tuple[str, ...]


def stretched(value: float, interval: Pair | None, inflation: float) -> Pair | None:
    """The interval with both arms lengthened, in logs."""
    if interval is None:
        return None
    return value * (interval[0] / value) ** inflation, value * (interval[1] / value) ** inflation


def predict_at(fit: ComputeFit, flops: float) -> ComputePrediction:
    """The best size and tokens for `flops`, counted as the table counted, and the loss of one run there.

    Raises:
        LawError: a budget that is not finite and positive.
        CannotTellError: the runs identify no law.
    """
    if not (math.isfinite(flops) and flops > 0):
        raise LawError(f"flops = {flops}: a finite number > 0 is wanted")
    if fit.loss_law is None:
        raise CannotTellError(fit.warnings)
    extrapolation = flops / fit.largest_flops
    warnings = list(fit.warnings)
    if extrapolation > _FAR:
        warnings.append(f"the budget is {extrapolation:.3g} times the largest run's: add budgets nearer to it")
    params, params_ends = _size_at(fit, fit.params_law, flops, fit.inflation.params)
    tokens, tokens_ends = _size_at(fit, fit.tokens_law, flops, fit.inflation.tokens)
    loss = fit.loss_law.at(flops)
    return ComputePrediction(
        flops=float(flops),
        params=params,
        params_interval=params_ends,
        tokens=tokens,
        tokens_interval=tokens_ends,
        loss_nats=loss,
        interval=stretched(loss, fit.loss_law.interval_at(flops, fit.level, fit.seed), fit.inflation.loss),
        level=fit.level,
        extrapolation=extrapolation,
        warnings=tuple(warnings),
    )


def _size_at(fit: ComputeFit, law: PowerLaw | None, flops: float, inflation: float) -> tuple[float | None, Pair | None]:
    """The best N or D and its interval; None where only losses are known."""
    if law is None:
        return None, None
    value, ends = law.at(flops), law.interval_at(flops, level=fit.level)
    return value, stretched(value, ends if fit.bootstrap else None, inflation)
