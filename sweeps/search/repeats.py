"""Repeats of a search's best trials with other seeds: how repeats are allocated, and which trial
wins. Plans call repeats replicates (`num_replicates`).

Repeats go where the choice of the best trial is most in doubt, by optimal computing budget
allocation (OCBA; Chen, Lin, Yucesan, Chick 2000). They are requested in rounds, which are pure
functions of the outcomes of earlier rounds. If seeds have an effect, candidates are compared seed
by seed: trials with equal seeds have the same initial values, and the same data in the same order
(common random numbers).

In comprehensions, c is a candidate and k is one of its repeats. Arrays named `_R` have one element
per repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

NUM_FIRST_REPEATS = 2
"""Number of repeats of every candidate before their noise is known."""
MAX_CANDIDATES = 6
"""Maximum number of candidates."""
PAIRED_LEVEL = 0.1
"""Significance level of the F test that decides whether seeds count as common random numbers."""


Outcomes = Mapping[tuple[int, int], float | None]
"""Loss in nats by (candidate, repeat), None if the repeat diverged; repeats without an outcome are
missing.
"""


def choose_num_candidates(max_repeats: int, num_finished: int) -> int:
    """Return how many of the best trials are repeated.

    At most half of the repeats are spent before the noise is known.
    """
    return min(max(2, max_repeats // (2 * NUM_FIRST_REPEATS)), MAX_CANDIDATES, num_finished)


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateStatus:
    """A candidate after its repeats."""

    candidate: int
    num_repeats: int
    num_diverged: int
    mean_nats: float | None
    """Mean loss over the candidate's repeats in nats; if seeds have an effect, the estimated mean
    over all seeds that any candidate has. None if a repeat diverged.
    """
    standard_error_nats: float | None
    """Standard error of the mean, in nats; None if the noise cannot be estimated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The result of comparing the candidates."""

    standings: tuple[CandidateStatus, ...]
    """Candidates, the best first; candidates with a diverged repeat are last."""
    paired: bool
    """Whether seeds count as common random numbers."""
    lead_nats: float | None
    """Mean loss of the second-best candidate minus that of the best, in nats; None if there is no
    second.
    """
    lead_standard_error_nats: float | None
    """Standard error of `lead_nats`; None if the noise cannot be estimated."""


def allocate_repeats(
    num_candidates: int, max_repeats: int, round_size: int, outcomes: Outcomes
) -> list[int]:
    """Return how many repeats are requested of each candidate in total, given the outcomes so far.

    A candidate with k requested repeats needs repeats 0 ... k-1.

    Args:
        num_candidates: number of candidates; candidate 0 is the best trial.
        max_repeats: maximum total number of repeats.
        round_size: number of repeats requested at once after the first round.
        outcomes: outcomes so far.
    """
    counts = [0] * num_candidates
    for turn in range(min(max_repeats, NUM_FIRST_REPEATS * num_candidates)):
        counts[turn % num_candidates] += 1
    # Add a round whenever all requested repeats have outcomes
    while all((c, k) in outcomes for c, count in enumerate(counts) for k in range(count)):
        num_new = min(max_repeats - sum(counts), round_size)
        if num_new <= 0:
            break
        new_repeats = _allocate(counts, compare_candidates(counts, outcomes), num_new)
        if not any(new_repeats):
            break
        counts = [count + new for count, new in zip(counts, new_repeats, strict=True)]
    return counts


def _allocate(counts: Sequence[int], comparison: Comparison, num_new: int) -> list[int]:
    """Allocate the next repeats by optimal computing budget allocation.

    A rival's weight is the inverse square of its distance from the best candidate; the best
    candidate's weight is the root of the sum of their squares. All candidates are taken to have the
    same noise. A distance below its own standard error is replaced by that error, since otherwise
    all repeats would go to one pair.

    Args:
        counts: repeats so far, by candidate.
        comparison: comparison of the candidates so far.
        num_new: number of repeats to allocate.

    Returns:
        Additional repeats, by candidate.
    """
    means = {
        status.candidate: status.mean_nats
        for status in comparison.standings
        if status.mean_nats is not None
    }
    if len(means) < 2:
        return [0] * len(counts)
    best, *rivals = means  # in the order of the standings
    spent = np.array(counts, dtype=float)
    # Weights: the inverse squared distance from the best candidate
    floor = max(comparison.lead_standard_error_nats or 0.0, 1e-12)
    weights = np.zeros(len(counts))
    for rival in rivals:
        weights[rival] = max(means[rival] - means[best], floor) ** -2.0
    weights[best] = float(np.sqrt((weights**2).sum()))
    # Hand out the repeats one by one, each where the most are missing
    total = spent[weights > 0].sum() + num_new
    target = weights / weights.sum() * total
    new_repeats = [0] * len(counts)
    for _ in range(num_new):
        missing = np.where(weights > 0, target - spent - new_repeats, -np.inf)
        new_repeats[int(np.argmax(missing))] += 1  # of equal candidates, the better trial
    return new_repeats


def compare_candidates(counts: Sequence[int], outcomes: Outcomes) -> Comparison:
    """Compare the candidates by the losses of their repeats.

    The means come from a least-squares fit of the candidates' effects. If the seeds have a
    significant effect, it is fitted too. The noise is pooled over all candidates. The loss for
    which a candidate was chosen is not a repeat and does not count, because it is low by selection.

    Args:
        counts: number of repeats of each candidate that have outcomes.
        outcomes: outcomes of these repeats.
    """
    # Rows are (candidate, repeat, loss); `complete` has the candidates without a diverged repeat,
    # and the rows of `table` name a candidate by its place in `complete`
    rows = [(c, k, outcomes[c, k]) for c, count in enumerate(counts) for k in range(count)]
    diverged = [
        sum(loss is None for c, _, loss in rows if c == candidate)
        for candidate in range(len(counts))
    ]
    complete = [c for c, count in enumerate(counts) if count and not diverged[c]]
    table = [
        (complete.index(c), k, loss) for c, k, loss in rows if c in complete and loss is not None
    ]
    effects = _fit_effects(table, len(complete))
    # Rank the candidates without divergence by their means, then the others
    means, covariance = effects.means.tolist(), effects.covariance
    order = sorted(range(len(complete)), key=lambda i: (means[i], i))
    ranked: list[tuple[int, float | None, float | None]] = [
        (complete[i], means[i], None if covariance is None else float(np.sqrt(covariance[i, i])))
        for i in order
    ]
    with_divergence = sorted((d, c) for c, d in enumerate(diverged) if c not in complete)
    ranked += [(c, None, None) for _, c in with_divergence]
    lead, error = _compute_lead(effects, order)
    return Comparison(
        standings=tuple(
            CandidateStatus(
                candidate=c,
                num_repeats=counts[c],
                num_diverged=diverged[c],
                mean_nats=mean,
                standard_error_nats=standard_error,
            )
            for c, mean, standard_error in ranked
        ),
        paired=effects.paired,
        lead_nats=lead,
        lead_standard_error_nats=error,
    )


def _compute_lead(effects: _Effects, order: Sequence[int]) -> tuple[float | None, float | None]:
    """Return the best candidate's lead over the second with its standard error, in nats."""
    if len(order) < 2:
        return None, None
    first, second = order[:2]
    lead = float(effects.means[second] - effects.means[first])
    covariance = effects.covariance
    if covariance is None:
        return lead, None
    variance = covariance[first, first] + covariance[second, second] - 2 * covariance[first, second]
    return lead, float(np.sqrt(max(variance, 0.0)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One candidate's mean minus another's, in nats, with its interval."""

    value: float
    low: float
    high: float
    noise: float
    """Standard deviation of one run in nats; without the seed's effect if seeds have one."""


def compute_difference(
    table: Sequence[tuple[int, int, float]], first: int, second: int, level: float
) -> Difference | None:
    """Return the second candidate's mean minus the first's with its interval; None if the noise
    cannot be estimated.

    Args:
        table: candidate, repeat and loss of every run; noise is pooled over all candidates.
        first: a candidate, 0, 1 ...
        second: another candidate.
        level: level of the interval, from Student's t.
    """
    from scipy.special import stdtrit

    num_candidates = 1 + max((c for c, _, _ in table), default=0)
    effects = _fit_effects(table, num_candidates)
    if effects.covariance is None or {first, second} - {c for c, _, _ in table}:
        return None
    contrast = np.zeros(num_candidates)
    contrast[[first, second]] = -1.0, 1.0
    value = float(contrast @ effects.means)
    half_width = float(stdtrit(effects.num_free, (1 + level) / 2)) * float(
        np.sqrt(contrast @ effects.covariance @ contrast)
    )
    return Difference(
        value=value, low=value - half_width, high=value + half_width, noise=effects.noise
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Effects:
    """Least-squares fit of the candidates' effects, or of these and the seeds' effects."""

    means: Floats
    covariance: Floats | None = None
    """Covariance of the means; None without a degree of freedom."""
    paired: bool = False
    """Whether the seeds' effects were removed."""
    noise: float = 0.0
    """Standard deviation of the residuals."""
    num_free: int = 0
    """Degrees of freedom of the noise."""


def _fit_effects(table: Sequence[tuple[int, int, float]], num_candidates: int) -> _Effects:
    """Fit the effects of the candidates, and those of the seeds too if they are significant."""
    from scipy.special import fdtrc

    if not table:
        return _Effects(means=np.zeros(0))
    candidates, seeds = np.array([c for c, _, _ in table]), np.array([k for _, k, _ in table])
    loss_R = np.array([loss for _, _, loss in table])
    design = (candidates[:, None] == np.arange(num_candidates)).astype(float)
    num_seeds = int(seeds.max()) + 1
    # The seeds' effects add up to 0, so that a candidate's effect is its mean over all seeds.
    seed_effects = (seeds[:, None] == np.arange(num_seeds - 1)).astype(float) - (
        seeds == num_seeds - 1
    )[:, None]
    paired_design = np.hstack([design, seed_effects])
    means, residual, num_free = _solve_least_squares(design, loss_R)
    paired_means, paired_residual, paired_free = _solve_least_squares(paired_design, loss_R)
    # F test of the seeds' effects
    num_added = num_free - paired_free  # parameters of the seeds' effects
    if paired_free > 0 and num_added > 0 and paired_residual > 0:
        f_ratio = (residual - paired_residual) / num_added / (paired_residual / paired_free)
        if fdtrc(num_added, paired_free, f_ratio) < PAIRED_LEVEL:
            noise = paired_residual / paired_free
            covariance = (
                noise
                * np.linalg.pinv(paired_design.T @ paired_design)[:num_candidates, :num_candidates]
            )
            return _Effects(
                means=paired_means[:num_candidates],
                covariance=covariance,
                paired=True,
                noise=noise**0.5,
                num_free=paired_free,
            )
    # Without the seeds' effects: the noise from the candidates' residuals
    if num_free <= 0:
        return _Effects(means=means)
    noise = residual / num_free
    covariance = noise * np.linalg.pinv(design.T @ design)
    return _Effects(means=means, covariance=covariance, noise=noise**0.5, num_free=num_free)


def _solve_least_squares(design: Floats, loss_R: Floats) -> tuple[Floats, float, int]:
    """Return the solution, the sum of squared residuals, and the degrees of freedom."""
    result, _, rank, _ = np.linalg.lstsq(design, loss_R, rcond=None)
    solution: Floats = np.asarray(result, dtype=np.float64)
    residual = float(((loss_R - design @ solution) ** 2).sum())
    return solution, residual, len(loss_R) - int(rank)
