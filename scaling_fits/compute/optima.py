"""Optima against compute: N*, D* and the loss there as laws of C, from IsoFLOP curves or a frontier.

`isoflop.fit_isoflop` and `frontier.fit_frontier` make a `ComputeFit`; here it is asked, and told
as JSON. The FLOPs are those of the table, whatever it counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from proxies.core import canon
from proxies.core.canon import Json
from scaling_fits.compute.compute_laws import Inflation, Laws, Pair
from scaling_fits.compute.power_laws import FloorLaw, PowerLaw
from scaling_fits.laws.law import CannotTellError, check_positive, option_problems
from scaling_fits.laws.table import DroppedRow

CellStatus = Literal["ok", "edge", "flat", "no_valley", "too_few"]
"""Whether the runs of a budget, or of one (N, D), hold an optimum: `edge`: it may lie outside the values run; `flat`:
within the noise it may; `no_valley`: not even a minimum."""
ComputeStatus = Literal["converged", "unidentified"]
ComputeForm = Literal["isoflop", "frontier"]

_FAR = 30.0  # times the largest budget


class OptimaError(ValueError):
    """A question that no fit of this room takes, or data that hold none. `problems` lists everything that is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What fits of this room ask alike."""

    bootstrap: int
    """Draws behind the intervals; 0: no intervals."""
    level: float
    seed: int

    def __post_init__(self) -> None:
        """Check them.

        Raises:
            OptimaError: options out of range, all of them.
        """
        problems = option_problems(self.bootstrap, self.level, self.seed)
        if problems:
            raise OptimaError(problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimum:
    """The best size for one amount of compute, or why nobody can say. Numbers are None unless the status is ok."""

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
class ComputeFit:
    """Laws of the optimum against compute, with the optima behind them."""

    form: ComputeForm
    status: ComputeStatus
    optima: tuple[Optimum, ...]
    """By FLOPs, ascending."""
    params_law: PowerLaw | None
    """N* of C. None, like the other laws, where the optima identify none."""
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


def assembled(
    form: ComputeForm, optima: Sequence[Optimum], laws: Laws | None, warnings: Sequence[str], options: Options, *,
    num_runs: int, largest_flops: float, flops_given: bool, dropped: tuple[DroppedRow, ...],
) -> ComputeFit:  # fmt: skip
    """The fit of a table: its optima, and the laws through them, None where they identify none."""
    return ComputeFit(
        form=form, status="unidentified" if laws is None else "converged", optima=tuple(optima),
        params_law=laws.params if laws else None, tokens_law=laws.tokens if laws else None,
        loss_law=laws.loss if laws else None, inflation=laws.inflation if laws else Inflation(), level=options.level,
        bootstrap=options.bootstrap, seed=options.seed, num_runs=num_runs, largest_flops=largest_flops,
        flops_given=flops_given, dropped=dropped, warnings=tuple(warnings),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputePrediction:
    """The best run for a budget."""

    params: float
    params_interval: Pair | None
    tokens: float
    tokens_interval: Pair | None
    flops: float
    loss_nats: float
    interval: Pair | None
    """Of the loss of one new run at the best size."""
    level: float
    extrapolation: float
    """Budget over the largest FLOPs of any run."""
    warnings: tuple[str, ...]


def predict_at(fit: ComputeFit, flops: float) -> ComputePrediction:
    """The best size and tokens for `flops`, counted as the table counted, and the loss of one run there.

    Raises:
        LawError: a budget that is not finite and positive.
        CannotTellError: the runs identify no law.
    """
    check_positive(flops=flops)
    if fit.params_law is None or fit.tokens_law is None or fit.loss_law is None:
        raise CannotTellError(fit.warnings)
    extrapolation = flops / fit.largest_flops
    warnings = list(fit.warnings)
    if extrapolation > _FAR:
        warnings.append(f"the budget is {extrapolation:.3g} times the largest run's: add budgets nearer to it")
    params, params_ends = _size_at(fit, fit.params_law, flops, fit.inflation.params)
    tokens, tokens_ends = _size_at(fit, fit.tokens_law, flops, fit.inflation.tokens)
    loss = fit.loss_law.at(flops)
    return ComputePrediction(
        flops=float(flops), params=params, params_interval=params_ends, tokens=tokens, tokens_interval=tokens_ends,
        loss_nats=loss, level=fit.level, extrapolation=extrapolation, warnings=tuple(warnings),
        interval=_stretched(loss, fit.loss_law.interval_at(flops, fit.level, fit.seed), fit.inflation.loss),
    )  # fmt: skip


def _size_at(fit: ComputeFit, law: PowerLaw, flops: float, inflation: float) -> tuple[float, Pair | None]:
    """The best N or D and its interval."""
    value, ends = law.at(flops), law.interval_at(flops, level=fit.level)
    return value, _stretched(value, ends if fit.bootstrap else None, inflation)


def _stretched(value: float, interval: Pair | None, inflation: float) -> Pair | None:
    """The interval with both arms lengthened, in logs."""
    if interval is None:
        return None
    return value * (interval[0] / value) ** inflation, value * (interval[1] / value) ** inflation


def fit_body(fit: ComputeFit) -> dict[str, Json]:
    """What `fit --form isoflop|frontier --json` prints. What is not identified is null, never a number."""
    values, intervals = _parameters(fit)
    return {
        "form": fit.form,
        "status": fit.status,
        "parameters": dict(values),
        "members": [],
        "intervals": canon.to_json(intervals),
        "level": fit.level,
        "exponents": {
            f"{what}_vs_flops": {
                "value": values[f"{what}_exponent"], "interval": canon.to_json(intervals[f"{what}_exponent"]),
            }
            for what in ("params", "tokens")
        },
        "num_runs": fit.num_runs,
        "dropped": canon.to_json(fit.dropped),
        "backtest": None,
        "warnings": list(fit.warnings),
        "budgets": [_told(optimum) for optimum in fit.optima],
        "floor_identified": None if fit.loss_law is None else fit.loss_law.has_floor,
        "scatter": {"params": None if fit.params_law is None else fit.params_law.scatter,
                    "tokens": None if fit.tokens_law is None else fit.tokens_law.scatter},
        "interval_inflation": canon.to_json(fit.inflation),
        "bootstrap": {"draws": fit.bootstrap},
        "flops_from": "table" if fit.flops_given else "6ND",
    }  # fmt: skip


def prediction_body(prediction: ComputePrediction) -> dict[str, Json]:
    """What `predict FIT --flops C --json` prints."""
    return _told(prediction)


def _told(record: Optimum | ComputePrediction) -> dict[str, Json]:
    """A record as it is printed: its loss has no unit in its name."""
    values = {field.name: canon.to_json(getattr(record, field.name)) for field in dataclasses.fields(record)}
    return {"loss" if name == "loss_nats" else name: value for name, value in values.items()}


def _parameters(fit: ComputeFit) -> tuple[dict[str, float | None], dict[str, Pair | None]]:
    values: dict[str, float | None] = {}
    intervals: dict[str, Pair | None] = {}
    for what, law in (("params", fit.params_law), ("tokens", fit.tokens_law)):
        values[f"{what}_coefficient"] = law.coefficient if law else None
        values[f"{what}_exponent"] = law.exponents[0] if law else None
        intervals[f"{what}_coefficient"] = law.coefficient_interval(fit.level) if law and fit.bootstrap else None
        intervals[f"{what}_exponent"] = law.exponent_interval(0, fit.level) if law and fit.bootstrap else None
    loss, names = fit.loss_law, ("E", "K", "g")
    values |= dict(zip(names, loss.natural if loss else (None, None, None), strict=True))
    found = (loss.intervals(fit.level) if loss else None) or {}
    return values, intervals | {name: found.get(name) for name in names}
