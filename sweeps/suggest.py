"""What to try next: a pure function of what came before.

Suggestion k sees the outcomes of trials 0 ... k-P alone (P: trials in flight at once, from the plan) and the
points, not the outcomes, of the P-1 between. So it does not depend on which of those finished first, and a
resumed search suggests exactly what the uninterrupted one would have.

Samplers that learn begin with a quasi-random design (`sweeps.design`); `sweeps.samplers` has them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sweeps.design import quasi_random
from sweeps.past import Past
from sweeps.samplers import LEARNING, Asker, Sampler, asker
from sweeps.space import Params, SearchSpace

DEFAULT_NUM_STARTUP = 10  # TPE's own default: before it, densities are mostly prior


class Search:
    """One search as its trials come: what is kept between suggestions is only what any one of them would work out."""

    def __init__(
        self,
        space: SearchSpace,
        study_seed: int,
        parallelism: int,
        *,
        sampler: Sampler = "tpe",
        num_startup: int = DEFAULT_NUM_STARTUP,
        num_known: int = 0,
    ) -> None:
        """A search of which no trial is known yet.

        Args:
            space: the axes.
            study_seed: of the whole search.
            parallelism: P >= 1; trials that may be in flight at once.
            sampler: see `sweeps.samplers`.
            num_startup: trials of the quasi-random design.
            num_known: trials that had all ended before the next was asked for, as the search went on beyond its end.

        Raises:
            ValueError: an argument out of range.
        """
        if parallelism < 1:
            raise ValueError(f"parallelism = {parallelism}: parallelism >= 1 is wanted")
        self._past = Past(
            space=space, study_seed=study_seed, parallelism=parallelism, num_startup=num_startup, num_known=num_known
        )
        self._sampler: Sampler = sampler
        self._asker: Asker | None = None

    @property
    def points(self) -> Sequence[Params]:
        """Of the trials so far, by index."""
        return self._past.points

    @property
    def num_seen(self) -> int:
        """Outcomes that the next suggestion sees: those of the first trials."""
        return self._past.num_seen(self._past.index)

    def add(self, point: Params) -> None:
        """The next trial's point, as recorded; wherever it came from."""
        self._past.points.append(point)

    def suggest(self, told: Mapping[int, float | None]) -> Params:
        """The next trial's point; it is not added.

        Args:
            told: loss in nats of each trial by index, None where it diverged; trials in flight are not looked at, nor
                is what an earlier suggestion saw looked at again.

        Raises:
            ValueError: an outcome that is wanted is missing.
        """
        past = self._past
        if self._sampler in LEARNING:
            if past.index < past.num_startup or self.num_seen < 1:
                return past.space.at(quasi_random(past.study_seed, past.index, past.space.num_coordinates))
            past.see(told)
        if self._asker is None:
            self._asker = asker(self._sampler, past)
        return self._asker.ask()
