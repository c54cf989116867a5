"""A cluster that exists without us, two nodes of it: joined, asked, used, left as it was; its parts killed."""

import os
import time
from pathlib import Path

import pytest
from ray_cluster import RayCluster, await_true, processes
from sweep_fakes import FakeHostFactory, bank_key, executions, make_specs, num_slots, outcome

from sweeps.ray.nodes import Place
from sweeps.ray.pool import RayPool
from sweeps.run.drive import drive
from sweeps.search.source import StaticSource
from sweeps.store.errors import ClusterUnfit
from sweeps.store.ledger import Ledger


@pytest.fixture(scope="module")
def cluster():
    """A head with two CPUs, and a node with one and two GPUs that are not there."""
    running = RayCluster(2, 1, fake_gpus=2)
    yield running
    running.close()


@pytest.fixture
def joined(cluster, monkeypatch):
    """The cluster, its token in our environment."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return cluster


def workers(cluster):
    """Processes of ours on it."""
    return [pid for pid, line in processes("ray::RayWorker").items() if _session(pid).startswith(str(cluster.folder))]


def _session(pid):
    try:
        return str(Path(f"/proc/{pid}/fd/2").readlink())
    except OSError:
        return ""


class Refusal:
    """A check that finds something on the second node alone; or cannot be read there."""

    def __init__(self, pid, unreadable=False):
        self.head_raylet, self.unreadable = pid, unreadable

    def __call__(self):
        return [] if os.getppid() == self.head_raylet else ["the corpus is not there"]

    def __setstate__(self, state):
        self.__dict__ = state
        if self.unreadable and os.getppid() != self.head_raylet:
            raise ModuleNotFoundError("No module named 'sweeps'")


def test_joined_used_and_left(tmp_path, joined, capfd):
    specs = make_specs(12)
    factory = FakeHostFactory(str(tmp_path / "diary"), "crash 1")
    pool = RayPool(0, factory, place=Place(address=joined.address), node_check=list)
    try:
        free = "GPUs free: 2 (cluster.worker_gpus gives them shares)"
        assert (pool.num_workers, pool.where) == (3, f"3 workers on 2 nodes; {free}")
        assert len(workers(joined)) == 3
        with Ledger.open(tmp_path / "study", {}, create=True) as ledger:
            drive(
                StaticSource(specs, bank_key), pool, ledger, tmp_path / "study", num_slots_for=num_slots,
                bank_key_for=bank_key, steps_per_call=3,
            )  # fmt: skip
            assert dict(ledger.results()) == {spec.id: outcome(spec)[0] for spec in specs}
        assert len(executions(tmp_path / "diary", "begin")) > len(specs), "a worker crashed on the way"
    finally:
        pool.close()
    await_true(lambda: not workers(joined), 10)
    assert len(joined.pids("raylet/raylet")) == 2, "the cluster is not ours to stop"
    assert os.environ["RAY_AUTH_TOKEN"] == joined.environment["RAY_AUTH_TOKEN"]
    assert capfd.readouterr().out == ""


def test_a_node_that_cannot_run_the_study_is_named(tmp_path, joined):
    where, factory = Place(address=joined.address), FakeHostFactory(str(tmp_path / "diary"))
    head = next(pid for pid in joined.pids("raylet/raylet") if "--head" in processes(joined.folder)[pid])
    for unreadable, said in (False, "the corpus is not there"), (True, "our code does not run there"):
        with pytest.raises(ClusterUnfit, match=f"2 nodes were asked.*\n  .*: {said}") as refusal:
            RayPool(0, factory, place=where, node_check=Refusal(head, unreadable))
        assert str(refusal.value).count("\n") == 1, "the first node has no problem"


def test_what_there_is_no_room_for(tmp_path, joined):
    factory = FakeHostFactory(str(tmp_path / "diary"))
    with pytest.raises(
        ClusterUnfit, match=r"num_workers = 9: there is room for 3 workers of CPU 1 each(?s:.*)\n.*2 CPUs"
    ):
        RayPool(9, factory, place=Place(address=joined.address))
    with pytest.raises(ClusterUnfit, match=r"room for 0 workers of CPU 2, GPU 0\.5 each"):
        RayPool(0, factory, place=Place(address=joined.address, worker_cpus=2, worker_gpus=0.5))


def test_a_cluster_that_cannot_be_joined(tmp_path, joined, monkeypatch):
    factory = FakeHostFactory(str(tmp_path / "diary"))
    began = time.monotonic()
    with pytest.raises(ClusterUnfit, match=r"cluster.address = '127.0.0.1:1': nobody answers"):
        RayPool(1, factory, place=Place(address="127.0.0.1:1"))
    with pytest.raises(ClusterUnfit, match="Invalid address format"):
        RayPool(1, factory, place=Place(address="nonsense"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with pytest.raises(ClusterUnfit, match="wants another token: set RAY_AUTH_MODE=token"):
        RayPool(1, factory, place=Place(address=joined.address))
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ClusterUnfit, match="wants another token"):
        RayPool(1, factory, place=Place(address=joined.address))
    assert time.monotonic() - began < 30
