"""Ladders whose runs lie on one line: runs of one ratio of tokens to parameters, of one duration,
or of one size.

Such runs show how loss falls along their line, but not away from it: the effects of the parameters
N and of the tokens D cannot be separated. The runs identify a law of compute along the line,
L = E + F * C^-gamma with C = 6 N D.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from forerun._proxies.core.notation import format_count, format_significant
from forerun._scaling_fits.laws import solver
from forerun._scaling_fits.laws.solver import Floats
from forerun._scaling_fits.laws.table import RunTable

MAX_WIDTH = 0.15
"""Largest distance, in logs, of a run from the line of its ladder: 24 % in tokens per parameter."""
MAX_OFF = 0.5
"""Largest distance, in logs, from the line at which a question is answered: a factor 2 in tokens
per parameter."""
_MIN_ELONGATION = 5.0
"""Minimum ratio of a ladder's length to its width."""
_ALONG_AXIS = 0.1
"""Largest component of a direction that counts as 0."""

NAMES = ("E", "F", "gamma")
"""Parameters of the law along a line."""
UNIDENTIFIED_NAMES = ("A", "B", "alpha", "beta")
"""Parameters that runs along one line do not identify."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LadderPath:
    """The line of a ladder in log N and log D."""

    log_params: float
    log_tokens: float
    """Log D of a point of the line; `log_params` is log N of the same point, the mean of the
    runs."""
    direction: tuple[float, float]
    """Unit vector along log N and log D."""
    ends: tuple[float, float]
    """Positions of the smallest and largest run along the direction, from the point."""

    def compute_distance(self, params: float, tokens: float) -> float:
        """Return the distance of a run from the line, in logs."""
        n, d = math.log(params) - self.log_params, math.log(tokens) - self.log_tokens
        return abs(n * self.direction[1] - d * self.direction[0])

    def describe(self) -> str:
        """Return a sentence on what the runs have in common."""
        along_n, along_d = self.direction
        if abs(along_n) < _ALONG_AXIS:
            return f"all runs have about {format_count(math.exp(self.log_params))} parameters"
        if abs(along_d) < _ALONG_AXIS:
            return f"all runs have about {format_count(math.exp(self.log_tokens))} tokens"
        if abs(along_n - along_d) < _ALONG_AXIS:
            ratio = math.exp(self.log_tokens - self.log_params)
            return f"all runs have about {format_significant(ratio)} tokens per parameter"
        return "sizes and tokens of all runs lie on one line"

    def compute_parameters(self, theta_SP: Floats) -> dict[str, Floats]:
        """Return E and F in nats, and gamma (S,), of the law of compute that each law follows along
        the line.

        The law of compute goes through three predictions: at both ends of the ladder, and in the
        middle of its log FLOPs.
        """
        places = np.array([self.ends[0], (self.ends[0] + self.ends[1]) / 2, self.ends[1]])
        n = self.log_params + places * self.direction[0]
        d = self.log_tokens + places * self.direction[1]
        first, middle, last = np.exp(solver.compute_log_loss(theta_SP, n, d)).T
        log_flops = math.log(6.0) + n + d
        drop = np.maximum((first - middle) / np.maximum(middle - last, 1e-300), 1.0 + 1e-9)
        gamma = np.log(drop) / (log_flops[1] - log_flops[0])
        reducible_nats = (first - middle) / -np.expm1(-gamma * (log_flops[1] - log_flops[0]))
        return {
            "E": first - reducible_nats,
            "F": reducible_nats * np.exp(gamma * log_flops[0]),
            "gamma": gamma,
        }


def find_path(table: RunTable) -> LadderPath | None:
    """Return the line on which all runs lie; None if they spread over an area."""
    logs = np.stack([np.log(table.params), np.log(table.tokens)])
    middle = logs.mean(axis=1)
    offsets = logs - middle[:, None]
    along, across = np.linalg.svd(offsets, full_matrices=False)[0].T
    along = along * (1.0 if along.sum() >= 0 else -1.0)
    width = np.abs(across @ offsets).max()
    positions = along @ offsets
    # A line along which tokens fall as sizes grow does not show how loss falls with compute
    if (
        width > MAX_WIDTH
        or np.ptp(positions) < _MIN_ELONGATION * width
        or along.min() < -_ALONG_AXIS
    ):
        return None
    return LadderPath(
        log_params=float(middle[0]),
        log_tokens=float(middle[1]),
        direction=(float(along[0]), float(along[1])),
        ends=(float(positions.min()), float(positions.max())),
    )
