"""A cluster that exists without us, two nodes of it: joined, asked, used, left as it was; its parts
killed.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from ray_cluster import RayCluster, await_true, processes
from sweep_fakes import FakeHostFactory, bank_key, executions, make_specs, num_slots, outcome

from sweeps.ray import start as ray_start
from sweeps.ray.nodes import WorkerPlacement
from sweeps.ray.pool import RayPool
from sweeps.run.driver import drive
from sweeps.run.kinds import kinds_of, kinds_text
from sweeps.run.pool import HostAnswer, HostCall
from sweeps.search.source import StaticSource
from sweeps.store.errors import ClusterUnfit
from sweeps.store.ledger import Ledger
from sweeps.store.sites import DEVICE, WHERE

HERE = Path(__file__).parent


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
    return [
        pid
        for pid, line in processes("ray::RayWorker").items()
        if _session(pid).startswith(str(cluster.folder))
    ]


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
    pool = RayPool(0, factory, place=WorkerPlacement(address=joined.address), node_check=list)
    try:
        free = "GPUs free: 2 (cluster.worker_gpus gives them shares)"
        assert (pool.num_workers, pool.where) == (3, f"3 workers on 2 nodes; {free}")
        assert len(workers(joined)) == 3
        with Ledger.open(tmp_path / "study", {}, create=True) as ledger:
            drive(
                StaticSource(specs, bank_key),
                pool,
                ledger,
                tmp_path / "study",
                num_slots_for=num_slots,
                bank_key_for=bank_key,
            )
            assert dict(ledger.results()) == {spec.id: outcome(spec)[0] for spec in specs}
        assert len(executions(tmp_path / "diary", "begin")) > len(specs), (
            "a worker crashed on the way"
        )
    finally:
        pool.close()
    await_true(lambda: not workers(joined), 10)
    assert len(joined.pids("raylet/raylet")) == 2, "the cluster is not ours to stop"
    assert os.environ["RAY_AUTH_TOKEN"] == joined.environment["RAY_AUTH_TOKEN"]
    assert capfd.readouterr().out == ""


def test_a_node_that_cannot_run_the_study_is_named(tmp_path, joined):
    where, factory = (
        WorkerPlacement(address=joined.address),
        FakeHostFactory(str(tmp_path / "diary")),
    )
    head = next(
        pid for pid in joined.pids("raylet/raylet") if "--head" in processes(joined.folder)[pid]
    )
    for unreadable, said in (
        (False, "the corpus is not there"),
        (True, "forerun does not run there"),
    ):
        with pytest.raises(
            ClusterUnfit,
            match=f"of 2 nodes that were checked, these cannot run this study:\n  .*: {said}",
        ) as refusal:
            RayPool(0, factory, place=where, node_check=Refusal(head, unreadable))
        assert str(refusal.value).count("\n") == 1, "the first node has no problem"


def test_what_there_is_no_room_for(tmp_path, joined):
    factory = FakeHostFactory(str(tmp_path / "diary"))
    with pytest.raises(
        ClusterUnfit, match=r"num_workers = 9: 3 workers of CPU 1 each(?s:.*)\n.*2 CPUs"
    ):
        RayPool(9, factory, place=WorkerPlacement(address=joined.address))
    with pytest.raises(ClusterUnfit, match=r": 0 workers of CPU 2, GPU 0\.5 each"):
        RayPool(
            0,
            factory,
            place=WorkerPlacement(address=joined.address, worker_cpus=2, worker_gpus=0.5),
        )


class DeviceHost:
    """Says which devices its process sees."""

    def advance(self, call):
        raise ValueError(f"devices {os.environ.get('CUDA_VISIBLE_DEVICES')}|")


class KindHost:
    """Has a device of another kind on each GPU."""

    def advance(self, call):
        assert call.probe == WHERE
        return HostAnswer(
            answer={
                DEVICE: {"0": "NVIDIA A100", "1": "NVIDIA H100"}[os.environ["CUDA_VISIBLE_DEVICES"]]
            }
        )


def test_each_worker_tells_its_kind_of_device(joined):
    place = WorkerPlacement(address=joined.address, worker_cpus=0.25, worker_gpus=0.25)
    pool = RayPool(3, KindHost, place=place)
    try:
        kinds = kinds_of(pool, lambda: None)
        assert sorted(set(kinds)) == ["NVIDIA A100", "NVIDIA H100"] and len(kinds) == 3
        pool.restart(1)
        assert kinds_of(pool, lambda: None) == kinds
        assert kinds_text(sorted(kinds)).count(" with NVIDIA ") == 2
    finally:
        pool.close()


def told(pool, workers):
    """What the hosts of those workers say."""
    for worker in workers:
        pool.start(worker, HostCall(bank_key="", num_slots=1, admit=(), seconds=1.0))
    reports = []
    while len(reports) < len(workers):
        reports += pool.wait(30)
    said = [report.error for report in sorted(reports, key=lambda r: r.worker)]
    return [each.removeprefix("ValueError: devices ").removesuffix("|") for each in said]


@pytest.mark.parametrize(
    ("worker_gpus", "num_workers", "sees"),
    [
        (0.25, 0, "0101"),
        pytest.param(0.25, 2, "01", marks=pytest.mark.slow),
        pytest.param(0.6, 0, "01", marks=pytest.mark.slow),
        pytest.param(1.0, 1, None, marks=pytest.mark.slow),
        pytest.param(0.0, 1, [""], marks=pytest.mark.slow),
    ],
)
def test_devices_by_share(joined, worker_gpus, num_workers, sees):
    """As many as there is a CPU for; no GPU has two workers while another has none."""
    place = WorkerPlacement(address=joined.address, worker_cpus=0.25, worker_gpus=worker_gpus)
    pool = RayPool(num_workers, DeviceHost, place=place)
    try:
        assert pool.num_workers == len(sees or "0")
        there = told(pool, range(pool.num_workers))
        assert sees is None or sorted(there) == sorted(sees)
        if len(there) > 1:
            pool.restart(1)
            assert told(pool, [1]) == [there[1]], "where it was"
    finally:
        pool.close()


def test_a_cluster_that_cannot_be_joined(tmp_path, joined, monkeypatch):
    factory = FakeHostFactory(str(tmp_path / "diary"))
    began = time.monotonic()
    with pytest.raises(ClusterUnfit, match=r"cluster.address = '127.0.0.1:1': nothing answers"):
        RayPool(1, factory, place=WorkerPlacement(address="127.0.0.1:1"))
    with pytest.raises(ClusterUnfit, match="Invalid address format"):
        RayPool(1, factory, place=WorkerPlacement(address="nonsense"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with pytest.raises(ClusterUnfit, match="refuses this token: set RAY_AUTH_MODE=token"):
        RayPool(1, factory, place=WorkerPlacement(address=joined.address))
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ClusterUnfit, match="refuses this token"):
        RayPool(1, factory, place=WorkerPlacement(address=joined.address))
    assert time.monotonic() - began < 30


def driver(cluster, folder, takes=""):
    """A driver of 30 slow runs on the cluster, as a process of its own; `takes`: what a worker of
    it takes.
    """
    script = f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(HERE)!r})
        from sweep_fakes import FakeHostFactory, make_specs
        from test_pool_ray import run_all
        from sweeps.ray.pool import RayPool
        from sweeps.ray.nodes import WorkerPlacement
        factory = FakeHostFactory({str(folder / "diary")!r}, step_seconds=0.5)
        pool = RayPool(2, factory, place=WorkerPlacement(address={cluster.address!r}, {takes}))
        try:
            run_all(Path({str(folder / "study")!r}), pool, make_specs(30))
        finally:
            pool.close()
    """
    environment = {**os.environ, **cluster.environment}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    await_true(lambda: executions(folder / "diary") or process.poll() is not None, 60)
    return process


