"""Hosts in quarantine get no worker: on a real cluster of two nodes that go by different names."""

import dataclasses
import os

import pytest
from ray_cluster import RayCluster

from sweeps.ray.groups import spread
from sweeps.ray.nodes import Place, allowed
from sweeps.ray.pool import RayPool
from sweeps.run.pool import Advance, Advanced
from sweeps.run.reruns import where
from sweeps.store.errors import ClusterUnfit
from sweeps.store.sites import HOST, HOST_VARIABLE, site


@dataclasses.dataclass(frozen=True)
class Saying:
    """A host that says where it is."""

    def __call__(self):
        return self

    def advance(self, call: Advance) -> Advanced:
        return Advanced(answer=site())


class Named(RayCluster):
    """Every node has a name of its own."""

    def _start(self, *arguments, cpus):
        os.environ[HOST_VARIABLE] = f"machine-{len(self.nodes)}"
        try:
            super()._start(*arguments, cpus=cpus)
        finally:
            del os.environ[HOST_VARIABLE]


@pytest.fixture(scope="module")
def named():
    running = Named(2, 2)
    yield running
    running.close()


def hosts(place, num_workers=0):
    """Where the workers of a pool are, before and after one is started anew."""
    pool = RayPool(num_workers, Saying(), place=place, node_check=list)
    try:
        found = [site[HOST] for site in where(pool, lambda: None).values()]
        pool.restart(0)
        return found, [site[HOST] for site in where(pool, lambda: None).values()]
    finally:
        pool.close()


@pytest.mark.slow
def test_workers_keep_away_from_a_host_in_quarantine(named, monkeypatch):
    for name, value in named.environment.items():
        monkeypatch.setenv(name, value)
    before, _ = hosts(Place(address=named.address), num_workers=4)
    assert sorted(before) == ["machine-0"] * 2 + ["machine-1"] * 2
    for odd, other in (("machine-1", "machine-0"), ("machine-0", "machine-1")):
        found, after = hosts(Place(address=named.address, avoided=(odd,)))
        assert found == after == [other] * 2, "as many as there is room for"
    with pytest.raises(ClusterUnfit, match=r"every node.*machine-0, machine-1.*trusted_hosts"):
        hosts(Place(address=named.address, avoided=("machine-0", "machine-1")))


def test_workers_are_spread_over_what_is_left():
    room = {"a": {"CPU": 3.0}, "b": {"CPU": 1.0}}
    assert spread(room, Place()) == ["a", "b", "a", "a"]
    assert spread({}, Place()) == []


def test_ranks_cannot_be_kept_away():
    with pytest.raises(ClusterUnfit, match="take that host out of the cluster"):
        allowed(None, {"x": "1.2.3.4"}, Place(num_ranks=2, avoided=("a",)), {}, lambda: None)
