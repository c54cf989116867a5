"""`forerun transfer --runs FILE`: the verdict on runs that somebody else made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import click

from launcher.cli.options import WholeAmount, column_option
from proxies.core.canon import Json
from proxies.core.notation import format_factor
from proxies.core.tables.table_files import Source
from transfer.question import AXES, Axis, Hyperparameter, Question, TransferError, at_size
from transfer.tables.columns import OPTIMUM_COLUMNS

if TYPE_CHECKING:
    from transfer.tables.table import RunTable

_Command = TypeVar("_Command", bound=Callable[..., object])

LARGEST_SIZE = 2 * 10**18
LARGEST_POWER = 10.0
MARGINS_NATS = (1e-6, 1e3)
LEVELS = (0.5, 0.999)
"""Beyond these bounds an option is a slip, and intervals would rest on a handful of draws."""
"""Beyond it a size is a slip."""
LEAST_SPAN_OCTAVES = 0.1
"""From the smallest size to the largest: over less no drift can be seen."""


def _read_power(ctx: click.Context, param: click.Parameter, value: str) -> float | Literal["measured"]:
    if value == "measured":
        return "measured"
    try:
        return float(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is neither a number nor `measured`", ctx, param) from None


def table_options(command: _Command) -> _Command:
    """--runs and what goes with it: parameters runs_path and those of `judge_table`."""
    options = (
        click.option("--runs", "runs_path", type=click.Path(path_type=Path), help="Judge this table of runs instead."),
        click.option(
            "--axis", type=click.Choice(AXES), help="With --runs: what grows (default: what varies).",
        ),
        click.option(
            "--hyperparameter", type=click.Choice(list(OPTIMUM_COLUMNS)), metavar="NAME",
            help="With --runs: what must stay put (default: the learning rate, or what varies).",
        ),
        click.option(
            "--target-size", "--target-width", "target_size", type=WholeAmount(),
            help="With --runs: the main run's size (default: twice the largest).",
        ),
        click.option(
            "--base-size", "--base-width", "base_size", type=WholeAmount(),
            help="With --runs: where the value was tuned (default: the smallest).",
        ),
        click.option(
            "--power", callback=_read_power, default="0", show_default=True, metavar="NUMBER|measured",
            help="With --runs: the value moves as (target / base)^power; `measured`: as the optima do.",
        ),
        click.option(
            "--margin-nats", type=float, default=0.01, show_default=True, help="With --runs: the cost allowed."
        ),
        click.option("--level", type=float, default=0.9, show_default=True, help="With --runs: of every interval."),
        column_option,
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def judge_table(
    path: Source,
    *,
    axis: Axis | None = None,
    hyperparameter: Hyperparameter | None = None,
    target_size: int | None = None,
    base_size: int | None = None,
    power: float | Literal["measured"] = 0.0,
    margin_nats: float = 0.01,
    level: float = 0.9,
    columns: Mapping[str, str] | None = None,
) -> dict[str, Json]:
    """Judge a table of runs or of optima (`transfer.tables.table`).

    Args:
        path: The table: a file, or cells already read.
        axis: What grows; None: the only size that varies.
        hyperparameter: None: the learning rate if it varies, else the only one that does.
        target_size: None: twice the largest size of the table.
        base_size: Where the value was tuned; None: the smallest size.
        power: The value at the target is the base's times (target / base)^power; `measured`: the power of the optima.
        margin_nats: The cost allowed.
        level: Of every interval.
        columns: The table's own names of columns by ours, where a user chose.

    Returns:
        The keys of `transfer.verdict.summary.verdict_summary`, `notes` on what was judged, and rows `dropped`.

    Raises:
        TableError, TransferError: No verdict can be made from the table, or with the options.
    """
    import numpy as np

    from transfer.tables.table import read_runs
    from transfer.verdict.optima_verdict import judge_optima
    from transfer.verdict.summary import verdict_summary
    from transfer.verdict.verdict import judge

    table = read_runs(path, axis=axis, hyperparameter=hyperparameter, columns=columns)
    sizes = sorted({point.size for point in table.points} or {size for size, _ in table.optima})
    target = 2 * sizes[-1] if target_size is None else target_size
    base = sizes[0] if base_size is None else base_size
    _check(sizes, target, base, power, margin_nats, level)
    question = Question(
        target_size=target,
        base_size=base,
        axis=table.axis,
        hyperparameter=table.hyperparameter,
        power=None if power == "measured" else power,
        margin_nats=margin_nats,
        level=level,
    )
    try:
        with np.errstate(all="ignore"):  # what is not finite is refused by the records it would end in
            judged = judge(table.points, question) if table.points else judge_optima(table.optima, question)
            notes: list[Json] = [*table.notes, *_assumed(question, target_size, base_size)]
            return {**verdict_summary(judged), "notes": notes, "dropped": _list_dropped(table)}
    except (ArithmeticError, np.linalg.LinAlgError) as error:
        raise TransferError([f"numbers too far apart, or too close, to fit a loss basin: {error}"]) from error


def _list_dropped(table: RunTable) -> list[Json]:
    return [{"row": row, "reason": reason} for row, reason in table.dropped]


def _assumed(question: Question, target_size: int | None, base_size: int | None) -> list[str]:
    """What was not given, although the verdict depends on it."""
    target, base = (at_size(question.axis, size) for size in (question.target_size, question.base_size))
    notes = [f"--target-size not given: taken to be {target}, twice the largest"] if target_size is None else []
    return notes + ([f"--base-size not given: taken to be {base}, the smallest"] if base_size is None else [])


def _check(
    sizes: list[int], target: int, base: int, power: float | Literal["measured"], margin_nats: float, level: float
) -> None:
    bounded = (
        ("power", 0.0 if power == "measured" else power, (-LARGEST_POWER, LARGEST_POWER)),
        ("margin_nats", margin_nats, MARGINS_NATS),
        ("level", level, LEVELS),
    )
    problems = [
        f"{name} = {size if abs(size) < 10**40 else '...'}: must be a whole number from 1 to {LARGEST_SIZE:g}"
        for name, size in (("target_size", target), ("base_size", base))
        if not 1 <= size <= LARGEST_SIZE
    ]
    problems += [
        f"{name} = {value!r}: must be from {low:g} to {high:g}"
        for name, value, (low, high) in bounded
        if not low <= value <= high
    ]
    if len(sizes) > 1 and sizes[-1] < sizes[0] * 2**LEAST_SPAN_OCTAVES:
        problems.append(
            f"sizes from {sizes[0]} to {sizes[-1]} hardly differ: must span a factor of "
            f"{format_factor(2**LEAST_SPAN_OCTAVES)}"
        )
    if problems:
        raise TransferError(problems)
