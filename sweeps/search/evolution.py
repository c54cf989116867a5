"""CMA-ES (Hansen 2016), begun at the best of the design (Nomura 2021), begun again with twice the trials once it has
converged (IPOP: Auger, Hansen 2005). The door to `cmaes`.

Its state follows from points and outcomes in index order: it is kept from one suggestion to the next, and made again
from the first after a resume. Trials in flight are draws of a generation as any other.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sweeps.search.past import PENALTY_MARGIN_NATS, Past, quasi_random, seed_of
from sweeps.search.space import Params

if TYPE_CHECKING:
    import cmaes
    import numpy as np
    from numpy.typing import NDArray

SOURCE_SHARE = 0.1
"""Of the design, the best: what it begins around. One trial at least."""
RESTART_SIGMA = 1 / 6
"""Of each axis's range: where it begins again, about a point of the design's sequence."""
RESTART_FACTOR = 2


class Evolution:
    """CMA-ES on one search's past, on the axes that vary, each as a share of its range."""

    def __init__(self, past: Past) -> None:
        """Raises ValueError where an axis is no range."""
        self._past = past
        self._axes = [axis for axis in past.space.axes if not axis.fixed]
        if unknown := [axis.name for axis in past.space.axes if axis.choices or axis.can_be_off]:
            raise ValueError(f"cmaes knows ranges alone: {', '.join(unknown)} has choices, or can be off")
        # A generation smaller than what is in flight would be over before its last trials were asked for.
        self._size = max(4 + int(3 * math.log(max(len(self._axes), 1))), past.parallelism)
        self._optimizer: cmaes.CMA | None = None
        self._drawn: list[int] = []  # trials of this generation
        self._next, self._num_seen, self._worst = 0, 0, 0.0

    def ask(self) -> Params:
        """The next point, once `past` has seen what it may."""
        past = self._past
        while self._next <= past.index:
            self._step(self._next)
            self._next += 1
        if self._optimizer is None:
            raise ValueError(f"suggestion {past.index}: CMA-ES wants an outcome first")
        self._optimizer.reseed_rng(past.seed)
        shares = dict(zip((axis.name for axis in self._axes), self._optimizer.ask().tolist(), strict=True))
        return past.space.at([shares.get(axis.name, 0.5) for axis in past.space.axes])

    def _step(self, index: int) -> None:
        """The state in which trial `index` is asked for, from that of the trial before."""
        past = self._past
        for seen in range(self._num_seen, past.num_seen(index)):
            self._worst = max(self._worst, past.losses[seen] or 0.0)
        self._num_seen = max(self._num_seen, past.num_seen(index))
        if self._optimizer is None:
            if index < past.num_startup or self._num_seen < 1:
                return
            self._optimizer = self._begun(index)
        ended = [trial for trial in self._drawn if trial < self._num_seen][: self._size]
        if len(ended) == self._size:
            self._optimizer.tell([self._solution(trial) for trial in ended])
            self._drawn = []
            if self._optimizer.should_stop():
                self._size *= RESTART_FACTOR
                self._optimizer = self._restarted(index)
        self._drawn.append(index)

    def _begun(self, index: int) -> cmaes.CMA:
        """At the best of the design."""
        import cmaes  # 0.1 s, and only this sampler needs it

        source = [self._solution(trial) for trial in range(self._num_seen)]
        mean, sigma, covariance = cmaes.get_warm_start_mgd(source, gamma=max(SOURCE_SHARE, 1 / len(source)))
        return self._made(index, mean, sigma, covariance)

    def _restarted(self, index: int) -> cmaes.CMA:
        import numpy as np

        mean = np.array(quasi_random(self._past.study_seed, index, len(self._axes)))
        return self._made(index, mean, RESTART_SIGMA, None)

    def _made(
        self, index: int, mean: NDArray[np.float64], sigma: float, covariance: NDArray[np.float64] | None
    ) -> cmaes.CMA:
        import cmaes
        import numpy as np

        bounds = np.tile([0.0, 1.0], (len(self._axes), 1))
        return cmaes.CMA(
            mean=mean, sigma=sigma, cov=covariance, bounds=bounds, seed=seed_of(self._past.study_seed, index),
            n_max_resampling=10 * len(self._axes), population_size=self._size,
        )  # fmt: skip

    def _solution(self, trial: int) -> tuple[NDArray[np.float64], float]:
        import numpy as np

        point, loss = self._past.points[trial], self._past.losses[trial]
        shares = np.array([axis.share(point[axis.name]) for axis in self._axes])
        return shares, self._worst + PENALTY_MARGIN_NATS if loss is None else loss
