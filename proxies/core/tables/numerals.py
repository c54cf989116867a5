"""Numbers as people write them: plain, with a suffix, with thousands separators, with a decimal comma.

A number with two readings is never guessed: a comma is read only where the column, or the delimiter of the file, leaves
one reading.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

NumberKind = Literal["amount", "whole", "real"]
"""Kind of a column's numbers: an amount may have a suffix and thousands separators, a whole number thousands
separators, and a real number neither."""
SUFFIX_POWERS = {"k": 3, "m": 6, "b": 9, "t": 12}
"""Power of ten by suffix, in lower case."""

_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]*)?")
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+(e[+-]?[0-9]+)?", re.IGNORECASE)
_GROUPED_DOT = re.compile(r"[+-]?[1-9][0-9]{0,2}\.[0-9]{3}")


def parse_number(text: str) -> float | None:
    """Return the number that a text spells, NaN and infinity included; None if it spells none.

    1_000 and digits that are not ASCII are numbers to Python alone, and 1e400 is a finite number that no float holds:
    all are None.
    """
    try:
        number = float(text)
    except ValueError:
        return None
    if "_" in text or not text.isascii() or (math.isinf(number) and "inf" not in text.lower()):
        return None
    return number


def parse_amount(text: str) -> float | None:
    """Return the number that a text spells, with or without a suffix K, M, B, or T: `53.3M` is 5.33e7."""
    stripped = text.strip()
    power = SUFFIX_POWERS.get(stripped[-1:].lower())
    if power is None:
        return parse_number(stripped)
    # 1.1e9 is the nearest float; 1.1 times 1e9 is another one.
    return parse_number(f"{stripped[:-1].rstrip()}e{power}")


def to_number(cell: object) -> float | None:
    """Return a cell of a table, or a value of a log, as a float; None for what is missing or no number.

    Booleans, lists and objects are no numbers, and a text is one only if it spells one: strict JSON writers and W&B log
    "NaN" and "Infinity". Sums of whole numbers come out of a database as decimals in Parquet.
    """
    if isinstance(cell, str):
        return parse_number(cell)
    if isinstance(cell, bool) or not isinstance(cell, int | float | Decimal):
        return None
    try:
        number = float(cell)
    except (OverflowError, ValueError):  # ValueError: a signaling NaN
        return None
    finite = cell.is_finite() if isinstance(cell, Decimal) else math.isfinite(cell)
    return None if finite and math.isinf(number) else number


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberColumn:
    """A column of cells as numbers."""

    values: Sequence[float | None]
    """Value of each cell; None if the cell is missing or not a number."""
    doubt: str = ""
    """Message with both readings of the column's commas, if the column does not decide between them; else empty."""
    has_decimal_comma: bool = False
    """Whether the column proves that its commas are decimal commas."""


def read_numbers(cells: Sequence[object], kind: NumberKind, *, splits_at_commas: bool) -> NumberColumn:
    """Read a column of cells as numbers.

    Args:
        cells: The column.
        kind: Kind of its numbers.
        splits_at_commas: Whether the table's cells are separated by commas, so that a comma inside a cell was quoted.
            Such a comma can only separate thousands. In other tables the column must prove what its commas are.

    Returns:
        The numbers, and any doubt about them.
    """
    parse = parse_amount if kind == "amount" else parse_number
    values = [to_number(cell) for cell in cells]
    texts = {
        place: cell.strip()
        for place, (cell, value) in enumerate(zip(cells, values, strict=True))
        if value is None and isinstance(cell, str)
    }
    if not any(texts.values()):
        return NumberColumn(values=values)
    mantissas = {place: _strip_suffix(text) if kind == "amount" else text for place, text in texts.items()}
    with_comma = {place: text for place, text in mantissas.items() if "," in text}
    doubt, is_decimal, is_thousands = _judge_commas(list(with_comma.values()), kind, splits_at_commas=splits_at_commas)
    pattern = _DECIMAL_COMMA if is_decimal else _THOUSANDS if is_thousands else None
    for place, text in texts.items():
        if place not in with_comma:
            values[place] = parse(text)
        elif pattern is not None and pattern.fullmatch(mantissas[place]):
            values[place] = parse(text.replace(",", "." if is_decimal else ""))
    if is_decimal:  # in such a column a dot may separate thousands
        for place, cell in enumerate(cells):
            if isinstance(cell, str) and "." in cell and "," not in cell:
                values[place] = None
    return NumberColumn(values=values, doubt=doubt, has_decimal_comma=is_decimal)


def has_grouped_dot(cell: object) -> bool:
    """Return whether a dot in a cell may separate thousands, as in `53.300`."""
    return isinstance(cell, str) and _GROUPED_DOT.fullmatch(_strip_suffix(cell.strip())) is not None


def _strip_suffix(text: str) -> str:
    return text[:-1].rstrip() if text[-1:].lower() in SUFFIX_POWERS else text


def _judge_commas(texts: list[str], kind: NumberKind, *, splits_at_commas: bool) -> tuple[str, bool, bool]:
    """Return (doubt about a column's commas, whether they are decimal, whether they separate thousands)."""
    decimal = {text for text in texts if _DECIMAL_COMMA.fullmatch(text)}
    thousands = {text for text in texts if _THOUSANDS.fullmatch(text)}
    if not decimal and not thousands:
        return "", False, False
    if splits_at_commas and kind != "real":
        return "", False, True
    proves_decimal, proves_thousands = bool(decimal - thousands), bool(thousands - decimal)
    if proves_decimal != proves_thousands and not splits_at_commas:
        return "", proves_decimal, proves_thousands
    text = next(text for text in texts if text in (decimal & thousands or decimal or thousands))
    as_thousands = text.replace(",", "") if text in thousands else "no number"
    as_decimal = text.replace(",", ".") if text in decimal else "no number"
    doubt = (
        f"{text!r} is {as_thousands} if a comma separates thousands and {as_decimal} if it is a decimal comma: "
        "write the column's numbers with a dot, and without separators"
    )
    return doubt, False, False
