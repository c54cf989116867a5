"""Optima as functions of compute: N* and D* as power laws of C, from isoFLOP curves.

N* and D* are the parameters and tokens of the run with the lowest loss for C FLOPs.
`isoflop.fit_isoflop` returns a `ComputeFit`. This module predicts from it, and converts it to JSON.
FLOPs are those of the table, however they were counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import ndtri

from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.errors import InputError
from forerun._scaling_fits.laws.law import NEXT_RUNG, CannotTellError, LawError
from forerun._scaling_fits.laws.table import DroppedRow
from forerun._scaling_fits.optima.power_laws import Pair, PowerLaw, summarize_law

CellStatus = Literal["ok", "edge", "flat", "no_valley", "too_few"]
"""Status of the optimum of one budget, or of one (N, D). `edge`: the best run is the first or last
one, so the optimum may lie beyond the values that were run; `flat`: the noise allows an optimum
beyond them; `no_valley`: there is no minimum; `too_few`: more runs are needed."""
ComputeStatus = Literal["converged", "unidentified"]

FlopsSource = Literal["flops", "budget", "6nd"]
"""Source of a run's FLOPs: the column `flops`, the column `budget`, or 6 * N * D."""

BEND_SD = 0.035
"""Standard deviation of log N* per e-fold of FLOPs beyond the runs. This was the error of laws of
optima in 68 forecasts of public isoFLOP studies (`benchmarks/statistics/best_sizes.py`)."""


class OptimaError(InputError):
    """The question has no answer in this fit, or the data have no optimum. `problems` lists
    everything that is wrong.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeOptimum:
    """The best size for one amount of compute, or the reason why there is none. Numbers are None
    unless the status is `ok`.
    """

    flops: float
    status: CellStatus = "ok"
    reason: str | None = None
    """Problem and the runs to add; None if the status is `ok`."""
    params: float | None = None
    params_interval: Pair | None = None
    tokens: float | None = None
    tokens_interval: Pair | None = None
    loss_nats: float | None = None
    loss_interval: Pair | None = None
    num_runs: int
    num_sizes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Inflation:
    """Factors by which both sides of a prediction's interval are widened, in logs, so that held-out
    optima are covered.
    """

    params: float = 1.0
    tokens: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimaFit:
    """The fields that all fits of optima share."""

    status: ComputeStatus
    level: float
    bootstrap: int
    """Number of draws for the intervals; 0 for no intervals."""
    seed: int
    num_runs: int
    dropped: tuple[DroppedRow, ...]
    warnings: tuple[str, ...]

    def build_summary(
        self,
        form: str,
        values: dict[str, Json],
        intervals: dict[str, Json],
        exponents: list[dict[str, Json]],
    ) -> dict[str, Json]:
        """Return the common keys of `fit --json`. `exponents` are those of params and tokens
        against FLOPs.
        """
        return {
            "form": form,
            "status": self.status,
            "parameters": values,
            "members": [],
            "intervals": intervals,
            "level": self.level,
            "exponents": dict(zip(("params_vs_flops", "tokens_vs_flops"), exponents, strict=True)),
            "num_runs": self.num_runs,
            "dropped": canon.to_json(self.dropped),
            "backtest": None,
            "warnings": list(self.warnings),
            "bootstrap": {"draws": self.bootstrap},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeFit(OptimaFit):
    """Laws of the optimum against compute, with the optima they were fitted to."""

    optima: tuple[ComputeOptimum, ...]
    """Optima in ascending order of FLOPs."""
    params_law: PowerLaw | None
    """Law of N* against C; like `tokens_law`, None if the optima do not identify it."""
    tokens_law: PowerLaw | None
    inflation: Inflation
    largest_flops: float
    """Largest FLOPs of any run."""
    flops_from: FlopsSource


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputePrediction:
    """The best run for a budget, with intervals."""

    params: float
    params_interval: Pair | None
    tokens: float
    tokens_interval: Pair | None
    flops: float
    level: float
    extrapolation: float
    """Ratio of the budget to the largest FLOPs of any run."""
    warnings: tuple[str, ...]


def predict_at(fit: ComputeFit, flops: float) -> ComputePrediction:
    """Predict the best size and tokens for `flops`, counted as the table counted them.

    Raises:
        LawError: The budget is not finite and positive.
        CannotTellError: The runs identify no law.
    """
    if not 0 < flops < math.inf:
        raise LawError(f"flops = {flops}: must be a finite number above 0")
    if fit.params_law is None or fit.tokens_law is None:
        raise CannotTellError(fit.warnings)
    params, params_interval = _predict_size(fit, fit.params_law, flops, fit.inflation.params)
    tokens, tokens_interval = _predict_size(fit, fit.tokens_law, flops, fit.inflation.tokens)
    return ComputePrediction(
        flops=float(flops),
        params=params,
        params_interval=params_interval,
        tokens=tokens,
        tokens_interval=tokens_interval,
        level=fit.level,
        extrapolation=flops / fit.largest_flops,
        warnings=fit.warnings,
    )


def _predict_size(
    fit: ComputeFit, law: PowerLaw, flops: float, inflation: float
) -> tuple[float, Pair | None]:
    """Predict the best N or D, with its interval."""
    value = law.compute_value(flops)
    if not fit.bootstrap:
        return value, None
    ends = law.compute_interval_at(flops, level=fit.level)
    reach = math.log(NEXT_RUNG * max(flops / fit.largest_flops, 1.0))
    bend = float(ndtri((1 + fit.level) / 2)) * BEND_SD * reach
    low, high = (math.hypot(inflation * math.log(end / value), bend) for end in ends)
    return value, (value * math.exp(-low), value * math.exp(high))


def summarize_fit(fit: ComputeFit) -> dict[str, Json]:
    """Return the output of `fit --form isoflop --json`. Numbers that are not identified are
    null.
    """
    level = fit.level if fit.bootstrap else None
    laws = {"params": fit.params_law, "tokens": fit.tokens_law}
    values: dict[str, Json] = {}
    intervals: dict[str, Json] = {}
    for name, law in laws.items():
        names = (f"{name}_coefficient", f"{name}_exponent")
        law_values, law_intervals = summarize_law(law, names, level)
        values |= law_values
        intervals |= law_intervals
    exponents: list[dict[str, Json]] = [
        {"value": values[name], "interval": intervals[name]}
        for name in ("params_exponent", "tokens_exponent")
    ]
    return fit.build_summary("isoflop", values, intervals, exponents) | {
        "budgets": [_summarize_optimum(optimum) for optimum in fit.optima],
        "scatter": {name: None if law is None else law.scatter for name, law in laws.items()},
        "interval_inflation": canon.to_json(fit.inflation),
        "flops_from": {"flops": "table", "budget": "budget", "6nd": "6ND"}[fit.flops_from],
    }


def _summarize_optimum(optimum: ComputeOptimum) -> dict[str, Json]:
    """Convert an optimum to JSON, where its loss has no unit in its name."""
    values = canon.to_json(optimum)
    assert isinstance(values, dict)
    return {"loss" if name == "loss_nats" else name: value for name, value in values.items()}
