"""The JSON of the fits: what `fit`, `predict` and `allocate` print, and the file that carries a fit between them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from scipy.special import ndtri

from proxies.core import canon
from proxies.core.canon import Json
from scaling_fits.allocation.allocate import Allocation
from scaling_fits.allocation.shapes import Template
from scaling_fits.fit_file import FitFileError
from scaling_fits.forecast import hindcast, pooling, uncertainty
from scaling_fits.forecast.cloud import Cloud
from scaling_fits.forecast.conclusive import fit_doubts, inconclusive
from scaling_fits.forecast.derived import Interval, draw_intervals, exponents
from scaling_fits.forecast.uncertainty import FittedRuns, Prediction
from scaling_fits.laws import lack_of_fit, law
from scaling_fits.laws.forms import POOLED, SHAPES, Form, FormChoice
from scaling_fits.laws.law import LawFit
from scaling_fits.laws.solver import NUM_COORDINATES, Floats
from scaling_fits.laws.table import DroppedRow

FILE_KIND = "forerun.fit/4"
_OLD_KINDS = ("forerun.fit/1", "forerun.fit/2", "forerun.fit/3")  # each lacks what the next holds

_Pair = tuple[float, float]


def fit_summary(fitted: FittedRuns) -> dict[str, Json]:
    """What `fit --json` prints. What is not identified is null, never a number."""
    heaviest = fitted.heaviest
    intervals = draw_intervals(fitted)
    growth = exponents(fitted) if heaviest.identified else None
    empty: dict[str, Json] = {"value": None, "interval": None}
    doubts = fit_doubts(fitted) if fitted.status == "converged" else (f"the fit is {fitted.status}",)
    return {
        "form": fitted.form,
        "status": fitted.status,
        "parameters": _parameters(heaviest),
        "members": [
            {"form": fit.form, "weight": weight, "status": fit.status, "parameters": _parameters(fit)}
            for fit, weight in zip(fitted.members, fitted.weights, strict=True)
        ],
        "intervals": {name: _pair((intervals or {}).get(name)) for name in _parameters(heaviest)},
        "level": fitted.level,
        "exponents": {
            "params_vs_flops": _interval(growth.params_vs_flops) if growth else empty,
            "tokens_vs_flops": _interval(growth.tokens_vs_flops) if growth else empty,
        },
        "num_runs": fitted.span.num_runs,
        "dropped": [{"row": row.row, "reason": row.reason} for row in fitted.dropped],
        "backtest": _backtest(fitted.backtest),
        "warnings": [*inconclusive(doubts), *fitted.warnings],
        "objective": heaviest.objective,
        "residual_sd": heaviest.residual_sd,
        "weighting": fitted.weighting,
        "misfit_sd": _median(fitted.cloud.misfit_draws),
        "drift": _drift(fitted),
        "trend": _trend(fitted),
        "interval_inflation": fitted.inflation,
        "record_scale": fitted.record_scale,
        "bootstrap": {
            "draws": fitted.bootstrap,
            "unconverged": {fit.form: fit.num_unconverged for fit in fitted.members},
        },
        "flops_from": "table" if fitted.span.flops_given else "6ND",
    }


def prediction_summary(prediction: Prediction) -> dict[str, Json]:
    """What `predict --json` prints."""
    low, high = prediction.low, prediction.high
    return {
        "params": prediction.params,
        "tokens": prediction.tokens,
        "flops": prediction.flops,
        "loss": prediction.loss_nats,
        "interval": None if low is None or high is None else [low, high],
        "level": prediction.level,
        "extrapolation": prediction.extrapolation,
        "warnings": [*inconclusive(prediction.doubts), *prediction.warnings],
    }


def allocation_summary(allocation: Allocation, batch_tokens: int | None = None) -> dict[str, Json]:
    """What `allocate --json` prints. An interval that tells no size is null, and a warning says so.

    Runs of one batch size say nothing about it: then `batch_tokens` is null.
    """
    return {
        "flops": allocation.flops,
        "params": allocation.params,
        "tokens": allocation.tokens,
        "tokens_per_param": allocation.tokens_per_param,
        "batch_tokens": batch_tokens,
        "loss": allocation.loss_nats,
        "interval": _pair(allocation.interval),
        "params_interval": _pair(allocation.params_interval) if allocation.size_determined else None,
        "tokens_interval": _pair(allocation.tokens_interval) if allocation.size_determined else None,
        "flat_range": {
            "params": list(allocation.flat_params),
            "tokens": list(allocation.flat_tokens),
            "serving_saved_by_smallest": allocation.flat_saving,
        },
        "level": allocation.level,
        "extrapolation": allocation.extrapolation,
        "warnings": [*inconclusive(allocation.doubts), *allocation.warnings],
    }


def _parameters(fit: LawFit) -> dict[str, Json]:
    """By name, null where unidentified; a law without an irreducible loss has E = 0 for readers who ask for it."""
    values = fit.parameters
    named: dict[str, Json] = {name: values.get(name) for name in fit.names}
    return {"E": 0.0, **named} if fit.form in POOLED and not fit.has_floor else named


def _median(draws: Floats) -> float | None:
    """Of the sd of the laws' common error in log loss at reach 1; None without a bootstrap."""
    return float(np.median(draws)) if len(draws) else None


