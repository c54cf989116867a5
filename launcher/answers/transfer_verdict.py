"""The verdict on a table of runs that the user made: `forerun transfer --runs FILE`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

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
_Option = Callable[[Any], Any]

MAX_SIZE = 2 * 10**18
"""Maximum size; a larger one is a typing error."""
MAX_ABS_POWER = 10.0
"""Maximum absolute power of a rule; a larger one is a typing error."""
MARGINS_NATS = (1e-6, 1e3)
"""Bounds of the margin in nats."""
LEVELS = (0.5, 0.999)
"""Bounds of the level: beyond them, intervals would rest on a handful of draws."""
MIN_SPAN_OCTAVES = 0.1
"""Minimum distance from the smallest size to the largest; over less, no drift can be seen."""


def _read_power(
    ctx: click.Context, param: click.Parameter, value: str
) -> float | Literal["measured"]:
    if value == "measured":
        return "measured"
    try:
        return float(value)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is neither a number nor `measured`", ctx, param
        ) from None


def table_options(command: _Command) -> _Command:
    """Add --runs and the options that go with it: `runs_path` and those of `judge_table`."""
    options: list[_Option] = [*_make_question_options(), *_make_verdict_options(), column_option]
    for option in reversed(options):
        command = option(command)
    return command


def _make_question_options() -> tuple[_Option, ...]:
    """Build the options that name the table, and what is tested in it."""
    return (
        click.option(
            "--runs",
            "runs_path",
            type=click.Path(path_type=Path),
            help="Judge this table of runs instead.",
        ),
        click.option(
            "--axis",
            type=click.Choice(AXES),
            help="With --runs: what grows (default: what varies).",
        ),
        click.option(
            "--hyperparameter",
            type=click.Choice(list(OPTIMUM_COLUMNS)),
            metavar="NAME",
            help="With --runs: what must stay put (default: the learning rate, or what varies).",
        ),
        click.option(
            "--target-size",
            "--target-width",
            "target_size",
            type=WholeAmount(),
            help="With --runs: the main run's size (default: twice the largest).",
        ),
        click.option(
            "--base-size",
            "--base-width",
            "base_size",
            type=WholeAmount(),
            help="With --runs: where the value was tuned (default: the smallest).",
        ),
    )


def _make_verdict_options() -> tuple[_Option, ...]:
    """Build the options of the rule, the margin, and the intervals."""
    return (
        click.option(
            "--power",
            callback=_read_power,
            default="0",
            show_default=True,
            metavar="NUMBER|measured",
            help="With --runs: the value moves as (target / base)^power; `measured`: as the optima "
            "do.",
        ),
        click.option(
            "--margin-nats",
            type=float,
            default=0.01,
            show_default=True,
            help="With --runs: the cost allowed.",
        ),
        click.option(
            "--level",
            type=float,
            default=0.9,
            show_default=True,
            help="With --runs: of every interval.",
        ),
    )


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
        axis: The size that grows; None for the only size that varies.
        hyperparameter: The tested hyperparameter; None for the learning rate if it varies, else the
            only one that varies.
        target_size: Size of the main run; None for twice the largest size of the table.
        base_size: Size at which the value was tuned; None for the smallest size.
        power: Exponent of the rule: the value at the target is the base's times
            (target / base)^power; `measured` for the power of the optima.
        margin_nats: Regret that is allowed, in nats.
        level: Level of every interval.
        columns: The table's column names by forerun's names, where the user chose them.

    Returns:
        The keys of `transfer.verdict.summary.verdict_summary`, with `notes`, and rows `dropped`.

    Raises:
        TableError, TransferError: No verdict can be made from the table, or with the options.
    """
    import numpy as np

    from transfer.tables.table import read_runs

    table = read_runs(path, axis=axis, hyperparameter=hyperparameter, columns=columns)
    sizes = sorted({point.size for point in table.points} or {size for size, _ in table.optima})
    target = 2 * sizes[-1] if target_size is None else target_size
    base = sizes[0] if base_size is None else base_size
    _check_options(sizes, target, base, power, margin_nats, level)
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
        body = _judge_question(table, question)
    except (ArithmeticError, np.linalg.LinAlgError) as error:
        raise TransferError(
            [f"numbers too far apart, or too close, to fit a loss basin: {error}"]
        ) from error
    notes: list[Json] = [*table.notes, *_describe_assumptions(question, target_size, base_size)]
    return {**body, "notes": notes, "dropped": _list_dropped(table)}


def _judge_question(table: RunTable, question: Question) -> dict[str, Json]:
    """Return the summary of the verdict on a table's runs, or on its optima if it has those.

    Raises:
        ArithmeticError, numpy.linalg.LinAlgError: A basin cannot be fitted in floating point.
    """
    import numpy as np

    from transfer.verdict.optima_verdict import judge_optima
    from transfer.verdict.summary import verdict_summary
    from transfer.verdict.verdict import judge

    # Numbers that are not finite are refused by the records that would hold them.
    with np.errstate(all="ignore"):
        return verdict_summary(
            judge(table.points, question) if table.points else judge_optima(table.optima, question)
        )


def _list_dropped(table: RunTable) -> list[Json]:
    return [{"row": row, "reason": reason} for row, reason in table.dropped]


def _describe_assumptions(
    question: Question, target_size: int | None, base_size: int | None
) -> list[str]:
    """Return a note for each size that the verdict depends on and that was not given."""
    target, base = (
        at_size(question.axis, size) for size in (question.target_size, question.base_size)
    )
    notes = (
        [f"--target-size not given: taken to be {target}, twice the largest"]
        if target_size is None
        else []
    )
    return notes + (
        [f"--base-size not given: taken to be {base}, the smallest"] if base_size is None else []
    )


def _check_options(
    sizes: list[int],
    target: int,
    base: int,
    power: float | Literal["measured"],
    margin_nats: float,
    level: float,
) -> None:
    bounded = (
        ("power", 0.0 if power == "measured" else power, (-MAX_ABS_POWER, MAX_ABS_POWER)),
        ("margin_nats", margin_nats, MARGINS_NATS),
        ("level", level, LEVELS),
    )
    problems = [
        f"{name} = {size if abs(size) < 10**40 else '...'}: must be a whole number from 1 to "
        f"{MAX_SIZE:g}"
        for name, size in (("target_size", target), ("base_size", base))
        if not 1 <= size <= MAX_SIZE
    ]
    problems += [
        f"{name} = {value!r}: must be from {low:g} to {high:g}"
        for name, value, (low, high) in bounded
        if not low <= value <= high
    ]
    if len(sizes) > 1 and sizes[-1] < sizes[0] * 2**MIN_SPAN_OCTAVES:
        problems.append(
            f"sizes from {sizes[0]} to {sizes[-1]} hardly differ: must span a factor of "
            f"{format_factor(2**MIN_SPAN_OCTAVES)}"
        )
    if problems:
        raise TransferError(problems)
