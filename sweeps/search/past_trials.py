"""The past trials of a search, from which a sampler suggests the next point.

The next point depends only on the plan, the recorded points, and the recorded outcomes. The past
trials are updated trial by trial and never computed again, so a suggestion costs the same at the
ten-thousandth trial. The module also computes the quasi-random points and the seeds, which depend
on the plan alone.
This module needs no third-party package.
"""

from __future__ import annotations

import array
import bisect
import hashlib
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from forerun._proxies.core import canon
from forerun._sweeps.search.space import Params, SearchSpace

PENALTY_MARGIN_NATS = 1.0
"""Loss in nats that a diverged trial is given above the worst finished trial.

TPE uses only ranks, so any value does; for a GP, 0 and 1 worked equally well.
"""
DEFAULT_NUM_STARTUP = 10
"""Number of startup trials; TPE's own default, since with fewer trials its densities are mostly
prior."""
NUM_BEST_TRIALS = 25
"""Number of best trials that are always shown to a sampler: TPE regards at most this many
as good.
"""


class Points:
    """Points of one space, stored as plain numbers: dictionaries for 30,000 points would take ten
    times the memory.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        """Store the names of the axes."""
        self._names = names
        self._values = array.array("d")

    def __len__(self) -> int:
        return len(self._values) // len(self._names)

    def __getitem__(self, index: int) -> Params:
        start = range(len(self))[index] * len(self._names)
        return dict(zip(self._names, self._values[start : start + len(self._names)], strict=True))

    def append(self, point: Params) -> None:
        """Add a point."""
        self._values.extend(point[name] for name in self._names)


@dataclass(slots=True, eq=False)
class PastTrials:
    """The points of all trials so far, and the outcomes of the first `num_seen` trials, by index.

    The next suggestion uses these outcomes and no later ones, even if later trials have ended, so
    that it does not depend on the timing of trials in flight.

    Raises:
        ValueError: `parallelism` is below 1.
    """

    space: SearchSpace
    study_seed: int
    """Seed of the whole search."""
    parallelism: int
    """P, the number of trials that may be in flight at once."""
    _: KW_ONLY
    num_startup: int = DEFAULT_NUM_STARTUP
    """Number of trials of the quasi-random design."""
    num_known: int = 0
    """Number of trials of an earlier search that this one continues. All of them had ended before
    this search made its first suggestion.
    """
    points: Points = field(init=False)
    """Points of the trials so far, by index."""
    losses: list[float | None] = field(default_factory=list, init=False)
    """Losses in nats of the trials seen, by index; None if a trial diverged."""
    best: list[tuple[float, int]] = field(default_factory=list, init=False)
    """(loss, index) of the `NUM_BEST_TRIALS` best trials seen. Of equal losses, the earlier trial
    is first; a diverged trial has an infinite loss.
    """
    worst: float = field(default=0.0, init=False)
    """Highest finite loss seen, in nats; 0 before there is one."""

    def __post_init__(self) -> None:
        if self.parallelism < 1:
            raise ValueError(f"parallelism = {self.parallelism}: must be at least 1")
        self.points = Points(self.space.names)

    @property
    def index(self) -> int:
        """Index of the trial to suggest next."""
        return len(self.points)

    @property
    def seed(self) -> int:
        """Seed of this suggestion."""
        return derive_seed(self.study_seed, self.index)

    @property
    def num_seen(self) -> int:
        """Number of trials, from the first on, whose outcomes the next suggestion uses."""
        known = self.num_known if self.index >= self.num_known else 0
        return max(self.index - self.parallelism + 1, known, 0)

    def add_point(self, point: Params) -> None:
        """Add the next trial's point as recorded, whatever its origin."""
        self.points.append(point)

    def add_outcomes(self, outcomes: Mapping[int, float | None]) -> None:
        """Add the outcomes that the next suggestion is the first to use.

        Args:
            outcomes: loss in nats by trial index, None if the trial diverged. Outcomes that were
                added before, or that the next suggestion must not use, are ignored.

        Raises:
            ValueError: an outcome is missing or not finite.
        """
        new_indices = range(len(self.losses), self.num_seen)
        if missing := [index for index in new_indices if index not in outcomes]:
            raise ValueError(
                f"suggestion {self.index} at parallelism {self.parallelism} needs the outcomes of "
                f"trials {missing}"
            )
        for index in new_indices:
            loss = outcomes[index]
            if loss is not None and not math.isfinite(loss):
                raise ValueError(
                    f"the loss of trial {index} is {loss}: it must be finite, or None if the trial "
                    "diverged"
                )
            self.losses.append(loss)
            bisect.insort(self.best, (math.inf if loss is None else loss, index))
            del self.best[NUM_BEST_TRIALS:]
            self.worst = max(self.worst, loss) if loss is not None else self.worst

    def choose_shown(self, max_trials: int) -> list[int]:
        """Return the indices, in order, of the trials that a sampler is shown: the best, and the
        latest of the others.

        Args:
            max_trials: maximum number of trials; above `NUM_BEST_TRIALS`.
        """
        latest = len(self.losses)
        shown = {index for _, index in self.best}
        while latest > 0 and len(shown) < max_trials:
            latest -= 1
            shown.add(latest)
        return sorted(shown)

    def get_penalized_loss(self, index: int) -> float:
        """Return the loss of a trial that was seen; for a diverged one, a finite loss worse than
        that of every finished trial.

        A NaN or a failure would hide the trial from the sampler.
        """
        loss = self.losses[index]
        return self.worst + PENALTY_MARGIN_NATS if loss is None else loss


def compute_quasi_random_point(study_seed: int, index: int, dimension: int) -> list[float]:
    """Return element `index` of the R_d sequence (M. Roberts 2018), shifted by the seed.

    Returns:
        `dimension` coordinates in [0, 1).
    """
    ratio = _compute_positive_root(dimension)
    # Negative indices: no trial uses these seeds
    shifts = [derive_seed(study_seed, -1 - axis) / 2**32 for axis in range(dimension)]
    return [(shift + (index + 1) * ratio ** -(axis + 1)) % 1.0 for axis, shift in enumerate(shifts)]


def _compute_positive_root(dimension: int) -> float:
    """Compute the root > 1 of x^(d+1) = x + 1, by the contraction x <- (1 + x)^(1/(d+1))."""
    root = 1.5
    for _ in range(64):  # Each iteration at least halves the error, to the precision of a float
        root = (1 + root) ** (1 / (dimension + 1))
    return root


def derive_seed(study_seed: int, index: int) -> int:
    """Return a 32-bit seed: the first bytes of a hash of the study's seed and an index.

    Samplers are created anew for each suggestion. With the study's seed alone, they would draw the
    same random numbers, and so suggest the same point, again and again.
    """
    return int.from_bytes(
        hashlib.sha256(canon.to_canonical_json([study_seed, index]).encode()).digest()[:4], "big"
    )
