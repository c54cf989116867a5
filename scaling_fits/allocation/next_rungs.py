"""Which extra runs would narrow the interval of the loss at the target most for their FLOPs.

Every refit says a log loss at the target and at each candidate. Where these move together, measuring the one
narrows the other: with covariances over the refits of the pooled laws and s the noise of a run, a run at c
leaves var(t) - cov(t, c)^2 / (var(c) + s^2) (the normal conditional, as in optimal design). Runs are chosen one
after the other, each given those before it. What else is in the target's interval, noise and the error that all laws
share, counts as staying: nothing in refits of wrong laws says how wrong they are, so runs near the target are worth
more than is said here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from proxies.core.checks import Checks
from scaling_fits.forecast import cloud
from scaling_fits.forecast.uncertainty import FittedRuns, predict
from scaling_fits.laws.solver import Floats

NEXT_SHARE = 0.1  # of the target's FLOPs, at most, for runs that sharpen its forecast
_LEAST_DRAWS = 8
UNSEEN = "by the refits alone: an error that all laws share is taken to stay, and speaks for runs nearer the target"
_SIZES, _BUDGETS = 11, 13  # candidates: the steps of a grid in log N and log FLOPs
_SMALLEST = 3.0  # the cheapest candidate, below the ladder's largest run: cheaper ones repeat what is known
_MATERIAL = 0.5  # of what the best candidate narrows; below, a run is a crumb, cheap as it may be
_LEAST_SHRINK = 0.02
_ROUNDS = 3  # of exchanges
_TRIM = 0.02  # of the refits, the farthest at the target: a runaway law's numbers are no normal's


@dataclass(frozen=True, kw_only=True, slots=True)
class NextRun:
    """One run that would narrow the target's interval."""

    params: float
    tokens: float
    flops: float
    """6 N D."""
    interval_shrink: float
    """Share by which the interval narrows, the runs before this one done."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """Runs that could be made; equal lengths. `SpecError` for what is no run."""

    params: Floats
    tokens: Floats

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.that(len(self.params) == len(self.tokens) > 0, "as many params as tokens, and one at least, are wanted")
        for name in ("params", "tokens"):
            column = getattr(self, name)
            fine = bool(np.isfinite(column).all() and (column > 0).all())
            checks.that(fine, f"{name}: finite numbers > 0 are wanted")
        checks.done()

    @property
    def flops(self) -> Floats:
        """6 N D of each."""
        return 6.0 * self.params * self.tokens


def candidates_below(fitted: FittedRuns, most_flops: float) -> Candidates | None:
    """A grid of runs of at most `most_flops`; None if that is too cheap.

    Tokens per parameter go from the fewest tokens fitted on the largest size to the most on the smallest.
    """
    largest = fitted.span.six_nd[1]
    cheapest = largest / _SMALLEST
    if not most_flops > cheapest:
        return None
    budgets = np.geomspace(cheapest, most_flops, _BUDGETS)
    ratios = (fitted.span.tokens[0] / fitted.span.params[1], fitted.span.tokens[1] / fitted.span.params[0])
    ratio = np.geomspace(ratios[0], max(ratios[1], 1.01 * ratios[0]), _SIZES)
    flops, per_param = (grid.reshape(-1) for grid in np.meshgrid(budgets, ratio, indexing="ij"))
    params = np.sqrt(flops / 6 / per_param)
    return Candidates(params=params, tokens=params * per_param)


def next_rungs(
    fitted: FittedRuns, target_params: float, target_tokens: float, candidates: Candidates, *,
    num_runs: int = 3, most_flops: float = math.inf,
) -> tuple[NextRun, ...]:  # fmt: skip
    """The runs to make next, in order, their FLOPs within `most_flops` together; empty when none would help.

    Of the candidates that narrow the target's interval at least half as much as the best one, each step takes the
    one that narrows it most for its FLOPs; then runs are exchanged while that helps and costs no more. A candidate
    may be taken twice: a repeat averages noise out. Without a bootstrap nothing is known of what moves with what,
    and the answer is empty.

    Raises:
        CannotTellError: the runs identify no law.
    """
    fitted.require()
    if not fitted.has_draws:
        return ()
    picture = _picture(fitted, target_params, target_tokens, candidates)
    flops = candidates.flops
    runs = []
    for index in _better(picture, flops, _greedy(picture, flops, num_runs, most_flops)):
        runs.append(
            NextRun(
                params=float(candidates.params[index]),
                tokens=float(candidates.tokens[index]),
                flops=float(flops[index]),
                interval_shrink=float(picture.shrinks()[index]),
            )
        )
        picture = picture.after([index])
    return tuple(runs)


def advice(
    fitted: FittedRuns, target_params: float, target_tokens: float, target_flops: float, *, money: str
) -> tuple[tuple[NextRun, ...], str]:
    """Runs to add for at most a tenth of the target's FLOPs, and what to know of them, or why there are none.

    Args:
        fitted: the fit.
        target_params: N of the run to be predicted.
        target_tokens: its D.
        target_flops: what it costs.
        money: what that is called in words, as "the budget".
    """
    most = NEXT_SHARE * target_flops
    if not fitted.has_draws:
        return (), "the fit has no bootstrap: nothing says what moves with what"
    if fitted.bootstrap < _LEAST_DRAWS:
        return (), "the fit has too few refits: nothing says what moves with what"
    candidates = candidates_below(fitted, most)
    if candidates is None:
        return (), f"{NEXT_SHARE:.0%} of {money} buys no run the size of the ladder's largest"
    return next_rungs(fitted, target_params, target_tokens, candidates, most_flops=most), UNSEEN


def expected_shrink(fitted: FittedRuns, target_params: float, target_tokens: float, runs: Candidates) -> float:
    """Share by which the target's interval narrows when all `runs` are made; 0 without a bootstrap."""
    fitted.require()
    if not fitted.has_draws:
        return 0.0
    picture = _picture(fitted, target_params, target_tokens, runs)
    return 1 - picture.after(list(range(len(runs.params)))).width() / picture.width()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Picture:
    """What is known, as normal distributions of log losses."""

    covariance: Floats
    """Over the target, then the candidates."""
    noise: float
    """Sd of one run."""
    staying: float
    """Variance at the target that no candidate takes away."""

    def after(self, indices: list[int]) -> _Picture:
        """Once these candidates were measured."""
        covariance = self.covariance
        for index in indices:
            covariance = conditioned(covariance, index + 1, self.noise)
        return _Picture(covariance=covariance, noise=self.noise, staying=self.staying)

    def width(self) -> float:
        """Sd of a new run at the target."""
        return math.sqrt(max(self.covariance[0, 0], 0.0) + self.staying)

    def shrinks(self) -> Floats:
        """Share by which measuring each candidate once narrows the target's interval."""
        gained = self.covariance[0, 1:] ** 2 / (np.diag(self.covariance)[1:] + self.noise**2)
        result: Floats = 1 - np.sqrt(np.maximum(1 - gained / self.width() ** 2, 0.0))
        return result


