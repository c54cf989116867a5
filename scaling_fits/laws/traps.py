"""Checks for suspicious tables of runs whose cells are all numbers. The checks warn, and correct
nothing.

Each of these mistakes has spoiled published fits: points along one schedule taken for finished runs
(arXiv 2203.15556, section 3.1), embeddings counted or not (arXiv 2406.19146 and 2406.12907), FLOPs
that are not 6 * N * D, runs entered twice, columns in another unit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from forerun._proxies.core.notation import (
    format_count,
    format_counted,
    format_factor,
    format_significant,
)
from forerun._proxies.core.tables.numerals import to_number
from forerun._scaling_fits.laws.solver import Floats

Record = Mapping[str, object]

RUN_COLUMNS = ("run", "run_id", "run_name")
"""Columns that identify runs. The first one with a repeated entry is checked."""

SAME_LOSS = 3e-5
"""Relative difference of losses up to which two rows of one size and length are one run."""

_WORST_LOSS = 12.0  # Nats: a uniform guess among 163,000 tokens
_MAX_FLOPS_FACTOR = 1.3  # Attention and embeddings account for less at the sizes of usual ladders
# Two counts of parameters differ by a constant factor if their largest ratio over their smallest
# ratio is at most this
_MAX_STEADY_RATIO = 1.1
# Range of published runs: 0.35 in tiny ladders, 6e4 in over-trained ones (gemstones: 3 to 1e4)
_TOKENS_PER_PARAM = 0.3, 1e5
_MIN_PARAMS = 1e3  # Smaller numbers are not counts of parameters
_MIN_TOKENS = 1e6  # Smaller numbers are not counts of tokens but millions, billions, or steps
_UNITS = {1.0: "counts", 1e6: "millions", 1e9: "billions", 1e12: "trillions"}
# A number of parameters with a fraction is in another unit if it is below this (100 billion is 1e5
# millions). Larger numbers may have fractions because they were read off a figure.
_EXACT_BELOW = 1e5
_MIN_FINISHED_SHARE = 0.999  # Share of a schedule or of its tokens below which a run is unfinished
_MAX_NAMED = 5  # Rows or runs that a message names
_MIN_CURVES, _MIN_POINTS, _MIN_SAME_POINTS = 3, 5, 8
"""Minimum number of curves, of points of a curve, and of points at the same tokens for a table to
look like points along curves."""
_MIN_CURVE_SHARE = 0.6
"""Minimum share of sizes with points along a curve, for a table to look like points along
curves."""
_MAX_STEP_DEVIATION, _MIN_EVEN_SHARE = 0.3, 0.6
"""Maximum relative deviation of an even step from the median step, and minimum share of even steps
for the points of a curve to be evenly spaced."""


def find_warnings(
    columns: Mapping[str, Floats],
    records: Sequence[Record],
    lines: Sequence[int],
    params_column: str,
    *,
    is_chosen: bool,
) -> tuple[str, ...]:
    """Find everything suspicious about the runs kept of a file.

    Args:
        columns: Numbers of `params`, `tokens`, and `loss`, and of `flops` and `seed` if the table
            has them.
        records: The file's cells of the same rows, by the file's column names.
        lines: File lines of the same rows.
        params_column: The file's column name of N.
        is_chosen: Whether the user chose that column.
    """
    warnings = (
        _check_units_of_sizes(columns),
        _check_loss_unit(columns["loss"], lines),
        _check_flops(columns),
        None if is_chosen else _check_other_sizes(columns["params"], records, params_column),
        _check_unfinished(records, lines),
        _check_points_of_a_curve(columns, records, lines),
        _check_even_spacing(columns, records),
        _check_repeated_rows(columns, lines),
    )
    return tuple(warning for warning in warnings if warning is not None)


def format_rows(lines: Sequence[int]) -> str:
    """Format row numbers: one row, a few rows, or the first few and the number of the others."""
    return f"{'row' if len(lines) == 1 else 'rows'} {format_names([str(line) for line in lines])}"


def format_names(names: Sequence[str]) -> str:
    """Format names: one, a few, or the first few and the number of the others."""
    shown = list(names[:_MAX_NAMED])
    shown += [f"{len(names) - _MAX_NAMED} more"] if len(names) > _MAX_NAMED else []
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]


def _check_units_of_sizes(columns: Mapping[str, Floats]) -> str | None:
    """Return a warning if most runs cannot have these params and tokens as plain counts."""
    n, d = columns["params"], columns["tokens"]
    ratio, (min_ratio, max_ratio) = d / n, _TOKENS_PER_PARAM
    uncounted = (n < _MIN_PARAMS) | ((n < _EXACT_BELOW) & (n % 1 != 0))
    if np.mean(uncounted | (ratio < min_ratio) | (ratio > max_ratio)) <= 0.5:
        return None
    medians = {"params": float(np.median(n)), "tokens": float(np.median(d))}
    medians_text = " and ".join(
        f"{column} (median {format_significant(value)})" for column, value in medians.items()
    )
    if (
        min_ratio <= medians["params"] / medians["tokens"] <= max_ratio
        and medians["tokens"] >= _MIN_TOKENS
    ):
        return (
            f"{medians_text} look swapped. Name the columns with --column params=NAME --column "
            "tokens=NAME"
        )
    units = _find_likely_units(medians["params"], medians["tokens"])
    changed = {column: unit for column, unit in units.items() if unit > 1}
    if changed:
        return ". ".join(
            _describe_unit(column, medians[column], unit) for column, unit in changed.items()
        )
    return (
        f"{medians_text} do not look like counts: a run has {format_count(_MIN_PARAMS)} parameters "
        f"or more, and {min_ratio:g} to {max_ratio:g} tokens for each. Convert the columns, or "
        "name others with --column"
    )


def _find_likely_units(params: float, tokens: float) -> dict[str, float]:
    """Return the units of params and tokens that make the sizes of a run usual; empty if no pair of
    `_UNITS` does.

    If several pairs do, return the pair nearest to 20 tokens per parameter and, at equal ratios, to
    a billion parameters.
    """
    min_ratio, max_ratio = _TOKENS_PER_PARAM
    candidates = []
    for params_unit, tokens_unit in itertools.product(_UNITS, _UNITS):
        count, ratio = params * params_unit, tokens * tokens_unit / (params * params_unit)
        if count >= _MIN_PARAMS and min_ratio <= ratio <= max_ratio:
            distance = round(abs(math.log10(ratio / 20)), 6), abs(math.log10(count / 1e9))
            candidates.append((*distance, {"params": params_unit, "tokens": tokens_unit}))
    return min(candidates, key=lambda candidate: candidate[:2])[2] if candidates else {}


def _describe_unit(column: str, median: float, unit: float) -> str:
    may_be_steps = column == "tokens" and median >= 100 and median % 1 == 0
    return (
        f"{column} looks like {_UNITS[unit]}{' or steps' if may_be_steps else ''} (median "
        f"{format_significant(median)}). forerun expects counts: multiply the column by "
        f"1e{round(math.log10(unit))}" + (", or by the tokens of a step" if may_be_steps else "")
    )


def _check_loss_unit(loss: Floats, lines: Sequence[int]) -> str | None:
    """Return a warning if losses are not in nats per token."""
    high = [line for line, value in zip(lines, loss, strict=True) if value > _WORST_LOSS]
    if not high:
        return None
    return (
        f"{format_rows(high)}: a loss above {_WORST_LOSS:g} nats per token is worse than a uniform "
        "guess among 163,000 tokens: is it a perplexity (take its log), or a run that diverged "
        "(leave it out)?"
    )


def _check_flops(columns: Mapping[str, Floats]) -> str | None:
    if "flops" not in columns:
        return None
    ratio = columns["flops"] / (6.0 * columns["params"] * columns["tokens"])
    low, high = float(ratio.min()), float(ratio.max())
    if low >= 1 / _MAX_FLOPS_FACTOR and high <= _MAX_FLOPS_FACTOR:
        return None
    return (
        f"column 'flops' is {format_factor(low)} to {format_factor(high)} times 6 * N * D: is it "
        "in another unit, or are attention, embeddings or recomputing counted in only one of them? "
        "hold-outs use the column, recommended sizes and tokens use 6 * N * D"
    )


def _check_other_sizes(params: Floats, records: Sequence[Record], params_column: str) -> str | None:
    """Return a warning if another count of parameters is not proportional to the default one."""
    for name in dict.fromkeys(name for record in records for name in record):
        other_params = (
            parse_column(records, name)
            if "param" in name.lower() and name != params_column
            else None
        )
        # A number below 1 is no count, such as Optuna's hyperparameter `params_lr`
        if other_params is None or not (other_params >= 1).all():
            continue
        ratio = other_params / params
        if ratio.max() > _MAX_STEADY_RATIO * ratio.min():
            return (
                f"N is column {params_column!r}, and column {name!r} is "
                f"{format_significant(ratio.min())} to {format_significant(ratio.max())} times it: "
                "which parameters are counted (embeddings or not) changes exponents and the best "
                f"size; --params-column {name} fits the other"
            )
    return None


def _check_unfinished(records: Sequence[Record], lines: Sequence[int]) -> str | None:
    fraction, step, last = (
        parse_column(records, name) for name in ("schedule_fraction", "step", "num_steps")
    )
    if fraction is None and step is not None and last is not None:
        fraction = step / np.where(last > 0, last, np.inf)
    if fraction is None:
        return None
    short = [line for line, done in zip(lines, fraction, strict=True) if done < _MIN_FINISHED_SHARE]
    if not short:
        return None
    return (
        f"{format_rows(short)}: read before the end of the schedule: a run whose schedule ends "
        "there would reach a lower loss, so the fit overestimates what more steps are worth; leave "
        "such rows out"
    )


def _check_points_of_a_curve(
    columns: Mapping[str, Floats], records: Sequence[Record], lines: Sequence[int]
) -> str | None:
    """Return a warning if rows of one run, size, and seed have different tokens."""
    for name in RUN_COLUMNS:
        groups: dict[tuple[str, float, float | None], list[int]] = {}
        for i, record in enumerate(records):
            if record.get(name) not in (None, ""):
                seed = float(columns["seed"][i]) if "seed" in columns else None
                groups.setdefault(
                    (str(record[name]), float(columns["params"][i]), seed), []
                ).append(i)
        curves = [
            group for group in groups.values() if len(set(columns["tokens"][group].tolist())) > 1
        ]
        if curves:
            first = (
                f"{records[curves[0][0]][name]!r} is {format_rows([lines[i] for i in curves[0]])}"
            )
            return (
                f"{format_counted(sum(map(len, curves)), 'row')} are points along "
                f"{format_counted(len(curves), 'run')} by column {name!r} ({first}): a loss along "
                "a schedule is not that of a run that ends there, unless the rate was constant or "
                "decayed for that point; and points of one run are not independent, so intervals "
                "come out too narrow"
            )
    return None


def is_along_schedules(params: Floats, tokens: Floats) -> bool:
    """Return whether rows look like points along a few loss curves rather than finished runs.

    Runs are planned at lengths that grow by factors. Points of a log are evenly spaced, or at the
    same tokens for every size. Among the tables of 74 public families, this check finds all tables
    of points along curves, and also one table of decay branches, which share their trunks.
    """
    grids = [np.unique(tokens[params == size]) for size in np.unique(params)]
    curves = [grid for grid in grids if len(grid) >= _MIN_POINTS]
    if len(curves) < _MIN_CURVES or len(curves) < _MIN_CURVE_SHARE * len(grids):
        return False
    same = [
        grid for grid in curves if len(grid) >= _MIN_SAME_POINTS and np.array_equal(grid, curves[0])
    ]
    even = [
        grid
        for grid in curves
        if np.mean(np.abs(np.diff(grid) / np.median(np.diff(grid)) - 1) < _MAX_STEP_DEVIATION)
        > _MIN_EVEN_SHARE
    ]
    return max(len(even), len(same)) >= _MIN_CURVE_SHARE * len(curves)


def _check_even_spacing(columns: Mapping[str, Floats], records: Sequence[Record]) -> str | None:
    """Return a warning if rows look like points along curves, though no column identifies runs."""
    n, d = columns["params"], columns["tokens"]
    if any(record.get(name) not in (None, "") for record in records for name in RUN_COLUMNS):
        return None
    if not is_along_schedules(n, d):
        return None
    return (
        f"the rows look like points along {format_counted(len(np.unique(n)), 'loss curve')}: "
        "their tokens are evenly spaced, or the same for every size. A loss along a schedule is "
        "not that of a run that ends there, unless the rate was constant or decayed for that "
        "point; keep the last point of each run, or ignore this if every row is a run of its own"
    )


def _check_repeated_rows(columns: Mapping[str, Floats], lines: Sequence[int]) -> str | None:
    keys: dict[tuple[float, ...], list[int]] = {}
    key_columns = [columns[name] for name in ("params", "tokens", "seed") if name in columns]
    log_loss, before = np.log(columns["loss"]), -math.inf
    group = 0
    for place in np.lexsort((log_loss, *key_columns)).tolist():
        # A new group begins where the loss rises. Rows of other sizes may lie in between and begin
        # a group too, but their key differs
        group += bool(log_loss[place] - before > SAME_LOSS)
        before = float(log_loss[place])
        key = (group, *(float(column[place]) for column in key_columns))
        keys.setdefault(key, []).append(lines[place])
    twice = sorted(sorted(rows) for rows in keys.values() if len(rows) > 1)
    if not twice:
        return None
    others_text = f" (other such sets of rows: {len(twice) - 1})" if len(twice) > 1 else ""
    return (
        f"{format_rows(twice[0])} have the same params, tokens and loss{others_text}: they are "
        f"taken for one run entered {'twice' if len(twice[0]) == 2 else 'again'}, and count once; "
        "add a seed column if they are different runs"
    )


def parse_column(records: Sequence[Record], name: str) -> Floats | None:
    """Return a column of the file as finite numbers; None if a cell is missing or is not a finite
    number.
    """
    cells: list[float] = []
    for record in records:
        number = to_number(record.get(name))
        if number is None or not math.isfinite(number):
            return None
        cells.append(number)
    return np.array(cells)
