"""Optima against compute: N* and D* as laws of C, from IsoFLOP curves.

`isoflop.fit_isoflop` makes a `ComputeFit`; here it is asked, and told as JSON. The FLOPs are those
of the table, whatever it counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import ndtri

from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.errors import InputError
from scaling_fits.compute.power_laws import Pair, PowerLaw, told
from scaling_fits.laws.law import NEXT_RUNG, CannotTellError, LawError
from scaling_fits.laws.table import DroppedRow

CellStatus = Literal["ok", "edge", "flat", "no_valley", "too_few"]
"""Whether the runs of a budget, or of one (N, D), hold an optimum: `edge`: it may lie outside the
values run; `flat`: within the noise it may; `no_valley`: not even a minimum."""
ComputeStatus = Literal["converged", "unidentified"]

FlopsSource = Literal["flops", "budget", "6nd"]
"""Source of a run's FLOPs: the column `flops`, the column `budget`, or 6 * N * D."""

BEND_SD = 0.035
"""Standard deviation of log N* for each factor e of FLOPs beyond the runs: how much laws of optima
bend, over 68 tasks of public isoFLOP families (`benchmarks/statistics/best_sizes.py`)."""


class OptimaError(InputError):
    """A question that no fit here answers, or data without an optimum. `problems` lists everything
    that is wrong.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeOptimum:
    """The best size for one amount of compute, or why nobody can say. Numbers are None unless the
    status is ok.
    """

    flops: float
    status: CellStatus = "ok"
    reason: str | None = None
    """What is wrong and what to run; None where the status is ok."""
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
    """Factors, in logs, on both arms of the intervals of a prediction: under them held-out optima
    are covered.
    """

    params: float = 1.0
    tokens: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimaFit:
    """What fits of optima have in common, whatever the optima are of."""

    status: ComputeStatus
    level: float
    bootstrap: int
    """Draws behind the intervals; 0: no intervals."""
    seed: int
    num_runs: int
    dropped: tuple[DroppedRow, ...]
    warnings: tuple[str, ...]

    def body(
        self,
        form: str,
        values: dict[str, Json],
        intervals: dict[str, Json],
        exponents: list[dict[str, Json]],
    ) -> dict[str, Json]:
        """What `fit --json` prints of each; `exponents` of params and tokens against FLOPs."""
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
    """Laws of the optimum against compute, with the optima behind them."""

    optima: tuple[ComputeOptimum, ...]
    """By FLOPs, ascending."""
    params_law: PowerLaw | None
    """N* of C. None, like the other law, where the optima identify none."""
    tokens_law: PowerLaw | None
    inflation: Inflation
    largest_flops: float
    """Of any run."""
    flops_from: FlopsSource


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputePrediction:
    """The best run for a budget."""

    params: float
    params_interval: Pair | None
    tokens: float
    tokens_interval: Pair | None
    flops: float
    level: float
    extrapolation: float
    """Budget over the largest FLOPs of any run."""
    warnings: tuple[str, ...]


def predict_at(fit: ComputeFit, flops: float) -> ComputePrediction:
    """The best size and tokens for `flops`, counted as the table counted.

    Raises:
        LawError: a budget that is not finite and positive.
        CannotTellError: the runs identify no law.
    """
    if not 0 < flops < math.inf:
        raise LawError(f"flops = {flops}: must be a finite number above 0")
    if fit.params_law is None or fit.tokens_law is None:
        raise CannotTellError(fit.warnings)
    extrapolation = flops / fit.largest_flops
    warnings = list(fit.warnings)
    params, params_ends = _size_at(fit, fit.params_law, flops, fit.inflation.params)
    tokens, tokens_ends = _size_at(fit, fit.tokens_law, flops, fit.inflation.tokens)
    return ComputePrediction(
        flops=float(flops),
        params=params,
        params_interval=params_ends,
        tokens=tokens,
        tokens_interval=tokens_ends,
        level=fit.level,
        extrapolation=extrapolation,
        warnings=tuple(warnings),
    )


def _size_at(
    fit: ComputeFit, law: PowerLaw, flops: float, inflation: float
) -> tuple[float, Pair | None]:
    """The best N or D and its interval."""
    value = law.at(flops)
    if not fit.bootstrap:
        return value, None
    ends = law.interval_at(flops, level=fit.level)
    reach = math.log(NEXT_RUNG * max(flops / fit.largest_flops, 1.0))
    bend = float(ndtri((1 + fit.level) / 2)) * BEND_SD * reach
    low, high = (math.hypot(inflation * math.log(end / value), bend) for end in ends)
    return value, (value * math.exp(-low), value * math.exp(high))


def fit_body(fit: ComputeFit) -> dict[str, Json]:
    """What `fit --form isoflop --json` prints. What is not identified is null, never a number."""
    level, laws = (
        fit.level if fit.bootstrap else None,
        {"params": fit.params_law, "tokens": fit.tokens_law},
    )
    both = [
        told(law, (f"{what}_coefficient", f"{what}_exponent"), level) for what, law in laws.items()
    ]
    values, intervals = both[0][0] | both[1][0], both[0][1] | both[1][1]
    exponents: list[dict[str, Json]] = [
        {"value": values[name], "interval": intervals[name]}
        for name in ("params_exponent", "tokens_exponent")
    ]
    return fit.body("isoflop", values, intervals, exponents) | {
        "budgets": [_told(optimum) for optimum in fit.optima],
        "scatter": {what: None if law is None else law.scatter for what, law in laws.items()},
        "interval_inflation": canon.to_json(fit.inflation),
        "flops_from": {"flops": "table", "budget": "budget", "6nd": "6ND"}[fit.flops_from],
    }


def _told(optimum: ComputeOptimum) -> dict[str, Json]:
    """An optimum as it is printed: its loss has no unit in its name."""
    values = {
        field.name: canon.to_json(getattr(optimum, field.name))
        for field in dataclasses.fields(optimum)
    }
    return {"loss" if name == "loss_nats" else name: value for name, value in values.items()}
