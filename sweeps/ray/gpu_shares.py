"""GPU shares of Ray workers: how many workers each GPU gets, and the placement groups that reserve
their places.

Ray packs shares of GPUs: four workers that take a quarter each all land on the node's first GPU.
Therefore each shared GPU gets a placement group of its own, and workers are dealt out evenly.

Ray itself is passed as an argument, from the only module that imports it (`sweeps.ray.pool`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from proxies.core.notation import counted
from sweeps.ray.nodes import WorkerPlacement, devices, node_room

_MIN_WHOLE_SHARE = 0.5001
"""Smallest share of a GPU of which no two fit on one GPU; Ray counts in 1/10,000."""

Spots = list[Any]
"""Ray scheduling strategy of each worker, by worker."""


def deal_workers(
    resources: Mapping[str, Mapping[str, float]], place: WorkerPlacement, num_workers: int
) -> list[tuple[str, float, int]]:
    """Deal out workers that take a share of a GPU each: no GPU gets a second worker before every
    GPU has one.

    Args:
        resources: node id -> resource -> amount.
        place: what a worker takes.
        num_workers: number of workers; all of them fit.

    Returns:
        (node id, share of its GPU to take, workers on it) of every GPU that gets workers.

    Raises:
        ValueError: the workers do not fit.
    """
    gpus = [(node, part) for node, amounts in resources.items() for part in devices(amounts)]
    counts, left = [0] * len(gpus), num_workers
    free_places = {node: node_room(amounts, place) for node, amounts in resources.items()}
    while left:
        before = left
        for index, (node, part) in enumerate(gpus):
            if left and free_places[node] and (counts[index] + 1) * place.gpu_share <= part + 1e-9:
                counts[index] += 1
                free_places[node] -= 1
                left -= 1
        if left == before:
            raise ValueError(
                f"{left} of {counted(num_workers, 'worker')} do not fit on the cluster's nodes"
            )
    # On a node with several GPUs, a group takes more than half a GPU, so that no two share one.
    multi_gpu_nodes = {node for node, amounts in resources.items() if len(devices(amounts)) > 1}
    return [
        (
            node,
            max(
                count * place.gpu_share,
                _MIN_WHOLE_SHARE if node in multi_gpu_nodes and part == 1 else 0.0,
            ),
            count,
        )
        for (node, part), count in zip(gpus, counts, strict=True)
        if count
    ]


def reserve_places(
    ray: Any,
    resources: Mapping[str, Mapping[str, float]],
    place: WorkerPlacement,
    num_workers: int,
    look: Callable[[], None],
) -> Spots:
    """Reserve the places of all workers in placement groups that end with this driver.

    Args:
        ray: the module, connected.
        resources: node id -> resource -> amount, of the nodes to use.
        place: what a worker takes.
        num_workers: number of workers; all of them fit.
        look: called each second while Ray reserves the places; raises to end the wait.

    Returns:
        Scheduling strategy of each worker.
    """
    if not place.shares_gpus:
        return ["DEFAULT"] * num_workers
    groups, rounds = [], []
    for node, share, count in deal_workers(resources, place, num_workers):
        bundle = {name: amount * count for name, amount in place.needs.items()} | {"GPU": share}
        bundle = {name: round_amount(amount) for name, amount in bundle.items()}
        groups.append(
            ray.util.placement_group([bundle], strategy="STRICT_PACK", _soft_target_node_id=node)
        )
        rounds += [(turn, len(groups) - 1) for turn in range(count)]
    for group in groups:
        while not group.wait(timeout_seconds=1.0):
            look()
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    return [strategy(groups[index], placement_group_bundle_index=0) for _, index in sorted(rounds)]


def round_amount(amount: float) -> float:
    """Return the amount, rounded so that Ray does not cut it short.

    Ray cuts off what is below 1/10,000, and 3 * 0.7 is slightly below 2.1.
    """
    exact = round(amount, 4)
    return exact if exact.is_integer() else exact + 0.2e-4
