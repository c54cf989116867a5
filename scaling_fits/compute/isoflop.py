"""IsoFLOP (approach 2 of arXiv 2203.15556): the best size of each budget, and how it grows with
compute.

Runs of one budget make a curve of loss over log N. Its bottom is found by `isoflop_curves`, tokens
are read off between the budget's own runs, and the optima of all budgets make the laws. A
full-width parabola is biased where curves are lopsided; arXiv 2406.19146 shows what else moves the
exponent (which parameters and FLOPs are counted, warmup, tuning).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from proxies.core.notation import counted, format_factor, format_flops, format_percent
from scaling_fits.compute import isoflop_curves
from scaling_fits.compute.isoflop_curves import MOST_OUTSIDE, BudgetRuns, CurveMinimum
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

_LEAST_OPTIMA = 3  # two points draw a line through anything
_GAP = 1.03  # FLOPs further apart than this are two budgets
_WIDEST = 1.10  # and a budget is no wider than this
_MAX_FLOPS_RATIO = 30.0
"""Largest factor between a budget and 6 * N * D. Attention, embeddings and recomputation make up
for less than 10; a column that is farther off is a label, or in another unit."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Budget:
    flops: float
    """Geometric mean over its runs."""
    spread: float
    """Largest FLOPs over smallest."""
    table: RunTable
    runs: BudgetRuns

    def log_tokens(self, log_params: Floats) -> Floats:
        """Log D at log N, between its own runs: so the FLOPs may be counted in any way."""
        sizes = self.runs.sizes
        tokens = [float(np.log(self.table.tokens[self.runs.x == x]).mean()) for x in sizes]
        return np.interp(log_params, sizes, tokens)

    def without(self, status: CellStatus, reason: str) -> _Found:
        """No optimum, and why."""
        optimum = ComputeOptimum(
            flops=self.flops,
            status=status,
            reason=reason,
            num_runs=len(self.runs.x),
            num_sizes=len(self.runs.sizes),
        )
        return _Found(optimum=optimum, log_variances=None)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Found:
    """An optimum with what the laws need; None where there is none."""

    optimum: ComputeOptimum
    log_variances: Floats | None
    """Of N* and D* (2,)."""