def _drift(fitted: FittedRuns) -> Json:
    """By how much predictions of larger runs are too high (below 0: too low), in log loss at ten times the FLOPs."""
    if fitted.drift is None:
        return None
    at_ten = float(pooling.beyond(np.array(10.0)))
    value, sd = fitted.drift.mean * at_ten, fitted.drift.sd * at_ten
    return {
        "value": value,
        "interval": _normal(value, sd, fitted.level),
        "subtracted": fitted.drift.applied * at_ten,
        "at": 10.0,
    }


def _trend(fitted: FittedRuns) -> Json:
    """How the largest runs lie off the law, in log loss per tenfold FLOPs, and what is believed of it."""
    found = fitted.trend
    if found is None:
        return None
    ten = math.log(10.0)
    return {
        "value": found.slope * ten,
        "interval": _normal(found.slope * ten, found.sd * ten, fitted.level),
        "believed": math.copysign(found.size, found.slope) * ten,
        "from_flops": found.from_flops,
    }


def _normal(value: float, sd: float, level: float) -> Json:
    arm = float(ndtri((1 + level) / 2)) * sd
    return [value - arm, value + arm]


def _pair(ends: _Pair | None) -> Json:
    return None if ends is None else list(ends)


def _interval(value: Interval) -> dict[str, Json]:
    return {"value": value.value, "interval": _pair(value.interval)}