def test_a_killed_driver_leaves_no_actor(tmp_path, joined, monkeypatch):
    """Nor a place that is kept for one; while it is there, another driver is told that others have
    the room.
    """
    process = driver(joined, tmp_path, "worker_cpus=0.25, worker_gpus=0.25")
    assert len(workers(joined)) == 2
    whole = WorkerPlacement(address=joined.address, worker_cpus=0.25, worker_gpus=1.0)
    said = (
        r"2 workers of .* can be placed, 0 of them now(?s:.*)Other jobs hold the remaining "
        r"resources, and released none of them in 3 s"
    )
    with monkeypatch.context() as patch, pytest.raises(ClusterUnfit, match=said):
        patch.setattr(ray_start, "IDLE_SECONDS", 3.0)
        RayPool(2, DeviceHost, place=whole)
    process.kill()
    process.communicate(timeout=20)
    share = WorkerPlacement(address=joined.address, worker_cpus=0.25, worker_gpus=0.25)
    # at once: the head does not yet know that the driver has ended
    pool = RayPool(0, DeviceHost, place=share)
    try:
        assert pool.num_workers == 4, (
            "all that fit, not those that fit while the dead driver's count as taken"
        )
    finally:
        pool.close()
    await_true(lambda: not workers(joined), 20)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["gcs_server", "raylet"])
def test_the_cluster_dies_under_a_driver(tmp_path, part):
    """Its head, or the node that the driver is on: a named error in time, whatever the other node
    does.
    """
    cluster = RayCluster(1, 1)
    try:
        with driver(cluster, tmp_path) as process:
            lines = processes(cluster.folder)
            pids = [
                pid for pid in cluster.pids(part) if part == "gcs_server" or "--head" in lines[pid]
            ]
            os.kill(pids[0], signal.SIGKILL)
            killed = time.monotonic()
            _, errors = process.communicate(timeout=90)
            assert time.monotonic() - killed < 40
        assert "PoolDead: Ray is gone" in errors
        assert "run the same command again" in errors
    finally:
        cluster.close()


@pytest.mark.slow
def test_another_node_dies(tmp_path):
    """Its worker is lost and starts again where there is room; if there is none, that is said in
    time.
    """
    cluster = RayCluster(3, 1)
    try:
        with driver(cluster, tmp_path) as process:
            lines = processes(cluster.folder)
            (other,) = [pid for pid in cluster.pids("raylet/raylet") if "--head" not in lines[pid]]
            os.kill(other, signal.SIGKILL)
            await_true(
                lambda: len(executions(tmp_path / "diary")) >= 6 or process.poll() is not None, 90
            )
            assert process.poll() is None
            process.kill()
            process.communicate(timeout=20)
    finally:
        cluster.close()
