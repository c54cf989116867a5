"""Repeats of the best trials with other seeds: where to spend them, and which trial they choose.

Runs are given where the choice of the best is most in doubt: OCBA (Chen, Lin, Yucesan, Chick 2000),
in rounds, each a pure function of the outcomes of those before it. Candidates are compared seed by
seed where the seeds matter: trials of one seed have the same initial values and the same data in
the same order (common random numbers).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

FIRST_ROUND = 2
"""Repeats of every candidate, before anything is known of their noise."""
MOST_CANDIDATES = 6
PAIRED_LEVEL = 0.1
"""Seeds count as common random numbers where an F test of their effect says so at this level."""


Outcomes = Mapping[tuple[int, int], float | None]
"""Loss in nats by candidate and repeat, None where it diverged; what has no outcome yet is not
there."""


def num_candidates(num_replicates: int, num_finished: int) -> int:
    """How many of the best trials are repeated: half of the repeats at most are spent before
    anything is known.
    """
    return min(max(2, num_replicates // (2 * FIRST_ROUND)), MOST_CANDIDATES, num_finished)


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateStatus:
    """A candidate after its repeats."""

    candidate: int
    num_repeats: int
    num_diverged: int
    mean_nats: float | None
    """Over its repeats; seed by seed, as if each candidate had had every seed. None where one
    diverged."""
    standard_error_nats: float | None
    """The mean's standard error; None where there is no noise to tell it by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What the repeats say."""

    standings: tuple[CandidateStatus, ...]
    """The best first; those that diverged with another seed last."""
    paired: bool
    lead_nats: float | None
    """By which the runner-up loses; None without one."""
    lead_standard_error_nats: float | None


def replicates(
    num_of_candidates: int, num_replicates: int, round_size: int, outcomes: Outcomes
) -> list[int]:
    """Repeats of each candidate that are asked for, as far as outcomes tell: each candidate's first
    so many.

    Args:
        num_of_candidates: C, the best trial first.
        num_replicates: in all, at most.
        round_size: given out at once, after the first round.
        outcomes: so far.
    """
    counts = [0] * num_of_candidates
    for number in range(min(num_replicates, FIRST_ROUND * num_of_candidates)):
        counts[number % num_of_candidates] += 1
    while all((c, k) in outcomes for c, count in enumerate(counts) for k in range(count)):
        left = min(num_replicates - sum(counts), round_size)
        if left <= 0:
            break
        more = _allocated(counts, compare(counts, outcomes), left)
        if not any(more):
            break
        counts = [count + extra for count, extra in zip(counts, more, strict=True)]
    return counts


def _allocated(counts: Sequence[int], known: Comparison, number: int) -> list[int]:
    """The next repeats by OCBA: to a rival as the inverse square of its distance, to the best the
    root of their sum.

    The noise is taken to be one and the same. A distance below its own standard error counts as
    that: no repeat would ever go elsewhere.
    """
    fit = [s for s in known.standings if s.mean_nats is not None]
    if len(fit) < 2:
        return [0] * len(counts)
    best, spent = fit[0], np.array(counts, dtype=float)
    floor = max(known.lead_standard_error_nats or 0.0, 1e-12)
    weights = np.zeros(len(counts))
    for rival in fit[1:]:
        assert rival.mean_nats is not None and best.mean_nats is not None
        weights[rival.candidate] = max(rival.mean_nats - best.mean_nats, floor) ** -2.0
    weights[best.candidate] = float(np.sqrt((weights**2).sum()))
    total = spent[weights > 0].sum() + number
    wanted = weights / weights.sum() * total
    more = [0] * len(counts)
    for _ in range(number):
        lacking = np.where(weights > 0, wanted - spent - more, -np.inf)
        more[int(np.argmax(lacking))] += 1  # of equals, the first
    return more


