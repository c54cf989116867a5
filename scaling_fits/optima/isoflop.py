"""IsoFLOP analysis (approach 2 of arXiv 2203.15556): the best size of each budget, and its growth
with compute.

Runs of one budget form a curve of loss over log N, the log of their parameters. A quadratic or a
cubic is fitted to the sizes near the minimum, and its minimum is the best size. The window, that is
the excess of log loss up to which sizes are fitted, is chosen by the data (`local_fits`). Tokens
are interpolated between the budget's own runs, and the optima of all budgets determine the laws.
Real curves are asymmetric, so the minimum of a parabola over the full width would be biased. arXiv
2406.19146 shows what else affects the exponent (which parameters and FLOPs are counted, warmup,
tuning).
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from forerun._proxies.core.notation import (
    format_counted,
    format_factor,
    format_flops,
    format_percent,
)
from forerun._scaling_fits.laws.law import list_option_problems
from forerun._scaling_fits.laws.solver import Floats
from forerun._scaling_fits.laws.table import RunTable
from forerun._scaling_fits.optima.local_fits import (
    MAX_OUTSIDE_SHARE,
    LocalFit,
    compute_spread,
    find_minima,
    fit_local,
)
from forerun._scaling_fits.optima.optima_fit import (
    CellStatus,
    ComputeFit,
    ComputeOptimum,
    FlopsSource,
    Inflation,
    OptimaError,
)
from forerun._scaling_fits.optima.power_laws import Pair, PowerLaw, fit_power_law

_MIN_OPTIMA = 3  # Any two points lie on a line
_MIN_SIZES = 5  # Distinct sizes of a budget: the coefficients of a cubic and one more
_EXCESSES = (math.inf, 0.16, 0.08, 0.04, 0.02, 0.01)  # Windows in log loss above the lowest size
_NUM_SCORED = 4  # Number of lowest sizes per budget whose errors score a window
_GAP = 1.03  # Ratio of FLOPs above which two runs belong to different budgets
_MAX_BUDGET_RATIO = 1.10  # Maximum ratio of FLOPs within one budget
_MAX_FLOPS_RATIO = 30.0
"""Largest factor between a budget and 6 * N * D. Attention, embeddings, and recomputation account
for less than 10. A column that is farther off is a label, or in another unit."""


_Result = tuple[ComputeOptimum, Floats | None]
"""An optimum, and the variances of its log N* and log D* (2,), which the laws need; None if there
is no optimum."""


class _Budget:
    """The runs of one budget."""

    def __init__(self, runs: RunTable) -> None:
        self.runs = runs
        self.flops = math.exp(float(np.log(runs.flops).mean()))
        """Geometric mean of the FLOPs of its runs."""
        self.spread = float(runs.flops.max() / runs.flops.min())
        """Ratio of the largest to the smallest FLOPs."""
        self.x, self.y = np.log(runs.params), np.log(runs.loss)
        self.weight = runs.weight / runs.weight.mean()
        self.sizes = np.unique(self.x)
        """Distinct log N in ascending order."""
        self.size_means = np.array(
            [np.average(self.y[self.x == x], weights=self.weight[self.x == x]) for x in self.sizes]
        )
        """Mean log loss of each size."""
        self.pilot = float(self.sizes[self.size_means.argmin()])
        """Log N of the lowest size, about which polynomials are expanded."""

    def interpolate_log_tokens(self, log_params: Floats) -> Floats:
        """Interpolate log D at log N between the budget's own runs, which works for any way of
        counting FLOPs.
        """
        tokens = [float(np.log(self.runs.tokens[self.x == x]).mean()) for x in self.sizes]
        return np.interp(log_params, self.sizes, tokens)

    def build_refusal(self, status: CellStatus, reason: str) -> _Result:
        """Return a result without an optimum, with the reason."""
        optimum = ComputeOptimum(
            flops=self.flops,
            status=status,
            reason=reason,
            num_runs=len(self.x),
            num_sizes=len(self.sizes),
        )
        return optimum, None


def fit_isoflop(
    table: RunTable,
    bootstrap: int = 400,
    level: float = 0.9,
    seed: int = 0,
    flops_from: FlopsSource | None = None,
) -> ComputeFit:
    """Fit the optimum of each budget, and the laws through the optima.

    Budgets come from the column `budget`, else from groups of equal FLOPs.

    Args:
        table: The runs.
        bootstrap: Number of draws for the intervals; 0 for no intervals.
        level: Level of the intervals.
        seed: Seed of the draws.
        flops_from: Source of the runs' FLOPs; None for the column `flops`, else `budget` if it
            holds FLOPs, else 6 * N * D.

    Raises:
        OptimaError: Options are out of range, or the table lacks the column of FLOPs.
    """
    if problems := list_option_problems(bootstrap, level, seed):
        raise OptimaError(problems)
    table, flops_from, flops_notes = _count_flops(table, flops_from)
    results, warnings = _find_optima(_group_budgets(table), bootstrap, level, seed)
    warnings = [*table.warnings, *flops_notes, *warnings]
    usable = [(optimum, variances) for optimum, variances in results if variances is not None]
    laws: dict[str, PowerLaw] = {}
    inflation = Inflation()
    if len(usable) < _MIN_OPTIMA:
        warnings.append(
            f"{len(usable)} of {format_counted(len(results), 'budget')} with an optimum: there "
            f"must be at least {_MIN_OPTIMA}, each with at least {_MIN_SIZES} sizes, on both sides "
            "of the best"
        )
    else:
        laws = _fit_laws(usable)
        inflation = _compute_inflation(usable, level) if bootstrap else inflation
        exponent = laws["params"].exponents[0]
        if not 0 < exponent < 1:
            warnings.append(f"N* grows as C^{exponent:.3g}, outside 0 to 1: check the runs")
    return ComputeFit(
        status="converged" if laws else "unidentified",
        optima=tuple(optimum for optimum, _ in results),
        params_law=laws.get("params"),
        tokens_law=laws.get("tokens"),
        inflation=inflation,
        level=level,
        bootstrap=bootstrap,
        seed=seed,
        num_runs=table.num_runs,
        largest_flops=float(table.flops.max()),
        flops_from=flops_from,
        dropped=table.dropped,
        warnings=tuple(warnings),
    )


def _find_optima(
    budgets: list[_Budget], bootstrap: int, level: float, seed: int
) -> tuple[list[_Result], list[str]]:
    """Find the optimum of each budget, and return them with warnings."""
    obstacles = [_find_obstacle(budget) for budget in budgets]
    fitted = [
        budget for budget, obstacle in zip(budgets, obstacles, strict=True) if obstacle is None
    ]
    windows = [(excess, degree) for excess in _EXCESSES for degree in (2, 3)]
    minima = iter(
        find_minima(
            [[_fit_window(budget, *window) for budget in fitted] for window in windows],
            lambda group, theta: _find_minimum(fitted[group].pilot, theta),
            num_draws=bootstrap,
            rng=np.random.default_rng([seed, 0]),
        )
    )
    results = [
        budget.build_refusal(*obstacle) if obstacle else _to_result(budget, *next(minima), level)
        for budget, obstacle in zip(budgets, obstacles, strict=True)
    ]
    warnings = _list_budget_warnings(budgets) + [
        f"budget {optimum.flops:.3g}: {optimum.reason}" for optimum, _ in results if optimum.reason
    ]
    return results, warnings


def _count_flops(
    table: RunTable, wanted: FlopsSource | None
) -> tuple[RunTable, FlopsSource, list[str]]:
    """Return the table with the FLOPs to use, their source, and notes on how far a budget is from 6
    * N * D.

    Raises:
        OptimaError: The table has no such column.
    """
    six_nd = 6.0 * table.params * table.tokens
    has_column = {"flops": table.flops_given, "budget": table.budget is not None, "6nd": True}
    if wanted is not None and not has_column[wanted]:
        raise OptimaError([f"--compute-from {wanted}: the table has no column {wanted!r}"])
    if wanted == "6nd" or (table.budget is None and not table.flops_given):
        return dataclasses.replace(table, flops=six_nd), "6nd", []
    if wanted == "flops" or (wanted is None and table.flops_given) or table.budget is None:
        return table, "flops", []
    ratio = six_nd / table.budget
    low, high = float(ratio.min()), float(ratio.max())
    name = table.column_names.get("budget", "budget")
    times = (
        f"6 * N * D is {format_factor(low, 2)} to {format_factor(high, 2)} times column {name!r}"
    )
    if wanted is None and not (low >= 1 / _MAX_FLOPS_RATIO and high <= _MAX_FLOPS_RATIO):
        note = (
            f"FLOPs are 6 * N * D: {times}, too far to be FLOPs; --compute-from budget uses the "
            "column as it is"
        )
        return table, "6nd", [note]
    note = f"FLOPs are those of the budget: {times}; --compute-from 6nd takes 6 * N * D"
    return dataclasses.replace(table, flops=table.budget), "budget", [note]


def _group_budgets(table: RunTable) -> list[_Budget]:
    order = np.argsort(table.flops, kind="stable")
    if table.budget is None:
        apart = table.flops[order][1:] > _GAP * table.flops[order][:-1]
        groups = np.split(order, np.flatnonzero(apart) + 1)
    else:
        groups = [np.flatnonzero(table.budget == value) for value in np.unique(table.budget)]
    places = np.arange(table.num_runs)
    budgets = [_Budget(table.select_runs(np.isin(places, group))) for group in groups]
    return sorted(budgets, key=lambda budget: budget.flops)


def _list_budget_warnings(budgets: list[_Budget]) -> list[str]:
    return [
        f"budget {format_flops(budget.flops)}: its runs' FLOPs differ by a factor of "
        f"{format_factor(budget.spread)}, which tilts the curve "
        + (
            "(keep a budget's runs within a few percent, or add a column `budget` that says which "
            "runs belong together)"
            if budget.runs.budget is None
            else "(--compute-from budget uses the column `budget` as their FLOPs)"
        )
        for budget in budgets
        if budget.spread > _MAX_BUDGET_RATIO
    ]


def _find_obstacle(budget: _Budget) -> tuple[CellStatus, str] | None:
    """Return the status and reason if a budget cannot be fitted at all; None if it can."""
    num_sizes = len(budget.sizes)
    if num_sizes < _MIN_SIZES:
        more = _MIN_SIZES - num_sizes
        return "too_few", f"{num_sizes} of the {_MIN_SIZES} sizes needed: add {more} more"
    if budget.runs.budget is None and budget.spread > _MAX_BUDGET_RATIO:
        return "no_valley", "no gap in FLOPs separates the budgets: give a column `budget`"
    lowest = int(budget.size_means.argmin())
    if lowest in (0, num_sizes - 1):
        return "edge", _describe_sizes_to_add(budget, low=lowest == 0)
    return None


def _describe_sizes_to_add(budget: _Budget, *, low: bool) -> str:
    """Return a sentence on the sizes to add when the best size is, or may be, the last one."""
    sizes = np.exp(budget.sizes)
    ratio = math.exp(float(np.median(np.diff(np.log(sizes)))))
    end, step = (sizes[0], 1 / ratio) if low else (sizes[-1], ratio)
    side, beyond = ("smallest", "smaller") if low else ("largest", "larger")
    return (
        f"the best size is the {side} that was run, {end:.3g}: add {beyond} ones at this budget, "
        f"about {end * step:.2g} and {end * step**2:.2g}"
    )


def _fit_window(budget: _Budget, window: float, degree: int) -> LocalFit:
    """Fit a polynomial through the sizes up to `window` log loss above the lowest, and through at
    least one size more than it has coefficients.
    """
    # Excess of each size, made monotonic outward, so that windows have no gaps
    means = budget.size_means
    low = int(means.argmin())
    left = np.maximum.accumulate(means[: low + 1][::-1])[::-1]
    rising = np.concatenate([left, np.maximum.accumulate(means[low:])[1:]]) - means[low]
    excess, ranked = rising[np.searchsorted(budget.sizes, budget.x)], np.sort(rising)
    inside = excess <= max(window, ranked[degree + 1])
    design = np.vander(budget.x[inside] - budget.pilot, degree + 1, increasing=True)
    is_scored = excess[inside] <= ranked[_NUM_SCORED - 1]
    return fit_local(design, budget.y[inside], budget.weight[inside], is_scored)


def _find_minimum(pilot: float, theta_MP: Floats) -> Floats:
    """Compute log N and log loss (M, 2) of the local minimum of each row's polynomial; NaN if there
    is none.
    """
    first, second = theta_MP[:, 1], theta_MP[:, 2]
    third = theta_MP[:, 3] if theta_MP.shape[1] > 3 else np.zeros_like(first)
    inside = second**2 - 3 * first * third
    root = np.sqrt(np.maximum(inside, 0.0))
    # The root of the slope where half the curvature is `root` is the minimum
    below = second + root
    exists = (inside > 0) & (below > 0)
    z = np.where(exists, -first / np.where(exists, below, 1.0), np.nan)
    loss = theta_MP[:, 0] + first * z + second * z**2 + third * z**3
    return np.stack([pilot + z, loss], axis=1)


def _to_result(budget: _Budget, minimum: Floats, draws_M2: Floats, level: float) -> _Result:
    """Return the optimum of a budget from the log N and log loss of its curve's minimum."""
    low, high, log_params = budget.sizes[0], budget.sizes[-1], minimum[0]
    if not math.isfinite(log_params):
        return budget.build_refusal(
            "no_valley",
            "its losses bend down, not up, so there is no minimum: add sizes on both sides, and "
            "check the runs that stand out",
        )
    if not low < log_params < high:
        return budget.build_refusal("edge", _describe_sizes_to_add(budget, low=log_params <= low))
    inside = (draws_M2[:, 0] > low) & (draws_M2[:, 0] < high)
    if len(inside) and 1 - inside.mean() > MAX_OUTSIDE_SHARE:
        return budget.build_refusal(
            "flat",
            f"the noise leaves {format_percent(1 - inside.mean())} of the optimum's draws outside "
            "the sizes run: add sizes on both sides, or repeat runs with other seeds",
        )

    def add_tokens(rows_M2: Floats) -> Floats:
        return np.insert(rows_M2, 1, budget.interpolate_log_tokens(rows_M2[:, 0]), axis=1)

    ends: list[Pair | None] = [None] * 3
    variances = np.zeros(2)
    if len(inside):
        log_ends, sds = compute_spread(add_tokens(draws_M2[inside]), level)
        ends, variances = [(math.exp(a), math.exp(b)) for a, b in log_ends], sds[:2] ** 2
    params, tokens, loss = map(math.exp, add_tokens(minimum[None, :])[0].tolist())
    optimum = ComputeOptimum(
        flops=budget.flops,
        params=params,
        params_interval=ends[0],
        tokens=tokens,
        tokens_interval=ends[1],
        loss_nats=loss,
        loss_interval=ends[2],
        num_runs=len(budget.x),
        num_sizes=len(budget.sizes),
    )
    return optimum, variances


