"""The verdict on a table of the user's own runs or optima: `forerun transfer --runs FILE`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_factor
from forerun._proxies.core.tables.table_files import Source
from forerun._transfer.question import Axis, Hyperparameter, Question, TransferError, format_size

if TYPE_CHECKING:
    from forerun._transfer.tables.table import RunTable

MAX_SIZE = 2 * 10**18
"""Maximum size of a model or run; a larger one is a typing error."""
MAX_ABS_POWER = 10.0
"""Maximum absolute exponent of a rule; a larger one is a typing error."""
MARGINS_NATS = (1e-6, 1e3)
"""Bounds of the margin in nats."""
LEVELS = (0.5, 0.999)
"""Bounds of the level: beyond them, intervals would rest on a handful of draws."""
MIN_SPAN_OCTAVES = 0.1
"""Minimum distance from the smallest size to the largest; over less, no drift can be seen."""


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
    """Judge a table of runs or of optima.

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
        The keys of `summarize_verdict`, with `notes`, and rows `dropped`.

    Raises:
        TableError, TransferError: No verdict can be made from the table, or with the options.
    """
    import numpy as np

    from forerun._transfer.tables.table import read_runs

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
        problem = f"numbers too far apart, or too close, to fit a loss basin: {error}"
        raise TransferError([problem]) from error
    notes: list[Json] = [*table.notes, *_describe_assumptions(question, target_size, base_size)]
    dropped: Json = [{"row": row, "reason": reason} for row, reason in table.dropped]
    return {**body, "notes": notes, "dropped": dropped}


def _judge_question(table: RunTable, question: Question) -> dict[str, Json]:
    """Return the summary of the verdict on a table's runs, or on its optima if it has no runs.

    Raises:
        ArithmeticError, numpy.linalg.LinAlgError: A basin cannot be fitted in floating point.
    """
    import numpy as np

    from forerun._transfer.verdict.optima_verdict import judge_optima
    from forerun._transfer.verdict.summary import summarize_verdict
    from forerun._transfer.verdict.verdict import judge

    # Warnings of numpy are silenced: the records of the verdict refuse numbers that are not finite.
    with np.errstate(all="ignore"):
        return summarize_verdict(
            judge(table.points, question) if table.points else judge_optima(table.optima, question)
        )


def _describe_assumptions(
    question: Question, target_size: int | None, base_size: int | None
) -> list[str]:
    """Return a note for each of target size and base size that the user did not give."""
    sizes = (
        ("target", target_size, question.target_size, "twice the largest"),
        ("base", base_size, question.base_size, "the smallest"),
    )
    return [
        f"--{name}-size not given: taken to be {format_size(question.axis, used_size)}, {rule}"
        for name, given_size, used_size, rule in sizes
        if given_size is None
    ]


def _check_options(
    sizes: list[int],
    target: int,
    base: int,
    power: float | Literal["measured"],
    margin_nats: float,
    level: float,
) -> None:
    """Refuse options out of range, and sizes that hardly differ.

    Raises:
        TransferError: Some option is wrong; every problem is listed.
    """
    bounded = (
        ("power", 0.0 if power == "measured" else power, (-MAX_ABS_POWER, MAX_ABS_POWER)),
        ("margin_nats", margin_nats, MARGINS_NATS),
        ("level", level, LEVELS),
    )
    # A number of more than 40 digits would fill the terminal.
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
