"""Tests of how workers, each with a share of a GPU, are distributed over the GPUs of a cluster's
nodes.
"""

import pytest

from forerun._sweeps.ray.gpu_shares import deal_workers, round_amount
from forerun._sweeps.ray.nodes import WorkerPlacement, count_workers_that_fit

NODES = {"a": {"CPU": 8.0, "GPU": 2.0}, "b": {"CPU": 2.0, "GPU": 1.0}, "c": {"CPU": 4.0}}


@pytest.mark.parametrize(
    ("num_workers", "share", "expected"),
    [
        (1, 0.25, {"a": [1]}),
        (2, 0.25, {"a": [1, 1]}),
        (3, 0.25, {"a": [1, 1], "b": [1]}),
        (4, 0.25, {"a": [2, 1], "b": [1]}),
        # Node b has two cores.
        (9, 0.25, {"a": [4, 3], "b": [2]}),
        (10, 0.25, {"a": [4, 4], "b": [2]}),
        (3, 0.6, {"a": [1, 1], "b": [1]}),
    ],
)
def test_workers_are_dealt_evenly_to_gpus(num_workers, share, expected):
    counts_by_node = {}
    for node, gpu_share, count in deal_workers(
        NODES, WorkerPlacement(worker_gpus=share), num_workers
    ):
        counts_by_node.setdefault(node, []).append(count)
        assert count * share <= gpu_share <= 1
        assert gpu_share > 0.5 or node == "b", (
            "two bundles of at most half a GPU would share one GPU"
        )
    assert counts_by_node == expected


def test_all_workers_that_fit_are_dealt():
    for share in (1 / 7, 0.2, 0.25, 0.3, 1 / 3, 0.4, 0.5, 0.75):
        place = WorkerPlacement(worker_gpus=share, worker_cpus=0.1)
        num_workers = count_workers_that_fit(NODES, place)
        assert num_workers == 3 * int(1 / share + 1e-9)
        assert sum(count for *_, count in deal_workers(NODES, place, num_workers)) == num_workers
        with pytest.raises(ValueError, match=f"1 of {num_workers + 1} workers do not fit"):
            deal_workers(NODES, place, num_workers + 1)


def test_gpu_that_is_partly_in_use_gets_fewer_workers():
    nodes = {"a": {"CPU": 8.0, "GPU": 1.5}}
    assert deal_workers(nodes, WorkerPlacement(worker_gpus=0.25), 6) == [
        ("a", 1.0, 4),
        ("a", 0.5, 2),
    ]
    assert deal_workers(nodes, WorkerPlacement(worker_gpus=0.25), 1) == [("a", 0.5001, 1)]


def test_rounded_amounts_survive_rays_truncation():
    for hundredths in range(1, 300):
        for count in range(1, 12):
            amount = round_amount(count * (hundredths / 100))
            assert int(amount * 10_000) == round(amount * 10_000) == 100 * hundredths * count
    assert (round_amount(4 * 0.25), round_amount(3.0 * 2**30)) == (1, 3 * 2**30), (
        "whole amounts are unchanged"
    )
