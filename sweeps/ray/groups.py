"""Where on a Ray cluster actors sit: shares of GPUs dealt out evenly, and the ranks of one worker side by side.

Ray by itself puts shares of GPUs together: four actors of a quarter each all sit on the node's first GPU. So there is a
placement group for each GPU that is shared, and one for each worker of several ranks. Ray itself comes in as an
argument, from its one door (`sweeps.ray.pool`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from proxies.core.failures import CAUSES
from sweeps.ray.nodes import Place, devices, node_room
from sweeps.run.pool import Report

LAST_WORDS_SECONDS = 2.0
"""For the other ranks of a worker to fail too, once one has: theirs may be the better reason."""

_APART = 0.5001  # of a GPU, the least that cannot lie on one with another: Ray counts in 1/10,000

Spots = list[list[Any]]
"""By worker and rank: a scheduling strategy of Ray's."""


def on_one_node(resources: Mapping[str, Mapping[str, float]], place: Place) -> bool:
    """Whether the ranks of a worker go to one node: where there is one that holds them."""
    return any(node_room(node, place) >= place.num_ranks for node in resources.values())


def dealt(resources: Mapping[str, Mapping[str, float]], place: Place, num_workers: int) -> list[tuple[str, float, int]]:
    """Workers with a share of a GPU each, dealt out one by one: no GPU has two before every one has one.

    Args:
        resources: node id -> resource -> amount.
        place: what a worker takes.
        num_workers: there is room for so many.

    Returns:
        (node id, share of its GPU to take, workers on it) of every GPU that gets any.
    """
    gpus = [(node, part) for node, has in resources.items() for part in devices(has)]
    counts, left = [0] * len(gpus), num_workers
    room = {node: node_room(has, place) for node, has in resources.items()}
    while left:
        before = left
        for index, (node, part) in enumerate(gpus):
            if left and room[node] and (counts[index] + 1) * place.gpu_share <= part + 1e-9:
                counts[index], room[node], left = counts[index] + 1, room[node] - 1, left - 1
        if left == before:
            raise ValueError(f"there is no room for {left} of {num_workers} workers")
    several = {node for node, has in resources.items() if len(devices(has)) > 1}
    return [
        (node, max(count * place.gpu_share, _APART if node in several and part == 1 else 0.0), count)
        for (node, part), count in zip(gpus, counts, strict=True)
        if count
    ]


def reserved(
    ray: Any, resources: Mapping[str, Mapping[str, float]], place: Place, num_workers: int, look: Callable[[], None]
) -> Spots:
    """Have Ray keep the places of all actors, in placement groups that end with this driver.

    Args:
        ray: the module, connected.
        resources: node id -> resource -> amount, of the nodes to use.
        place: what an actor takes.
        num_workers: there is room for so many.
        look: called each second while Ray makes the room: raises what ends that.
    """
    if place.num_ranks > 1:
        strategy = "STRICT_PACK" if on_one_node(resources, place) else "PACK"
        groups = [_group(ray, [place.needs] * place.num_ranks, strategy) for _ in range(num_workers)]
        spots = [[_spot(ray, group, rank) for rank in range(place.num_ranks)] for group in groups]
    elif place.shares_gpus:
        groups, rounds = [], []
        for node, share, count in dealt(resources, place, num_workers):
            bundle = {name: amount * count for name, amount in place.needs.items()} | {"GPU": share}
            bundle = {name: counted(amount) for name, amount in bundle.items()}
            groups.append(_group(ray, [bundle], "STRICT_PACK", node))
            rounds += [(turn, len(groups) - 1) for turn in range(count)]
        spots = [[_spot(ray, groups[index], 0)] for _, index in sorted(rounds)]
    else:
        return [["DEFAULT"] for _ in range(num_workers)]
    for group in groups:
        while not group.wait(timeout_seconds=1.0):
            look()
    return spots


def counted(amount: float) -> float:
    """An amount that Ray, which cuts off what is below 1/10,000, counts as it is: 3 * 0.7 is a little under 2.1."""
    exact = round(amount, 4)
    return exact if exact.is_integer() else exact + 0.2e-4


def _group(ray: Any, bundles: list[dict[str, float]], strategy: str, node: str | None = None) -> Any:
    return ray.util.placement_group(bundles, strategy=strategy, _soft_target_node_id=node)


def _spot(ray: Any, group: Any, bundle: int) -> Any:
    return ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)


class Calls:
    """Calls in flight, and the answers of ranks whose worker has not answered yet."""

    def __init__(self, num_ranks: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`num_ranks`: of every worker. `clock`: monotonic seconds."""
        self._num_ranks, self._clock = num_ranks, clock
        self._pending: dict[Any, tuple[int, int]] = {}
        self._answers: dict[int, dict[int, Report]] = {}
        self._failed_at: dict[int, float] = {}

    @property
    def pending(self) -> list[Any]:
        """What is waited for."""
        return list(self._pending)

    def begin(self, reference: Any, worker: int, rank: int) -> None:
        """A rank has been called."""
        self._pending[reference] = (worker, rank)

    def ended(self, reference: Any) -> tuple[int, int]:
        """The worker and the rank whose call has ended."""
        return self._pending.pop(reference)

    def answered(self, rank: int, report: Report) -> None:
        """What came of it."""
        self._answers.setdefault(report.worker, {})[rank] = report
        if report.error is not None:
            self._failed_at.setdefault(report.worker, self._clock())

    def over(self) -> list[Report]:
        """A report of every worker whose ranks have all answered; or one has failed, and the others had their time.

        Rank 0's counts if all went well, else the failure that explains the others: where one rank dies, or is out of
        memory, the others fail too, waiting for it, with an `error` that says less.
        """
        reports = []
        for worker, answers in list(self._answers.items()):
            late = self._clock() - self._failed_at.get(worker, math.inf) > LAST_WORDS_SECONDS
            if late or len(answers) == self._num_ranks:
                failed = [answers[rank] for rank in sorted(answers) if answers[rank].error is not None]
                reports.append(min(failed, key=lambda each: list(CAUSES).index(each.cause)) if failed else answers[0])
                self.forget(worker)
        return reports

    def forget(self, worker: int) -> None:
        """Whatever a worker is doing, nobody waits for it."""
        self._pending = {reference: held for reference, held in self._pending.items() if held[0] != worker}
        self._answers.pop(worker, None)
        self._failed_at.pop(worker, None)
