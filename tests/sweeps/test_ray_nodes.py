"""Room on nodes, counted; addresses that are none."""

import socket
from unittest import mock

import pytest

from sweeps.ray.gpu_shares import reserve_places
from sweeps.ray.nodes import WorkerPlacement, answers, check_nodes, room

NODES = {
    "a": {"CPU": 4.0, "GPU": 1.0, "memory": 8 * 2.0**30},
    "b": {"CPU": 3.0, "memory": 2.0**30},
    "c": {},
}


@pytest.mark.parametrize(
    ("place", "num_workers"),
    [
        (WorkerPlacement(), 7),
        (WorkerPlacement(worker_cpus=2), 3),  # 2 and 1: no worker on two nodes
        (WorkerPlacement(worker_cpus=0.5), 14),
        (WorkerPlacement(worker_gpus=0.25), 4),
        (WorkerPlacement(worker_cpus=1, worker_gpus=0.1), 4),
        (WorkerPlacement(worker_gpus=1), 1),
        (WorkerPlacement(worker_memory_gib=1), 5),
        (WorkerPlacement(worker_memory_gib=100), 0),
    ],
)
def test_room(place, num_workers):
    assert room(NODES, place) == num_workers


def test_who_answers():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert answers(f"127.0.0.1:{server.getsockname()[1]}")
    assert not answers("127.0.0.1:1")
    assert not answers("no address")


def test_a_stop_is_heard_while_nodes_are_asked_and_while_room_is_made():
    """Neither answers, ever."""

    class StoppedError(Exception):
        pass

    def stop():
        raise StoppedError

    silent = mock.MagicMock()
    silent.wait.side_effect = lambda references, **_: ([], references)
    with pytest.raises(StoppedError):
        check_nodes(silent, {"a": "1.2.3.4"}, list, {}, stop)
    silent.util.placement_group.return_value.wait.return_value = False
    with pytest.raises(StoppedError):
        reserve_places(
            silent, {"a": {"CPU": 2.0, "GPU": 1.0}}, WorkerPlacement(worker_gpus=0.5), 1, stop
        )
