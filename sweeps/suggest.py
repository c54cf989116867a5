"""What to try next: a pure function of what came before.

Suggestion k sees the outcomes of trials 0 ... k-P alone (P: trials in flight at once, from the plan) and the
points, not the outcomes, of the P-1 between. So it does not depend on which of those finished first, and a
resumed search suggests exactly what the uninterrupted one would have.

Samplers that learn begin with a quasi-random design (`sweeps.design`); `sweeps.samplers` has them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sweeps.design import quasi_random
from sweeps.samplers import LEARNING, Past, Sampler, ask
from sweeps.space import Params, SearchSpace

DEFAULT_NUM_STARTUP = 10  # TPE's own default: before it, densities are mostly prior


def suggest(
    space: SearchSpace,
    study_seed: int,
    index: int,
    told: Mapping[int, float | None],
    parallelism: int,
    *,
    sampler: Sampler = "tpe",
    num_startup: int = DEFAULT_NUM_STARTUP,
    earlier: Sequence[Params] = (),
    num_known: int = 0,
) -> Params:
    """The point of trial `index` (from 0).

    Args:
        space: the axes.
        study_seed: of the whole search.
        index: the trial, from 0.
        told: loss in nats of each trial by index, None where it diverged; trials after `index - parallelism`
            are not looked at, unless they are among the first `num_known`.
        parallelism: P >= 1; trials that may be in flight at once.
        sampler: see `sweeps.samplers`.
        num_startup: trials of the quasi-random design.
        earlier: points 0, 1, ... already suggested, as recorded. What lacks is computed again, in this space: only a
            cache, but for points that did not come from here.
        num_known: trials that had all ended before this one was asked for, as the search went on beyond its end.

    Raises:
        ValueError: an argument out of range, or an outcome that is wanted is missing.
    """
    if index < 0 or parallelism < 1:
        raise ValueError(f"index = {index}, parallelism = {parallelism}: index >= 0 and parallelism >= 1 are wanted")
    points = list(earlier[:index])
    while len(points) <= index:
        past = Past(space, study_seed, points, told, parallelism, num_startup, num_known)
        points.append(_suggest(past, sampler))
    return points[index]


def _suggest(past: Past, sampler: Sampler) -> Params:
    """The point after those of `past`."""
    early = past.index < past.num_startup or past.num_seen(past.index) < 1
    if sampler in LEARNING and early:
        return past.space.at(quasi_random(past.study_seed, past.index, past.space.num_coordinates))
    return ask(sampler, past)