def _fit_laws(usable: list[tuple[ComputeOptimum, Floats]]) -> dict[str, PowerLaw]:
    """Fit the laws of N* and D* against FLOPs through the optima, by name."""
    flops = {"flops": np.array([optimum.flops for optimum, _ in usable])}
    return {name: fit_power_law(flops, *_list_logs(usable, name)) for name in ("params", "tokens")}


def _list_logs(usable: list[tuple[ComputeOptimum, Floats]], name: str) -> tuple[Floats, Floats]:
    """Return the logs of N* or D* of each optimum, and their variances."""
    column = ("params", "tokens").index(name)
    logs = np.log([getattr(optimum, name) for optimum, _ in usable])
    return logs, np.array([variances[column] for _, variances in usable])


def _compute_inflation(usable: list[tuple[ComputeOptimum, Floats]], level: float) -> Inflation:
    """Compute the inflation of intervals by hindcasts: fit the cheapest optima, from 4 on, predict
    all more expensive ones, and widen the intervals until a share `level` of those is covered.

    The noise of a held-out optimum counts as part of the interval. With fewer than 5 optima nothing
    is held out, and the inflation is 1.
    """
    ratios: dict[str, list[float]] = {"params": [], "tokens": []}
    for cut in range(_MIN_OPTIMA + 1, len(usable)):
        held_out = usable[cut:]
        for name, law in _fit_laws(usable[:cut]).items():
            for (optimum, _), log, variance in zip(
                held_out, *_list_logs(held_out, name), strict=True
            ):
                predicted = law.compute_value(optimum.flops)
                low, high = law.compute_interval_at(optimum.flops, level=level)
                error = log - math.log(predicted)
                arm = math.log(high / predicted) if error > 0 else math.log(predicted / low)
                ratios[name].append(abs(error) / max(math.hypot(arm, math.sqrt(variance)), 1e-12))
    return Inflation(
        **{name: max(1.0, float(np.quantile(z, level))) if z else 1.0 for name, z in ratios.items()}
    )
