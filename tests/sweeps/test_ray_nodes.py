"""Room on nodes, counted; addresses that are none."""

import socket

import pytest

from sweeps.ray_nodes import Place, answers, described, room

NODES = {"a": {"CPU": 4.0, "GPU": 1.0, "memory": 8 * 2.0**30}, "b": {"CPU": 3.0, "memory": 2.0**30}, "c": {}}


@pytest.mark.parametrize(
    ("place", "num_workers"),
    [
        (Place(), 7),
        (Place(worker_cpus=2), 3),  # 2 and 1: no worker on two nodes
        (Place(worker_cpus=0.5), 14),
        (Place(worker_gpus=0.25), 4),
        (Place(worker_cpus=1, worker_gpus=0.1), 4),
        (Place(worker_gpus=1), 1),
        (Place(worker_memory_gib=1), 5),
        (Place(worker_memory_gib=100), 0),
    ],
)
def test_room(place, num_workers):
    assert room(NODES, place) == num_workers


def test_shares_that_make_a_whole_fit():
    for parts in (3, 7, 10):
        assert room({"a": {"CPU": 99.0, "GPU": 1.0}}, Place(worker_gpus=1 / parts)) == parts


def test_nodes_in_words():
    said = described(NODES, {"a": "10.0.0.1", "gone": "10.0.0.9"})
    assert said == "\n  10.0.0.1: 4 CPUs, 1 GPUs, 8.0 GiB\n  10.0.0.9: 0 CPUs, 0 GPUs, 0.0 GiB"


def test_who_answers():
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert answers(f"127.0.0.1:{server.getsockname()[1]}")
    assert not answers("127.0.0.1:1")
    assert not answers("no address")
