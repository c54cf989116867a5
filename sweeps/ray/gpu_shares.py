"""GPU shares of Ray workers: how many workers each GPU gets, and the placement groups that reserve
their places.

Ray packs shares of GPUs: four workers that take a quarter each all land on the node's first GPU.
Therefore each shared GPU gets a placement group of its own, and workers are dealt out evenly.

Ray itself is passed as an argument, from the only module that imports it
(`forerun._sweeps.ray.pool`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun._proxies.core.notation import format_counted
from forerun._sweeps.ray.nodes import WorkerPlacement, count_workers_on_node, list_free_gpus

_MIN_WHOLE_SHARE = 0.5001
"""Smallest share above half a GPU: no two such shares fit on one GPU. Ray counts in 1/10,000."""

SchedulingStrategies = list[Any]
"""Ray scheduling strategy of each worker, by worker."""


def deal_workers(
    resources: Mapping[str, Mapping[str, float]], place: WorkerPlacement, num_workers: int
) -> list[tuple[str, float, int]]:
    """Deal out workers that take a share of a GPU each: no GPU gets a second worker before every
    GPU has one.

    Args:
        resources: node id -> resource -> amount.
        place: resources that each worker takes.
        num_workers: number of workers; all of them must fit.

    Returns:
        (node id, share of the GPU to take, number of workers) of every GPU that gets workers.

    Raises:
        ValueError: the workers do not fit.
    """
    gpus = [(node, free) for node, amounts in resources.items() for free in list_free_gpus(amounts)]
    counts, num_left = [0] * len(gpus), num_workers
    free_places = {
        node: count_workers_on_node(amounts, place) for node, amounts in resources.items()
    }
    # In each round, every GPU gets one more worker if it has room
    while num_left:
        num_before = num_left
        for index, (node, free) in enumerate(gpus):
            has_room = (counts[index] + 1) * place.gpu_share <= free + 1e-9
            if num_left and free_places[node] and has_room:
                counts[index] += 1
                free_places[node] -= 1
                num_left -= 1
        if num_left == num_before:
            raise ValueError(
                f"{num_left} of {format_counted(num_workers, 'worker')} do not fit on the "
                "cluster's nodes"
            )
    # On a node with several GPUs, a group takes more than half a GPU, so that no two share one.
    multi_gpu_nodes = {
        node for node, amounts in resources.items() if len(list_free_gpus(amounts)) > 1
    }
    return [
        (
            node,
            max(
                count * place.gpu_share,
                _MIN_WHOLE_SHARE if node in multi_gpu_nodes and free == 1 else 0.0,
            ),
            count,
        )
        for (node, free), count in zip(gpus, counts, strict=True)
        if count
    ]


def reserve_places(
    ray: Any,
    resources: Mapping[str, Mapping[str, float]],
    place: WorkerPlacement,
    num_workers: int,
    check: Callable[[], None],
) -> SchedulingStrategies:
    """Reserve the places of all workers in placement groups that end with this driver.

    Args:
        ray: the module, connected.
        resources: node id -> resource -> amount, of the nodes to use.
        place: resources that each worker takes.
        num_workers: number of workers; all of them must fit.
        check: called each second while Ray reserves the places; raises to end the wait.

    Returns:
        Scheduling strategy of each worker.
    """
    if not place.shares_gpus:
        return ["DEFAULT"] * num_workers
    # Worker k of every group comes before worker k + 1 of any, so that GPUs fill evenly
    groups, turns_and_groups = [], []
    for node, share, count in deal_workers(resources, place, num_workers):
        bundle = {name: amount * count for name, amount in place.resources.items()} | {"GPU": share}
        bundle = {name: round_amount(amount) for name, amount in bundle.items()}
        groups.append(
            ray.util.placement_group([bundle], strategy="STRICT_PACK", _soft_target_node_id=node)
        )
        turns_and_groups += [(turn, len(groups) - 1) for turn in range(count)]
    for group in groups:
        while not group.wait(timeout_seconds=1.0):
            check()
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    return [
        strategy(groups[index], placement_group_bundle_index=0)
        for _, index in sorted(turns_and_groups)
    ]


def round_amount(amount: float) -> float:
    """Return the amount as a number that Ray does not round down.

    Ray cuts off all digits below 1/10,000, and in floats 3 * 0.7 is slightly below 2.1.
    """
    exact = round(amount, 4)
    # A fifth of Ray's unit is more than a float's error, and Ray cuts it off again. Whole numbers
    # are exact already.
    return exact if exact.is_integer() else exact + 0.2e-4
