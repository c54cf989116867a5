"""The bottom of a valley of log loss over log N, one per budget, all budgets sharing one window and one degree.

- `parabola`: a quadratic through all sizes. Real valleys are lopsided, so its optimum is biased.
- `cubic`: a cubic through all sizes.
- `window`: a quadratic or a cubic through the sizes about the bottom, up to some loss above the lowest. Degree and
  height are chosen by data (`local_fits`), over all budgets at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from scaling_fits.compute import local_fits
from scaling_fits.compute.local_fits import Floats, LocalFit

Method = Literal["window", "cubic", "parabola"]
METHODS: tuple[Method, ...] = get_args(Method)

_EXCESSES = (math.inf, 0.16, 0.08, 0.04, 0.02, 0.01)  # in log loss above the lowest size
_NUM_JUDGES = 4  # sizes per budget, the lowest: their runs judge a choice
LEAST_SIZES: dict[Method, int] = {"window": 5, "cubic": 5, "parabola": 4}
"""Distinct sizes in a budget: the coefficients and one more."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Runs:
    """The runs of one budget."""

    x: Floats
    """Log N (R,)."""
    y: Floats
    """Log loss in nats (R,)."""
    weight: Floats
    """Share of each run (R,), of mean 1."""

    @property
    def sizes(self) -> Floats:
        """Distinct log N, ascending."""
        return np.unique(self.x)

    @property
    def size_means(self) -> Floats:
        """Mean log loss of each size."""
        return np.array([np.average(self.y[self.x == x], weights=self.weight[self.x == x]) for x in self.sizes])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Bottom:
    """Where one valley is lowest, and draws of it."""

    log_params: float
    """NaN where the polynomial has no minimum."""
    log_loss: float
    log_params_draws: Floats
    """(draws,), NaN where a draw has no minimum."""
    log_loss_draws: Floats
    noise_sd: float
    """Of one run, in log loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A polynomial and the window that it is fitted in."""

    degree: int
    excess: float
    """Sizes up to this log loss above the lowest; infinite: all sizes."""


def bottoms(valleys: Sequence[Runs], method: Method, *, num_draws: int, seed: int) -> tuple[list[Bottom], Choice]:
    """The bottom of each valley, and the choice behind the point estimates.

    Every budget must hold at least `LEAST_SIZES[method]` sizes.
    """
    choices = _choices(method)
    pilots = [_pilot(runs) for runs in valleys]
    fits = {choice: [_fit(runs, pilot, choice) for runs, pilot in zip(valleys, pilots, strict=True)]
            for choice in choices}  # fmt: skip
    scores = np.array([local_fits.score(fits[choice]) for choice in choices])
    num_judges = sum(len(fit.left_out) for fit in fits[choices[0]])
    best = choices[int(scores.argmin())]
    rng = np.random.default_rng([seed, 0])
    drawn: list[list[Floats]] = [[] for _ in valleys]
    for choice, count in zip(choices, local_fits.draws_per_window(scores, num_judges, num_draws), strict=True):
        for held, pilot, theta in zip(drawn, pilots, local_fits.theta_draws(fits[choice], count, rng), strict=True):
            held.append(_minimum(pilot, theta))
    sds = local_fits.noise_sds(fits[best])
    found = [_bottom(*parts) for parts in zip(pilots, fits[best], drawn, sds, strict=True)]
    return found, best


def _choices(method: Method) -> tuple[Choice, ...]:
    if method == "window":
        return tuple(Choice(degree=degree, excess=excess) for excess in _EXCESSES for degree in (2, 3))
    return (Choice(degree=3 if method == "cubic" else 2, excess=math.inf),)


def _bottom(pilot: float, fit: LocalFit, held: list[Floats], noise_sd: float) -> Bottom:
    log_params, log_loss = _minimum(pilot, fit.theta[None, :])[:, 0].tolist()
    params_draws, loss_draws = np.concatenate(held, axis=1)
    return Bottom(
        log_params=log_params,
        log_loss=log_loss,
        log_params_draws=params_draws,
        log_loss_draws=loss_draws,
        noise_sd=noise_sd,
    )


def _pilot(runs: Runs) -> float:
    """A first guess of the bottom, for polynomials to run in log N about it: the lowest size."""
    return float(runs.sizes[runs.size_means.argmin()])


def _fit(runs: Runs, pilot: float, choice: Choice) -> LocalFit:
    excess = _excess(runs)
    inside = excess <= max(choice.excess, _nth_size(runs, excess, choice.degree + 2))  # one size to spare
    design = np.vander(runs.x[inside] - pilot, choice.degree + 1, increasing=True)
    judges = excess[inside] <= _nth_size(runs, excess, _NUM_JUDGES)
    return local_fits.fit_local(design, runs.y[inside], runs.weight[inside], judges)


def _excess(runs: Runs) -> Floats:
    """Log loss of each run's size above the lowest size's, rising outwards (R,): windows are without holes."""
    means = runs.size_means
    low = int(means.argmin())
    left = np.maximum.accumulate(means[: low + 1][::-1])[::-1]
    rising = np.concatenate([left, np.maximum.accumulate(means[low:])[1:]]) - means[low]
    result: Floats = rising[np.searchsorted(runs.sizes, runs.x)]
    return result


def _nth_size(runs: Runs, excess: Floats, num_sizes: int) -> float:
    """The excess that holds the `num_sizes` lowest sizes."""
    by_size = np.array([excess[runs.x == x][0] for x in runs.sizes])
    return float(np.sort(by_size)[num_sizes - 1])


def _minimum(pilot: float, theta_MP: Floats) -> Floats:
    """Log N and log loss (2, M) of the local minimum of each row's polynomial; NaN where there is none."""
    first, second = theta_MP[:, 1], theta_MP[:, 2]
    third = theta_MP[:, 3] if theta_MP.shape[1] > 3 else np.zeros_like(first)
    inside = second**2 - 3 * first * third
    root = np.sqrt(np.maximum(inside, 0.0))
    below = second + root  # half the curvature there is `root`, so this root of the slope is the minimum
    exists = (inside > 0) & (below > 0)
    z = np.where(exists, -first / np.where(exists, below, 1.0), np.nan)
    loss = theta_MP[:, 0] + first * z + second * z**2 + third * z**3
    return np.stack([pilot + z, loss])
