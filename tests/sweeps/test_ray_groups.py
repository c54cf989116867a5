"""Who sits where, counted and dealt."""

import pytest

from sweeps.ray.gpu_shares import deal_workers, round_amount
from sweeps.ray.nodes import WorkerPlacement, room

TWO = {"a": {"CPU": 8.0, "GPU": 2.0}, "b": {"CPU": 2.0, "GPU": 1.0}, "c": {"CPU": 4.0}}


@pytest.mark.parametrize(
    ("num_workers", "share", "spread"),
    [
        (1, 0.25, {"a": [1]}),
        (2, 0.25, {"a": [1, 1]}),
        (3, 0.25, {"a": [1, 1], "b": [1]}),
        (4, 0.25, {"a": [2, 1], "b": [1]}),
        (9, 0.25, {"a": [4, 3], "b": [2]}),  # b has two cores
        (10, 0.25, {"a": [4, 4], "b": [2]}),
        (3, 0.6, {"a": [1, 1], "b": [1]}),
    ],
)
def test_dealt_out(num_workers, share, spread):
    found = {}
    for node, part, count in deal_workers(TWO, WorkerPlacement(worker_gpus=share), num_workers):
        found.setdefault(node, []).append(count)
        assert count * share <= part <= 1
        assert part > 0.5 or node == "b", "two bundles of less would lie on one GPU"
    assert found == spread


def test_there_is_room_for_what_is_dealt():
    for share in (1 / 7, 0.2, 0.25, 0.3, 1 / 3, 0.4, 0.5, 0.75):
        place = WorkerPlacement(worker_gpus=share, worker_cpus=0.1)
        num_workers = room(TWO, place)
        assert num_workers == 3 * int(1 / share + 1e-9)
        assert sum(count for *_, count in deal_workers(TWO, place, num_workers)) == num_workers
        with pytest.raises(ValueError, match=f"1 of {num_workers + 1} workers do not fit"):
            deal_workers(TWO, place, num_workers + 1)


def test_a_gpu_that_others_use_in_part():
    there = {"a": {"CPU": 8.0, "GPU": 1.5}}
    assert deal_workers(there, WorkerPlacement(worker_gpus=0.25), 6) == [
        ("a", 1.0, 4),
        ("a", 0.5, 2),
    ]
    assert deal_workers(there, WorkerPlacement(worker_gpus=0.25), 1) == [("a", 0.5001, 1)]


def test_amounts_that_ray_cuts_off():
    for hundredths in range(1, 300):
        for count in range(1, 12):
            amount = round_amount(count * (hundredths / 100))
            assert int(amount * 10_000) == round(amount * 10_000) == 100 * hundredths * count
    assert (round_amount(4 * 0.25), round_amount(3.0 * 2**30)) == (1, 3 * 2**30), (
        "whole ones stay as they are"
    )