def _greedy(picture: _Picture, flops: Floats, num_runs: int, most_flops: float) -> list[int]:
    """One after the other, the most for its FLOPs of those that are no crumbs."""
    left, chosen = most_flops, []
    for _ in range(num_runs):
        shrink = np.where(flops <= left, picture.shrinks(), 0.0)
        if shrink.max() < _LEAST_SHRINK:
            break
        worth = np.where(shrink >= _MATERIAL * shrink.max(), -np.log1p(-shrink) / flops, 0.0)
        chosen.append(int(worth.argmax()))
        left -= float(flops[chosen[-1]])
        picture = picture.after(chosen[-1:])
    return chosen


def _better(picture: _Picture, flops: Floats, chosen: list[int]) -> list[int]:
    """For no more FLOPs than `chosen`: each run in turn exchanged for the best beside the others, or one run alone."""
    if not chosen:
        return chosen
    spent = float(flops[chosen].sum()) * (1 + 1e-12)
    for _ in range(_ROUNDS):
        for place in range(len(chosen)):
            others = chosen[:place] + chosen[place + 1 :]
            left = spent - float(flops[others].sum())
            shrink = np.where(flops <= left, picture.after(others).shrinks(), 0.0)
            if shrink.max() > shrink[chosen[place]] * (1 + 1e-9):
                chosen = [*chosen[:place], int(shrink.argmax()), *chosen[place + 1 :]]
    alone = int(np.where(flops <= spent, picture.shrinks(), 0.0).argmax())
    single = picture.after([alone]).width() < picture.after(chosen).width()
    return _in_order(picture, [alone] if single else chosen)


def _in_order(picture: _Picture, chosen: list[int]) -> list[int]:
    """The same runs, whatever narrows most first; without those that, last, would add next to nothing."""
    ordered: list[int] = []
    left = list(chosen)
    while left:
        shrink = picture.after(ordered).shrinks()
        best = max(left, key=lambda index: float(shrink[index]))
        if shrink[best] < _LEAST_SHRINK:
            break
        ordered.append(best)
        left.remove(best)
    return ordered


def conditioned(covariance: Floats, index: int, noise: float) -> Floats:
    """A covariance after the variable `index` was measured once with this noise."""
    column = covariance[:, index]
    result: Floats = covariance - np.outer(column, column) / (column[index] + noise**2)
    return result


def _picture(
    fitted: FittedRuns, target_params: float, target_tokens: float, candidates: Candidates
) -> _Picture:  # fmt: skip
    """Covariance over the refits of log losses at (target, candidates...), the noise, and what stays."""
    n = np.concatenate([[target_params], candidates.params])
    d = np.concatenate([[target_tokens], candidates.tokens])
    loss = cloud.refit_log_losses(fitted.members, fitted.cloud, n, d)
    ends = np.quantile(loss[:, 0], [_TRIM / 2, 1 - _TRIM / 2])
    kept = (loss[:, 0] >= ends[0]) & (loss[:, 0] <= ends[1]) & np.isfinite(loss).all(axis=1)
    centred = loss[kept] - loss[kept].mean(axis=0)
    covariance: Floats = centred.T @ centred / kept.sum()
    # What `predict` takes for the noise of a run: a law that misses the runs does not make these noisier.
    noise = max(float(np.median(fitted.cloud.noise_draws)), 1e-6)  # nor are exact runs repeated to a millionth
    at = predict(fitted, target_params, target_tokens)
    assert at.low is not None and at.high is not None  # there are draws
    whole = (math.log(at.high) - math.log(at.low)) / (2 * float(ndtri((1 + fitted.level) / 2)))
    return _Picture(covariance=covariance, noise=noise, staying=max(whole**2 - float(covariance[0, 0]), noise**2))
