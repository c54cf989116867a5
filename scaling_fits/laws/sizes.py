"""What sizes of runs may be, and numbers that records can hold."""

from __future__ import annotations

import math

from scaling_fits.laws.law import LawError

LARGEST = 1e20  # parameters or tokens


def exp_finite(value: float) -> float:
    """Exp that stays finite: an end that says "anything" must still be a number a record may hold."""
    return math.exp(min(max(value, -700.0), 700.0))


def check_size(**values: float) -> None:
    """Refuse what is no size of a run.

    Raises:
        LawError: naming every such value.
    """
    problems = [
        f"{name} = {value:g}: a number from 1 to {LARGEST:g} is wanted"
        for name, value in values.items()
        if not 1 <= value <= LARGEST
    ]
    if problems:
        raise LawError("; ".join(problems))


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
