"""Where on a Ray cluster workers sit: shares of GPUs dealt out evenly.

Ray by itself puts shares of GPUs together: four workers of a quarter each all sit on the node's first GPU. So there
is a placement group for each GPU that is shared. Ray itself comes in as an argument, from its one door
(`sweeps.ray.pool`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sweeps.ray.nodes import Place, devices, node_room

_APART = 0.5001  # of a GPU, the least that cannot lie on one with another: Ray counts in 1/10,000

Spots = list[Any]
"""By worker: a scheduling strategy of Ray's."""


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
    """Have Ray keep the places of all workers, in placement groups that end with this driver.

    Args:
        ray: the module, connected.
        resources: node id -> resource -> amount, of the nodes to use.
        place: what a worker takes.
        num_workers: there is room for so many.
        look: called each second while Ray makes the room: raises what ends that.
    """
    if not place.shares_gpus:
        return ["DEFAULT"] * num_workers
    groups, rounds = [], []
    for node, share, count in dealt(resources, place, num_workers):
        bundle = {name: amount * count for name, amount in place.needs.items()} | {"GPU": share}
        bundle = {name: counted(amount) for name, amount in bundle.items()}
        groups.append(ray.util.placement_group([bundle], strategy="STRICT_PACK", _soft_target_node_id=node))
        rounds += [(turn, len(groups) - 1) for turn in range(count)]
    for group in groups:
        while not group.wait(timeout_seconds=1.0):
            look()
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    return [strategy(groups[index], placement_group_bundle_index=0) for _, index in sorted(rounds)]


def counted(amount: float) -> float:
    """An amount that Ray, which cuts off what is below 1/10,000, counts as it is: 3 * 0.7 is a little under 2.1."""
    exact = round(amount, 4)
    return exact if exact.is_integer() else exact + 0.2e-4
