"""What fits of this room ask alike of their options, and the one error that refuses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

CellStatus = Literal["ok", "edge", "flat", "no_valley", "too_few"]
"""Whether the runs of a budget, or of one (N, D), hold an optimum."""
ComputeStatus = Literal["converged", "unidentified"]


class OptimaError(ValueError):
    """A question that no fit of this room takes, or data that hold none. `problems` lists everything that is wrong."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


def option_problems(bootstrap: int, level: float, seed: int) -> list[str]:
    """What is wrong with the options that all these fits share."""
    problems = []
    if not 0 <= bootstrap <= 100_000:
        problems.append(f"bootstrap = {bootstrap}: 0 to 100000 draws are wanted")
    if not 0 < level < 1:
        problems.append(f"level = {level}: a number between 0 and 1 is wanted")
    if seed < 0:
        problems.append(f"seed = {seed}: a whole number >= 0 is wanted")
    return problems