def compare(counts: Sequence[int], outcomes: Outcomes) -> Comparison:
    """The candidates by what their repeats lost. Every repeat counted must have an outcome.

    Means are least squares on a candidate's effect, or on that and the seed's where seeds matter;
    noise is pooled. The loss by which a candidate was picked is no repeat, and not counted: it is
    low by luck.
    """
    rows = [(c, k, outcomes[c, k]) for c, count in enumerate(counts) for k in range(count)]
    diverged = [
        sum(loss is None for c, _, loss in rows if c == candidate)
        for candidate in range(len(counts))
    ]
    sound = [c for c, count in enumerate(counts) if count and not diverged[c]]
    table = [(sound.index(c), k, loss) for c, k, loss in rows if c in sound and loss is not None]
    found = _effects(table, len(sound))
    means, covariance = found.means, found.covariance
    order = sorted(range(len(sound)), key=lambda i: (means[i], i))
    standings = [
        CandidateStatus(
            candidate=sound[i],
            num_repeats=counts[sound[i]],
            num_diverged=0,
            mean_nats=float(means[i]),
            standard_error_nats=None if covariance is None else float(np.sqrt(covariance[i, i])),
        )
        for i in order
    ]
    lost = sorted((d, c) for c, d in enumerate(diverged) if c not in sound)
    standings += [
        CandidateStatus(
            candidate=c,
            num_repeats=counts[c],
            num_diverged=d,
            mean_nats=None,
            standard_error_nats=None,
        )
        for d, c in lost
    ]
    lead = error = None
    if len(order) > 1:
        first, second = order[:2]
        lead = float(means[second] - means[first])
        if covariance is not None:
            variance = (
                covariance[first, first]
                + covariance[second, second]
                - 2 * covariance[first, second]
            )
            error = float(np.sqrt(max(variance, 0.0)))
    return Comparison(
        standings=tuple(standings),
        paired=found.paired,
        lead_nats=lead,
        lead_standard_error_nats=error,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """By how much one candidate's mean is above another's."""

    value: float
    low: float
    high: float
    noise: float
    """Standard deviation of one run, less what its seed brings where seeds matter."""


def difference(
    table: Sequence[tuple[int, int, float]], first: int, second: int, level: float
) -> Difference | None:
    """The second candidate's mean above the first's with its interval; None where there is no noise
    to tell it by.

    Args:
        table: candidate, repeat and loss of every run; noise is pooled over all candidates.
        first: a candidate, 0, 1 ...
        second: another.
        level: of the interval, of Student's t.
    """
    from scipy.special import stdtrit

    number = 1 + max((c for c, _, _ in table), default=0)
    found = _effects(table, number)
    if found.covariance is None or {first, second} - {c for c, _, _ in table}:
        return None
    contrast = np.zeros(number)
    contrast[[first, second]] = -1.0, 1.0
    value = float(contrast @ found.means)
    half = float(stdtrit(found.num_free, (1 + level) / 2)) * float(
        np.sqrt(contrast @ found.covariance @ contrast)
    )
    return Difference(value=value, low=value - half, high=value + half, noise=found.noise)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Effects:
    """Least squares on candidates, or on candidates and seeds."""

    means: Floats
    covariance: Floats | None = None
    """None without a degree of freedom."""
    paired: bool = False
    """Whether seeds were taken out."""
    noise: float = 0.0
    num_free: int = 0


def _effects(table: Sequence[tuple[int, int, float]], number: int) -> _Effects:
    from scipy.special import fdtrc

    if not table:
        return _Effects(means=np.zeros(0))
    who, seeds = np.array([c for c, _, _ in table]), np.array([k for _, k, _ in table])
    loss_R = np.array([loss for _, _, loss in table])
    plain = (who[:, None] == np.arange(number)).astype(float)
    num_seeds = int(seeds.max()) + 1
    # Effects of seeds add up to 0, so that a candidate's is its mean over all of them.
    seed_effects = (seeds[:, None] == np.arange(num_seeds - 1)).astype(float) - (
        seeds == num_seeds - 1
    )[:, None]
    both = np.hstack([plain, seed_effects])
    alone, rest_alone, free_alone = _least_squares(plain, loss_R)
    paired, rest_paired, free_paired = _least_squares(both, loss_R)
    gained = free_alone - free_paired
    if free_paired > 0 and gained > 0 and rest_paired > 0:
        ratio = (rest_alone - rest_paired) / gained / (rest_paired / free_paired)
        if fdtrc(gained, free_paired, ratio) < PAIRED_LEVEL:
            noise = rest_paired / free_paired
            covariance = noise * np.linalg.pinv(both.T @ both)[:number, :number]
            return _Effects(
                means=paired[:number],
                covariance=covariance,
                paired=True,
                noise=noise**0.5,
                num_free=free_paired,
            )
    if free_alone <= 0:
        return _Effects(means=alone)
    noise = rest_alone / free_alone
    covariance = noise * np.linalg.pinv(plain.T @ plain)
    return _Effects(means=alone, covariance=covariance, noise=noise**0.5, num_free=free_alone)


def _least_squares(design: Floats, loss_R: Floats) -> tuple[Floats, float, int]:
    """Solution, sum of squared residuals, degrees of freedom."""
    solution, _, rank, _ = np.linalg.lstsq(design, loss_R, rcond=None)
    found: Floats = np.asarray(solution, dtype=np.float64)
    return found, float(((loss_R - design @ found) ** 2).sum()), len(loss_R) - int(rank)