def fit_isoflop(
    table: RunTable,
    bootstrap: int = 400,
    level: float = 0.9,
    seed: int = 0,
    flops_from: FlopsSource | None = None,
) -> ComputeFit:
    """Fit the optimum of each budget and the laws through them.

    Budgets are the column `budget`, else groups of equal FLOPs.

    Args:
        table: The runs.
        bootstrap: Draws behind the intervals; 0: none.
        level: Level of the intervals.
        seed: Seed of the draws.
        flops_from: What the runs' FLOPs are; None: the column `flops`, else `budget` if it holds
            FLOPs, else 6 * N * D.

    Raises:
        OptimaError: Options out of range, or FLOPs from a column that the table does not have.
    """
    if problems := option_problems(bootstrap, level, seed):
        raise OptimaError(problems)
    table, flops_from, flops_notes = _count_flops(table, flops_from)
    budgets = _budgets(table)
    early = [_refused_early(budget) for budget in budgets]
    fitted = [
        budget.runs for budget, refused in zip(budgets, early, strict=True) if refused is None
    ]
    bottoms = iter(isoflop_curves.bottoms(fitted, num_draws=bootstrap, seed=seed))
    found = [
        budget.without(*refused) if refused else _found(budget, next(bottoms), level)
        for budget, refused in zip(budgets, early, strict=True)
    ]
    kept = [each for each in found if each.log_variances is not None]
    warnings = [*table.warnings, *flops_notes, *_budget_warnings(budgets)] + [
        f"budget {each.optimum.flops:.3g}: {each.optimum.reason}"
        for each in found
        if each.optimum.reason
    ]
    laws: dict[str, PowerLaw] = {}
    inflation = Inflation()
    if len(kept) < _LEAST_OPTIMA:
        warnings.append(
            f"{len(kept)} of {counted(len(budgets), 'budget')} with an optimum: there must be at "
            "least "
            f"{_LEAST_OPTIMA}, each with at least 5 sizes, on both sides of the best"
        )
    else:
        laws = _laws(kept)
        inflation = _hindcast(kept, level) if bootstrap else inflation
        if not 0 < laws["params"].exponents[0] < 1:
            warnings.append(
                f"N* grows as C^{laws['params'].exponents[0]:.3g}, outside 0 to 1: look at the runs"
            )
    return ComputeFit(
        status="converged" if laws else "unidentified",
        optima=tuple(each.optimum for each in found),
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


def _count_flops(
    table: RunTable, wanted: FlopsSource | None
) -> tuple[RunTable, FlopsSource, list[str]]:
    """Return the table with the FLOPs to fit, where they come from, and how far a budget is from 6
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


def _budgets(table: RunTable) -> list[_Budget]:
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


def _budget_warnings(budgets: list[_Budget]) -> list[str]:
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
        if budget.spread > _WIDEST
    ]


def _refused_early(budget: _Budget) -> tuple[CellStatus, str] | None:
    """What keeps a budget from being fitted at all."""
    sizes, least = np.exp(budget.runs.sizes), isoflop_curves.LEAST_SIZES
    if len(sizes) < least:
        more = least - len(sizes)
        return "too_few", f"{len(sizes)} of the {counted(least, 'size')} needed: add {more} more"
    if budget.table.budget is None and budget.spread > _WIDEST:
        return "no_valley", "no gap in FLOPs separates the budgets: give a column `budget`"
    lowest = int(budget.runs.size_means.argmin())
    return ("edge", _add(sizes, low=lowest == 0)) if lowest in (0, len(sizes) - 1) else None


def _add(sizes: Floats, *, low: bool) -> str:
    """What to run where the best size is, or may be, the last one."""
    ratio = math.exp(float(np.median(np.diff(np.log(sizes)))))
    end, step = (sizes[0], 1 / ratio) if low else (sizes[-1], ratio)
    side, beyond = ("smallest", "smaller") if low else ("largest", "larger")
    return (
        f"the best size is at the {side} run, {end:.3g}: add {beyond} ones at this budget, "
        f"about {end * step:.2g} and {end * step**2:.2g}"
    )


def _found(budget: _Budget, bottom: CurveMinimum, level: float) -> _Found:
    sizes = budget.runs.sizes
    low, high = float(sizes[0]), float(sizes[-1])
    if not math.isfinite(bottom.log_params):
        return budget.without(
            "no_valley",
            "its runs bend down, not up, so there is no minimum: add sizes on both "
            "sides, and look at the runs that stand out",
        )
    if not low < bottom.log_params < high:
        return budget.without("edge", _add(np.exp(sizes), low=bottom.log_params <= low))
    inside = (bottom.draws[:, 0] > low) & (bottom.draws[:, 0] < high)
    if len(inside) and 1 - inside.mean() > MOST_OUTSIDE:
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
    return _Found(optimum=optimum, log_variances=variances)


def _laws(kept: list[_Found]) -> dict[str, PowerLaw]:
    """N* and D* against FLOPs through optima, by name."""
    against = {"flops": np.array([each.optimum.flops for each in kept])}
    return {name: fit_power_law(against, *_logs(kept, name)) for name in ("params", "tokens")}


def _logs(kept: list[_Found], name: str) -> tuple[Floats, Floats]:
    """Logs of N* or D* of each optimum, and their variances."""
    column = ("params", "tokens").index(name)
    variances = [each.log_variances[column] for each in kept if each.log_variances is not None]
    return np.log([getattr(each.optimum, name) for each in kept]), np.array(variances)


def _hindcast(kept: list[_Found], level: float) -> Inflation:
    """Fit the cheapest optima, from 4 on, predict all dearer ones, and stretch until `level` of
    those is covered.

    A held-out optimum has noise of its own, which counts as part of the arm. With fewer than 5
    optima nothing is held out and nothing is learned.
    """
    misses: dict[str, list[float]] = {"params": [], "tokens": []}
    for cut in range(_LEAST_OPTIMA + 1, len(kept)):
        for name, law in _laws(kept[:cut]).items():
            for each, log, variance in zip(kept[cut:], *_logs(kept[cut:], name), strict=True):
                predicted, ends = (
                    law.at(each.optimum.flops),
                    law.interval_at(each.optimum.flops, level=level),
                )
                off = log - math.log(predicted)
                arm = math.log(ends[1] / predicted) if off > 0 else math.log(predicted / ends[0])
                misses[name].append(abs(off) / max(math.hypot(arm, math.sqrt(variance)), 1e-12))
    return Inflation(
        **{name: max(1.0, float(np.quantile(z, level))) if z else 1.0 for name, z in misses.items()}
    )
