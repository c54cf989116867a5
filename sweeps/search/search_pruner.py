"""A search's own pruning: which of its trials a decision looks at, and what their sampler is told of those given up.

Trial k is held against trials 0 ... k-P alone, which had all ended before k was suggested, in index order (P: trials in
flight). So a decision depends on no timing, and a resumed search decides as the uninterrupted one would have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proxies.core.spec import RunResult
from sweeps.search.pruning import MOST_SEEN, PrunerName, Seen, rungs, told_nats, verdict
from sweeps.search.space import Params, SearchSpace
from sweeps.store.curves import load_curve
from sweeps.store.errors import CurveCorrupt


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trial:
    index: int
    point: Params
    num_seen: int
    whole: bool


class SearchPruner:
    """See `source.Pruner`. The source says which trials begin, and takes in those that have ended, by index."""

    def __init__(
        self,
        name: PrunerName,
        space: SearchSpace,
        study_dir: Path,
        *,
        study_seed: int,
        num_steps: int,
        parallelism: int,
        num_startup: int,
    ) -> None:
        """A pruner that has seen nothing.

        Args:
            name: of the rule, in `sweeps.search.pruning`.
            space: as it is now.
            study_dir: where the curves lie.
            study_seed: of the whole search.
            num_steps: of every trial.
            parallelism: trials in flight at once.
            num_startup: finished trials that must have been seen before any is given up.
        """
        self._name: PrunerName = name
        self._space, self._study_dir, self._study_seed = space, study_dir, study_seed
        self._num_steps, self._parallelism, self._num_startup = num_steps, parallelism, num_startup
        self._rungs = rungs(name, num_steps)
        self._seen: list[Seen] = []
        self._trials: dict[str, _Trial] = {}

    def begin(self, run_id: str, index: int, point: Params, *, num_seen: int, whole: bool) -> None:
        """A trial is given out; two may be one run, of which the first counts.

        Args:
            run_id: of its run.
            index: the trial, from 0.
            point: its values.
            num_seen: trials that it is held against, the first ones; all of them have been taken in.
            whole: whether it is to be run to its end, whatever it loses.
        """
        self._trials.setdefault(run_id, _Trial(index=index, point=point, num_seen=num_seen, whole=whole))

    def take_in(self, point: Params, result: RunResult) -> float | None:
        """Look at the next trial by index, which has ended; the loss that the sampler is told, None if it diverged.

        Raises:
            CurveCorrupt: no decision can be what it would have been.
        """
        try:
            losses_nats = load_curve(self._study_dir, result).train_loss_nats
        except CurveCorrupt as error:
            raise CurveCorrupt(
                f"{error}. What the search does next depends on it: without a copy, `forerun run PLAN --study ANOTHER "
                f"--fork {self._study_dir}` keeps what ended, and runs this again"
            ) from error
        told = result.loss_nats
        if result.status == "pruned":
            told = told_nats(
                self._name, space=self._space, point=point, num_steps=self._num_steps, losses_nats=losses_nats,
                seen=self._seen,
            )  # fmt: skip
        self._seen.append(Seen(point=point, status=result.status, losses_nats=losses_nats, loss_nats=result.loss_nats))
        old = len(self._seen) - self._parallelism - MOST_SEEN - 1
        if old >= 0:  # no trial in flight is held against its curve any more, and ten thousand of them take room
            self._seen[old] = dataclasses.replace(self._seen[old], losses_nats=())
        return told

    def rungs(self, run_id: str) -> tuple[int, ...]:
        """See `sweeps.search.source.Pruner`."""
        return () if self._trials[run_id].whole else self._rungs

    def verdict(self, run_id: str, losses_nats: Sequence[float]) -> str:
        """See `sweeps.search.source.Pruner`."""
        trial = self._trials[run_id]
        return verdict(
            self._name, space=self._space, study_seed=self._study_seed, index=trial.index, point=trial.point,
            num_steps=self._num_steps, losses_nats=losses_nats, seen=self._seen[: trial.num_seen],
            num_startup=self._num_startup,
        )  # fmt: skip
