"""A fit that knows what it does not know: laws pooled, refitted, weighed by hindcast, and stretched to cover.

An interval is for one new run. It mixes the bootstrap refits of every law by weight, adds the noise of a run, and
is stretched in log loss by the factor under which held-out budgets would have been covered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from scaling_fits import cloud, law
from scaling_fits.hindcast import Backtest, hindcast
from scaling_fits.law import FORMS, CannotTellError, FitStatus, Form, LawError, LawFit
from scaling_fits.solver import Floats
from scaling_fits.table import DroppedRow, RunTable

FormChoice = Literal["auto", "chinchilla", "coupled"]
FORM_CHOICES: tuple[str, ...] = get_args(FormChoice)
MAX_BOOTSTRAP = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """What the fitted runs reach."""

    num_runs: int
    params: tuple[float, float]
    """Smallest and largest N."""
    tokens: tuple[float, float]
    """Smallest and largest D."""
    six_nd: tuple[float, float]
    """Smallest and largest 6 * N * D, whatever FLOPs the table counts."""
    flops_given: bool
    """Whether the rungs go by the table's own FLOPs."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FittedRuns:
    """Everything `predict` and `allocate` need; the runs themselves stay behind."""

    form: FormChoice
    members: tuple[LawFit, ...]
    """One fit per law, with its draws."""
    weights: tuple[float, ...]
    """Of the members, adding up to 1; all 0 when nothing is identified."""
    inflation: float
    """Factor on both arms of a log-loss interval, from hindcasts."""
    bootstrap: int
    """Refits per member."""
    level: float
    seed: int
    span: Span
    backtest: Backtest | None
    dropped: tuple[DroppedRow, ...]
    warnings: tuple[str, ...]

    @property
    def heaviest(self) -> LawFit:
        """The member of the largest weight, the first of equals."""
        return self.members[int(np.argmax(self.weights))]

    @property
    def status(self) -> FitStatus:
        """The heaviest member's."""
        return self.heaviest.status

    @property
    def has_draws(self) -> bool:
        """Whether intervals can be given."""
        return any(len(fit.draws) for fit, weight in zip(self.members, self.weights, strict=True) if weight > 0)

    def require(self) -> None:
        """Refuse to go on without an identified law.

        Raises:
            CannotTellError: with the reasons.
        """
        if self.status == "unidentified":
            raise CannotTellError(self.warnings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The loss of one new run."""

    params: float
    tokens: float
    flops: float
    """6 * N * D."""
    loss_nats: float
    low: float | None
    """Ends of the interval; None without a bootstrap."""
    high: float | None
    level: float
    extrapolation: float
    """6ND over the largest 6ND fitted."""


def fit_runs(
    table: RunTable, form: FormChoice = "auto", bootstrap: int = 400, level: float = 0.9, seed: int = 0
) -> FittedRuns:
    """Fit, refit, weigh and stretch. `auto` pools every form the runs can carry.

    Raises:
        LawError: an unknown form, a negative number of refits or seed, or a level outside (0, 1).
    """
    _check_options(form, bootstrap, level, seed)
    forms: tuple[Form, ...] = tuple(known for known in FORMS if form in ("auto", known))
    members = tuple(cloud.with_draws(table, law.fit_law(table, each), bootstrap, seed) for each in forms)
    learned = hindcast(table, members, num_draws=bootstrap, level=level, seed=seed)
    warnings = tuple(warning for fit in members for warning in fit.warnings) + learned.warnings
    return FittedRuns(
        form=form,
        members=members,
        weights=learned.weights,
        inflation=learned.inflation,
        bootstrap=bootstrap,
        level=level,
        seed=seed,
        span=_span(table),
        backtest=learned.backtest,
        dropped=table.dropped,
        warnings=warnings,
    )


def _check_options(form: str, bootstrap: int, level: float, seed: int) -> None:
    problems = []
    if form not in FORM_CHOICES:
        problems.append(f"form = {form!r}: one of {', '.join(FORM_CHOICES)} is wanted")
    if not 0 <= bootstrap <= MAX_BOOTSTRAP:
        problems.append(f"bootstrap = {bootstrap}: 0 to {MAX_BOOTSTRAP} refits are wanted")
    if not 0 < level < 1:
        problems.append(f"level = {level}: a number between 0 and 1 is wanted")
    if seed < 0:
        problems.append(f"seed = {seed}: a whole number >= 0 is wanted")
    if problems:
        raise LawError("; ".join(problems))


def _span(table: RunTable) -> Span:
    six_nd = 6.0 * table.params * table.tokens

    def reach(column: Floats) -> tuple[float, float]:
        return float(column.min()), float(column.max())

    return Span(
        num_runs=table.num_runs,
        params=reach(table.params),
        tokens=reach(table.tokens),
        six_nd=reach(six_nd),
        flops_given=table.flops_given,
    )


def predict(fitted: FittedRuns, params: float, tokens: float) -> Prediction:
    """Loss of one new run of `params` parameters on `tokens` tokens.

    Raises:
        LawError: a size that is not finite and positive.
        CannotTellError: the runs identify no law.
    """
    check_positive(params=params, tokens=tokens)
    fitted.require()
    n, d = np.array([float(params)]), np.array([float(tokens)])
    centre = float(cloud.pooled_log_loss(fitted.members, fitted.weights, n, d)[0])
    low = high = None
    if fitted.has_draws:
        ends = cloud.new_run_quantiles(fitted.members, fitted.weights, n, d, fitted.level, fitted.seed)
        low, high = map(exp_finite, stretched(centre, float(ends[0][0]), float(ends[1][0]), fitted))
    flops = 6.0 * float(params) * float(tokens)
    return Prediction(
        params=float(params),
        tokens=float(tokens),
        flops=flops,
        loss_nats=math.exp(centre),
        low=low,
        high=high,
        level=fitted.level,
        extrapolation=flops / fitted.span.six_nd[1],
    )


def stretched(centre: float, low: float, high: float, fitted: FittedRuns) -> tuple[float, float]:
    """An interval of logs about `centre`, its arms lengthened by the hindcast's factor."""
    return (
        centre - fitted.inflation * max(centre - low, 0.0),
        centre + fitted.inflation * max(high - centre, 0.0),
    )


def exp_finite(value: float) -> float:
    """Exp that stays finite: an end that says "anything" must still be a number a record may hold."""
    return math.exp(min(max(value, -700.0), 700.0))


def check_positive(**values: float) -> None:
    """Refuse what is not a finite number above zero.

    Raises:
        LawError: naming every such value.
    """
    problems = [
        f"{name} = {value}: a finite number > 0 is wanted"
        for name, value in values.items()
        if not (math.isfinite(value) and value > 0)
    ]
    if problems:
        raise LawError("; ".join(problems))


def draw_intervals(fitted: FittedRuns) -> dict[str, tuple[float, float]] | None:
    """Percentile intervals of the heaviest member's parameters over its refits; None without any.

    They say how far the runs pin down this law's numbers, and so are not stretched for the law being wrong.
    """
    draws = fitted.heaviest.draws
    if len(draws) == 0:
        return None
    tail = (1 - fitted.level) / 2
    low, high = np.quantile(law.natural(draws), [tail, 1 - tail], axis=0)
    names = fitted.heaviest.names
    return {name: (float(low[i]), float(high[i])) for i, name in enumerate(names)}


def pooled_interval(fitted: FittedRuns, values: list[Floats]) -> tuple[float, float] | None:
    """Central `level` of a quantity over all members' refits by weight; one array per member. None without any."""
    kept = [(v, w) for v, w in zip(values, fitted.weights, strict=True) if w > 0 and len(v)]
    if not kept:
        return None
    mass = np.concatenate([np.full(len(v), w / len(v)) for v, w in kept])
    column = np.concatenate([v for v, _ in kept])[:, None]
    tail = (1 - fitted.level) / 2
    return (
        float(cloud.weighted_quantile(column, mass, tail)[0]),
        float(cloud.weighted_quantile(column, mass, 1 - tail)[0]),
    )
