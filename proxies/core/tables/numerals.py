"""Numbers as people write them: with suffixes, thousands separators, or decimal commas.

A number with two readings is never guessed: a comma is read only if the column, or the delimiter of
the file, leaves one reading.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

NumberKind = Literal["amount", "whole", "real"]
"""Kind of a column's numbers. An `amount` may have a suffix or thousands separators, a `whole`
number may have thousands separators, and a `real` number has neither."""
SUFFIX_POWERS = {
    "k": 3,
    "thousand": 3,
    "m": 6,
    "mn": 6,
    "million": 6,
    "b": 9,
    "bn": 9,
    "g": 9,
    "billion": 9,
    "t": 12,
    "tn": 12,
    "trillion": 12,
}
"""Powers of ten of the suffixes of counts, in either case."""

_THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(,[0-9]{3})+(\.[0-9]*)?")
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+(e[+-]?[0-9]+)?", re.IGNORECASE)
_WITH_SUFFIX = re.compile(r"(.*[0-9.])\s*([a-z]+)", re.IGNORECASE)
_GROUPS = re.compile(
    r"[+-]?[1-9][0-9]{0,2}(?:([\s'\u2019_])[0-9]{3}(?:\1[0-9]{3})*|(?:\.[0-9]{3}){2,})"
)
"""Groups of three digits whose separators have one reading: spaces, apostrophes, underscores, and
dots from the second on."""
_GROUPED_DOT = re.compile(r"[+-]?[1-9][0-9]{0,2}(?:\.[0-9]{3})+")


def parse_number(text: str) -> float | None:
    """Return the number that a text spells, NaN and infinity included; None if it spells none.

    Returns None for 1_000 and for digits that are not ASCII, which are numbers only to Python, and
    for 1e400, a finite number that no float can represent.
    """
    try:
        number = float(text)
    except ValueError:
        return None
    if "_" in text or not text.isascii() or (math.isinf(number) and "inf" not in text.lower()):
        return None
    return number


def parse_amount(text: str) -> float | None:
    """Return the number that a text spells; suffixes (`53.3M`) and groups (`53 300 000`) count."""
    mantissa, power = _split_suffix(text.strip())
    mantissa = _join_groups(mantissa)
    # Python reads 1.1e9 exactly; 1.1 times 1e9 would be rounded
    return parse_number(f"{mantissa}e{power}" if power else mantissa)


def _parse_whole(text: str) -> float | None:
    return parse_number(_join_groups(text))


def _join_groups(text: str) -> str:
    """Return a number without the separators of its groups of digits, if their reading is clear."""
    return re.sub(r"[\s'\u2019_.]", "", text) if _GROUPS.fullmatch(text) else text


def to_number(cell: object) -> float | None:
    """Return a cell of a table, or a value of a log, as a float; None if it is not a number.

    Booleans, lists, and objects are not numbers. A text counts if it spells a number, because
    strict JSON writers and W&B log "NaN" and "Infinity". `Decimal` is accepted, because databases
    return sums as such.
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
    """Description of both readings of the column's commas if neither is proven; empty otherwise."""
    uses_dots_for_thousands: bool = False
    """Whether the column proves that dots in the table separate thousands: by its decimal commas,
    or by a number with two dots."""


def read_numbers(
    cells: Sequence[object], kind: NumberKind, *, splits_at_commas: bool
) -> NumberColumn:
    """Read a column of cells as numbers.

    Args:
        cells: The column.
        kind: Kind of its numbers.
        splits_at_commas: Whether the table's cells are separated by commas. A comma inside a cell
            was then quoted, and can only separate thousands. In other tables the column must prove
            what its commas are.

    Returns:
        The numbers, and any doubt about them.
    """
    parse = {"amount": parse_amount, "whole": _parse_whole, "real": parse_number}[kind]
    values = [to_number(cell) for cell in cells]
    texts = {
        place: cell.strip()
        for place, (cell, value) in enumerate(zip(cells, values, strict=True))
        if value is None and isinstance(cell, str)
    }
    if not any(texts.values()):
        return NumberColumn(values=values)

    # Commas
    mantissas = {
        place: _strip_suffix(text) if kind == "amount" else text for place, text in texts.items()
    }
    with_comma = {place: text for place, text in mantissas.items() if "," in text}
    doubt, is_decimal, is_thousands = _judge_commas(
        list(with_comma.values()), kind, splits_at_commas=splits_at_commas
    )
    pattern = _DECIMAL_COMMA if is_decimal else _THOUSANDS if is_thousands else None
    for place, text in texts.items():
        if place not in with_comma:
            values[place] = parse(text)
        elif pattern is not None and pattern.fullmatch(mantissas[place]):
            values[place] = parse(text.replace(",", "." if is_decimal else ""))

    # Dots: if the column proves that dots separate thousands, the only dot of a cell does so too
    groups_by_dots = kind != "real" and any(
        "." in text and _GROUPS.fullmatch(text) for text in mantissas.values()
    )
    if is_decimal or groups_by_dots:
        for place, cell in enumerate(cells):
            if isinstance(cell, str) and "." in cell and "," not in cell:
                joined = groups_by_dots and _GROUPED_DOT.fullmatch(_strip_suffix(cell.strip()))
                values[place] = parse(cell.strip().replace(".", "")) if joined else None
    return NumberColumn(
        values=values, doubt=doubt, uses_dots_for_thousands=is_decimal or groups_by_dots
    )


def has_grouped_dot(cell: object) -> bool:
    """Return whether a dot in a cell may separate thousands: `53.300`."""
    return isinstance(cell, str) and _GROUPED_DOT.fullmatch(_strip_suffix(cell.strip())) is not None


def _strip_suffix(text: str) -> str:
    return _split_suffix(text)[0]


def _split_suffix(text: str) -> tuple[str, int]:
    """Return a number without its suffix, and the suffix's power of ten."""
    match = _WITH_SUFFIX.fullmatch(text)
    power = SUFFIX_POWERS.get(match[2].lower(), 0) if match else 0
    return (match[1], power) if match and power else (text, 0)


def _judge_commas(
    texts: list[str], kind: NumberKind, *, splits_at_commas: bool
) -> tuple[str, bool, bool]:
    """Determine whether the commas of a column separate decimals or thousands.

    Returns:
        A description of the doubt (empty if there is none), whether they are decimal commas, and
        whether they separate thousands.
    """
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
        f"{text!r} is {as_thousands} if a comma separates thousands and {as_decimal} if it is a "
        "decimal comma: write the column's numbers with a dot, and without separators"
    )
    return doubt, False, False
