"""IsoFLOP analysis (approach 2 of arXiv 2203.15556): the best size of each budget, and its growth
with compute.

Runs of one budget form a curve of loss over log N. `isoflop_curves` finds its minimum, tokens are
interpolated between the budget's own runs, and the optima of all budgets determine the laws. A
parabola over the full width is biased where curves are asymmetric. arXiv 2406.19146 shows what else
affects the exponent (which parameters and FLOPs are counted, warmup, tuning).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from proxies.core.notation import counted, format_factor, format_flops, format_percent
from scaling_fits.compute import isoflop_curves
from scaling_fits.compute.isoflop_curves import MAX_OUTSIDE_SHARE, BudgetRuns, CurveMinimum
from scaling_fits.compute.optima import (
    CellStatus,
    ComputeFit,
    ComputeOptimum,
    FlopsSource,
    Inflation,
    OptimaError,
)
from scaling_fits.compute.power_laws import Floats, PowerLaw, fit_power_law
from scaling_fits.laws.law import option_problems
from scaling_fits.laws.table import RunTable

_MIN_OPTIMA = 3  # Any two points lie on a line
_GAP = 1.03  # Ratio of FLOPs above which two runs belong to different budgets
_MAX_BUDGET_RATIO = 1.10  # Maximum ratio of FLOPs within one budget
_MAX_FLOPS_RATIO = 30.0
"""Largest factor between a budget and 6 * N * D. Attention, embeddings, and recomputation account
for less than 10. A column that is farther off is a label, or in another unit."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Budget:
    flops: float
    """Geometric mean of the FLOPs of its runs."""
    spread: float
    """Ratio of the largest to the smallest FLOPs."""
    table: RunTable
    runs: BudgetRuns

    def log_tokens(self, log_params: Floats) -> Floats:
        """Interpolate log D at log N between the budget's own runs, which works for any way of
        counting FLOPs.
        """
        sizes = self.runs.sizes
        tokens = [float(np.log(self.table.tokens[self.runs.x == x]).mean()) for x in sizes]
        return np.interp(log_params, sizes, tokens)

    def without(self, status: CellStatus, reason: str) -> _BudgetResult:
        """Return a result without an optimum, with the reason."""
        optimum = ComputeOptimum(
            flops=self.flops,
            status=status,
            reason=reason,
            num_runs=len(self.runs.x),
            num_sizes=len(self.runs.sizes),
        )
        return _BudgetResult(optimum=optimum, log_variances=None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _BudgetResult:
    """An optimum, and the variances that the laws need; None if there is no optimum."""

    optimum: ComputeOptimum
    log_variances: Floats | None
    """Variances of log N* and log D* (2,)."""


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
    if problems := option_problems(bootstrap, level, seed):
        raise OptimaError(problems)
    table, flops_from, flops_notes = _count_flops(table, flops_from)
    results, warnings = _find_optima(_group_budgets(table), bootstrap, level, seed)
    warnings = [*table.warnings, *flops_notes, *warnings]
    usable = [result for result in results if result.log_variances is not None]
    laws: dict[str, PowerLaw] = {}
    inflation = Inflation()
    if len(usable) < _MIN_OPTIMA:
        warnings.append(
            f"{len(usable)} of {counted(len(results), 'budget')} with an optimum: there must be at "
            f"least {_MIN_OPTIMA}, each with at least 5 sizes, on both sides of the best"
        )
    else:
        laws = _fit_laws(usable)
        inflation = _compute_inflation(usable, level) if bootstrap else inflation
        if not 0 < laws["params"].exponents[0] < 1:
            warnings.append(
                f"N* grows as C^{laws['params'].exponents[0]:.3g}, outside 0 to 1: look at the runs"
            )
    return ComputeFit(
        status="converged" if laws else "unidentified",
        optima=tuple(result.optimum for result in results),
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
) -> tuple[list[_BudgetResult], list[str]]:
    """Find the optimum of each budget, and return them with warnings."""
    obstacles = [_find_obstacle(budget) for budget in budgets]
    fitted = [
        budget.runs for budget, obstacle in zip(budgets, obstacles, strict=True) if obstacle is None
    ]
    minima = iter(isoflop_curves.bottoms(fitted, num_draws=bootstrap, seed=seed))
    results = [
        budget.without(*obstacle) if obstacle else _to_result(budget, next(minima), level)
        for budget, obstacle in zip(budgets, obstacles, strict=True)
    ]
    warnings = _list_budget_warnings(budgets) + [
        f"budget {result.optimum.flops:.3g}: {result.optimum.reason}"
        for result in results
        if result.optimum.reason
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
            f"FLOPs are 6 * N * D: {times}, too far to be FLOPs; --compute-from budget takes it "
            "as it is"
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
    budgets = []
    for group in groups:
        part = table.rows(np.isin(np.arange(table.num_runs), group))
        runs = BudgetRuns(
            x=np.log(part.params), y=np.log(part.loss), weight=part.weight / part.weight.mean()
        )
        budgets.append(
            _Budget(
                flops=math.exp(float(np.log(part.flops).mean())),
                table=part,
                runs=runs,
                spread=float(part.flops.max() / part.flops.min()),
            )
        )
    return sorted(budgets, key=lambda budget: budget.flops)


def _list_budget_warnings(budgets: list[_Budget]) -> list[str]:
    return [
        f"budget {format_flops(budget.flops)}: its runs' FLOPs differ by a factor of "
        f"{format_factor(budget.spread)}, "
        "which tilts the curve "
        + (
            "(keep a budget's runs within a few percent, or add a column `budget` that says which "
            "runs belong together)"
            if budget.table.budget is None
            else "(--compute-from budget takes the column `budget` for their FLOPs)"
        )
        for budget in budgets
        if budget.spread > _MAX_BUDGET_RATIO
    ]


def _find_obstacle(budget: _Budget) -> tuple[CellStatus, str] | None:
    """Return the status and reason if a budget cannot be fitted at all; None if it can."""
    sizes, least = np.exp(budget.runs.sizes), isoflop_curves.MIN_SIZES
    if len(sizes) < least:
        more = least - len(sizes)
        return "too_few", f"{len(sizes)} of the {counted(least, 'size')} needed: add {more} more"
    if budget.table.budget is None and budget.spread > _MAX_BUDGET_RATIO:
        return "no_valley", "no gap in FLOPs separates the budgets: give a column `budget`"
    lowest = int(budget.runs.size_means.argmin())
    return (
        ("edge", _describe_sizes_to_add(sizes, low=lowest == 0))
        if lowest in (0, len(sizes) - 1)
        else None
    )


def _describe_sizes_to_add(sizes: Floats, *, low: bool) -> str:
    """Return a sentence on the sizes to add when the best size is, or may be, the last one."""
    ratio = math.exp(float(np.median(np.diff(np.log(sizes)))))
    end, step = (sizes[0], 1 / ratio) if low else (sizes[-1], ratio)
    side, beyond = ("smallest", "smaller") if low else ("largest", "larger")
    return (
        f"the best size is at the {side} run, {end:.3g}: add {beyond} ones at this budget, "
        f"about {end * step:.2g} and {end * step**2:.2g}"
    )


def _to_result(budget: _Budget, bottom: CurveMinimum, level: float) -> _BudgetResult:
    sizes = budget.runs.sizes
    low, high = float(sizes[0]), float(sizes[-1])
    if not math.isfinite(bottom.log_params):
        return budget.without(
            "no_valley",
            "its runs bend down, not up, so there is no minimum: add sizes on both "
            "sides, and look at the runs that stand out",
        )
    if not low < bottom.log_params < high:
        return budget.without(
            "edge", _describe_sizes_to_add(np.exp(sizes), low=bottom.log_params <= low)
        )
    inside = (bottom.draws[:, 0] > low) & (bottom.draws[:, 0] < high)
    if len(inside) and 1 - inside.mean() > MAX_OUTSIDE_SHARE:
        reason = (
            f"the noise leaves {format_percent(1 - inside.mean())} of the optimum's draws outside "
            "the sizes run: add "
            "sizes on both sides, or repeat runs with other seeds"
        )
        return budget.without("flat", reason)
    at = [
        bottom.log_params,
        float(budget.log_tokens(np.array([bottom.log_params]))[0]),
        bottom.log_loss,
    ]
    ends: list[tuple[float, float] | None] = [None] * 3
    variances = np.zeros(2)
    if len(inside):
        log_params, log_loss = bottom.draws[inside].T
        logs = np.stack([log_params, budget.log_tokens(log_params), log_loss], axis=1)
        log_ends, sds = isoflop_curves.spread_of(logs, level)
        ends, variances = [(math.exp(a), math.exp(b)) for a, b in log_ends], sds[:2] ** 2
    optimum = ComputeOptimum(
        flops=budget.flops,
        params=math.exp(at[0]),
        params_interval=ends[0],
        tokens=math.exp(at[1]),
        tokens_interval=ends[1],
        loss_nats=math.exp(at[2]),
        loss_interval=ends[2],
        num_runs=len(budget.runs.x),
        num_sizes=len(sizes),
    )
    return _BudgetResult(optimum=optimum, log_variances=variances)


def _fit_laws(kept: list[_BudgetResult]) -> dict[str, PowerLaw]:
    """Fit the laws of N* and D* against FLOPs through the optima, by name."""
    against = {"flops": np.array([each.optimum.flops for each in kept])}
    return {name: fit_power_law(against, *_list_logs(kept, name)) for name in ("params", "tokens")}


def _list_logs(kept: list[_BudgetResult], name: str) -> tuple[Floats, Floats]:
    """Return the logs of N* or D* of each optimum, and their variances."""
    column = ("params", "tokens").index(name)
    variances = [each.log_variances[column] for each in kept if each.log_variances is not None]
    return np.log([getattr(each.optimum, name) for each in kept]), np.array(variances)


def _compute_inflation(kept: list[_BudgetResult], level: float) -> Inflation:
    """Compute the inflation of intervals by hindcasts: fit the cheapest optima, from 4 on, predict
    all more expensive ones, and widen the intervals until a share `level` of those is covered.

    The noise of a held-out optimum counts as part of the interval. With fewer than 5 optima nothing
    is held out, and the inflation is 1.
    """
    ratios: dict[str, list[float]] = {"params": [], "tokens": []}
    for cut in range(_MIN_OPTIMA + 1, len(kept)):
        for name, law in _fit_laws(kept[:cut]).items():
            for result, log, variance in zip(
                kept[cut:], *_list_logs(kept[cut:], name), strict=True
            ):
                predicted, ends = (
                    law.at(result.optimum.flops),
                    law.interval_at(result.optimum.flops, level=level),
                )
                error = log - math.log(predicted)
                arm = math.log(ends[1] / predicted) if error > 0 else math.log(predicted / ends[0])
                ratios[name].append(abs(error) / max(math.hypot(arm, math.sqrt(variance)), 1e-12))
    return Inflation(
        **{name: max(1.0, float(np.quantile(z, level))) if z else 1.0 for name, z in ratios.items()}
    )