def _backtest(backtest: hindcast.Backtest | None) -> Json:
    """Null when the runs below the largest rung are too few; a warning of the fit says so."""
    if backtest is None:
        return None
    return {
        "num_fitted": backtest.num_fitted,
        "num_held_out": len(backtest.runs),
        "extrapolation": backtest.extrapolation,
        "mean_error": backtest.mean_error,
        "largest_error": backtest.largest_error,
        "num_covered": backtest.num_covered,
        "runs": [
            {
                "params": run.params,
                "tokens": run.tokens,
                "loss": run.loss_nats,
                "predicted": run.predicted_nats,
                "interval": _pair(run.interval_nats),
                "covered": run.covered,
            }
            for run in backtest.runs
        ],
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _MemberFile:
    """A `LawFit` as plain data."""

    form: Form
    status: law.FitStatus
    theta: tuple[float, ...]
    objective: float | None
    residual_sd: float | None
    num_runs: int
    num_effective_runs: float
    anchor: law.Anchor | None
    warnings: tuple[str, ...]
    draws: tuple[tuple[float, ...], ...]
    num_unconverged: int
    outliers: tuple[int, ...] = dataclasses.field(default=(), metadata=canon.LATER)

    def __post_init__(self) -> None:
        identified = self.status != "unidentified"
        wanted = NUM_COORDINATES if identified else 0
        if len(self.theta) != wanted or any(len(draw) != NUM_COORDINATES for draw in self.draws):
            raise FitFileError(f"{self.form}: a law of status {self.status} has {wanted} coordinates")
        if identified and (self.objective is None or self.residual_sd is None or self.anchor is None):
            raise FitFileError(
                f"{self.form}: a law of status {self.status} has an objective, a residual_sd and an anchor"
            )
        if self.anchor is not None and self.anchor.median_miss < 0:
            raise FitFileError(f"{self.form}: its median_miss is below zero")
        if identified and self.num_runs <= SHAPES[self.form].dim:
            raise FitFileError(f"{self.form}: num_runs = {self.num_runs} cannot identify it")
        if any(value <= 0 for row in (self.theta, *self.draws) for value in row[3:]):
            raise FitFileError(f"{self.form}: an exponent is not above zero")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _CloudFile:
    """A `Cloud` as plain data."""

    weight_draws: tuple[tuple[float, ...], ...]
    misfit_draws: tuple[float, ...]
    noise_draws: tuple[float, ...]
    drift_draws: tuple[float, ...] = dataclasses.field(default=(), metadata=canon.LATER)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _FitFile:
    """A `FittedRuns` as plain data."""

    kind: str
    form: FormChoice
    members: tuple[_MemberFile, ...]
    weights: tuple[float, ...]
    cloud: _CloudFile
    inflation: float
    weighting: uncertainty.Weighting
    bootstrap: int
    level: float
    seed: int
    span: uncertainty.Span
    backtest: hindcast.Backtest | None
    dropped: tuple[DroppedRow, ...]
    warnings: tuple[str, ...]
    record_scale: float = dataclasses.field(default=1.0, metadata=canon.LATER)
    shape_template: Template | None = dataclasses.field(default=None, metadata=canon.LATER)
    """Of the study whose ladder was fitted: what its plan fixes of the main run's shape."""
    drift: pooling.Drift | None = dataclasses.field(default=None, metadata=canon.LATER)
    trend: lack_of_fit.Trend | None = dataclasses.field(default=None, metadata=canon.LATER)

    def __post_init__(self) -> None:
        if self.kind != FILE_KIND:
            raise FitFileError(f"kind = {self.kind!r}: {FILE_KIND!r} is wanted")
        if not self.members or len(self.members) != len(self.weights) or min(self.weights) < 0:
            raise FitFileError("members and weights do not go together")
        given = [w for member, w in zip(self.members, self.weights, strict=True) if member.status == "unidentified"]
        total = sum(self.weights)
        if any(given) or abs(total - (self.members[0].status != "unidentified")) > 1e-9:
            raise FitFileError(f"the weights of the identified members add up to {total}, not to 1")
        size = len(self.cloud.misfit_draws)
        if {len(self.cloud.weight_draws), len(self.cloud.noise_draws)} != {size} or any(
            len(member.draws) not in (0, size) for member in self.members
        ):
            raise FitFileError("draws of the members and of the cloud are not equally many")
        if any(len(row) != len(self.members) for row in self.cloud.weight_draws):
            raise FitFileError("draws of the weights do not go with the members")
        if len(self.cloud.drift_draws) not in (0, size):
            raise FitFileError("draws of the drift are not as many as the others")
        if size not in (0, self.bootstrap):
            raise FitFileError(f"{size} draws are not the {self.bootstrap} of the bootstrap")
        if any(min(row) < 0 or abs(sum(row) - 1) > 1e-9 for row in self.cloud.weight_draws):
            raise FitFileError("a draw of the weights does not add up to 1")
        if any(sd < 0 for sd in (*self.cloud.misfit_draws, *self.cloud.noise_draws)):
            raise FitFileError("a draw of an sd is below zero")
        if not (self.inflation >= 1 and 0 < self.level < 1 and self.seed >= 0 and self.span.six_nd[1] > 0):
            raise FitFileError("inflation, level, seed or span is out of range")
        if not 0 < self.record_scale < math.inf:
            raise FitFileError("record_scale is out of range")


def to_file(fitted: FittedRuns, template: Template | None = None) -> dict[str, Json]:
    """The fit as plain JSON data, floats in full: `from_file` gives back the same bits."""
    members = tuple(_member_to_file(fit) for fit in fitted.members)
    draws = fitted.cloud
    plain = _FitFile(
        kind=FILE_KIND,
        members=members,
        cloud=_CloudFile(
            weight_draws=tuple(tuple(row) for row in draws.weight_draws.tolist()),
            misfit_draws=tuple(draws.misfit_draws.tolist()),
            noise_draws=tuple(draws.noise_draws.tolist()),
            drift_draws=tuple(draws.drift_draws.tolist()),
        ),
        shape_template=template,
        **_shared(fitted),
    )
    found = canon.to_json(plain)
    assert isinstance(found, dict)
    return found


def from_file(data: Json) -> FittedRuns:
    """The fit that `to_file` wrote; errors as of `with_template`."""
    return with_template(data)[0]


def with_template(data: Json) -> tuple[FittedRuns, Template | None]:
    """The fit that `to_file` wrote, and the shape its study's plan fixes, where it is a study's.

    Raises:
        FitFileError: not a fit, or one that was changed; the message says what is wrong with it.
    """
    if isinstance(data, dict) and data.get("kind") in _OLD_KINDS:
        raise FitFileError("this fit is of an older version: `forerun fit RUNS --out FIT` makes it anew")
    if not isinstance(data, dict) or data.get("kind") != FILE_KIND:
        raise FitFileError("this is no fit: `forerun fit RUNS --out FIT` writes one")
    try:
        plain = canon.decode(_FitFile, data)
    except canon.CanonError as error:
        raise FitFileError(f"this fit cannot be read: {error}") from error
    members = tuple(_member_from_file(member) for member in plain.members)
    draws = Cloud(
        weight_draws=np.array(plain.cloud.weight_draws, dtype=float).reshape(-1, len(members)),
        misfit_draws=np.array(plain.cloud.misfit_draws, dtype=float),
        noise_draws=np.array(plain.cloud.noise_draws, dtype=float),
        drift_draws=np.array(plain.cloud.drift_draws, dtype=float),
    )
    return FittedRuns(members=members, cloud=draws, **_shared(plain)), plain.shape_template


def _shared(source: FittedRuns | _FitFile) -> dict[str, Any]:
    """The fields that both forms hold alike."""
    names = [field.name for field in dataclasses.fields(FittedRuns) if field.name not in ("members", "cloud")]
    return {name: getattr(source, name) for name in names}


def _member_to_file(fit: LawFit) -> _MemberFile:
    plain = {field.name: getattr(fit, field.name) for field in dataclasses.fields(LawFit)}
    draws = tuple(tuple(row) for row in fit.draws.tolist())
    return _MemberFile(**plain | {"theta": tuple(fit.theta.tolist()), "draws": draws})


def _member_from_file(member: _MemberFile) -> LawFit:
    plain = {field.name: getattr(member, field.name) for field in dataclasses.fields(LawFit)}
    draws = np.array(member.draws, dtype=float).reshape(-1, NUM_COORDINATES)
    return LawFit(**plain | {"theta": np.array(member.theta, dtype=float), "draws": draws})
