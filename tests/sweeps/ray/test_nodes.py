"""Tests of how many workers fit on a cluster's nodes, and of addresses that do not answer."""

import socket
from unittest import mock

import pytest

from forerun._sweeps.ray.gpu_shares import reserve_places
from forerun._sweeps.ray.nodes import (
    WorkerPlacement,
    check_nodes,
    count_workers_that_fit,
    is_listening,
)

NODES = {
    "a": {"CPU": 4.0, "GPU": 1.0, "memory": 8 * 2.0**30},
    "b": {"CPU": 3.0, "memory": 2.0**30},
    "c": {},
}


@pytest.mark.parametrize(
    ("place", "num_workers"),
    [
        (WorkerPlacement(), 7),
        # 2 and 1, because no worker spans two nodes
        (WorkerPlacement(worker_cpus=2), 3),
        (WorkerPlacement(worker_cpus=0.5), 14),
        (WorkerPlacement(worker_gpus=0.25), 4),
        (WorkerPlacement(worker_cpus=1, worker_gpus=0.1), 4),
        (WorkerPlacement(worker_gpus=1), 1),
        (WorkerPlacement(worker_memory_gib=1), 5),
        (WorkerPlacement(worker_memory_gib=100), 0),
    ],
)
def test_workers_that_fit_are_counted(place, num_workers):
    assert count_workers_that_fit(NODES, place) == num_workers


def test_listening_address_is_recognized():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert is_listening(f"127.0.0.1:{server.getsockname()[1]}")
    assert not is_listening("127.0.0.1:1")
    assert not is_listening("no address")


def test_stop_interrupts_the_check_of_nodes_and_the_reservation():
    """Ray never answers here. The node check is `list`, which returns no problem."""

    class StoppedError(Exception):
        pass

    def raise_stop():
        raise StoppedError

    silent_ray = mock.MagicMock()
    silent_ray.wait.side_effect = lambda references, **_: ([], references)
    with pytest.raises(StoppedError):
        check_nodes(silent_ray, {"a": "1.2.3.4"}, list, {}, raise_stop)
    silent_ray.util.placement_group.return_value.wait.return_value = False
    with pytest.raises(StoppedError):
        reserve_places(
            silent_ray,
            {"a": {"CPU": 2.0, "GPU": 1.0}},
            WorkerPlacement(worker_gpus=0.5),
            1,
            raise_stop,
        )
