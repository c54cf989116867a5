"""Tests of an existing Ray cluster of two nodes: it is joined, used and left as it was; then its
parts are killed.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from ray_cluster import RayCluster, list_processes
from sweep_fakes import (
    FakeHostFactory,
    get_bank_key,
    list_executions,
    make_outcome,
    make_specs,
)
from waiting import wait_until

from forerun._sweeps.ray import cluster_start
from forerun._sweeps.ray.nodes import WorkerPlacement
from forerun._sweeps.ray.pool import RayPool
from forerun._sweeps.run.device_kinds import ask_device_kinds, format_device_kinds
from forerun._sweeps.run.driver import drive
from forerun._sweeps.run.pool import HostCall, Report
from forerun._sweeps.search.source import StaticSource
from forerun._sweeps.store.errors import ClusterUnfit
from forerun._sweeps.store.ledger import Ledger
from forerun._sweeps.store.sites import DEVICE, PLACE_PROBE

SUPPORT = Path(__file__).parents[2] / "support" / "sweeps"


@pytest.fixture(scope="module")
def cluster():
    """A running cluster: a head with two CPUs, and a node with one CPU that claims to have two
    GPUs.
    """
    running = RayCluster(2, 1, fake_gpus=2)
    yield running
    running.close()


@pytest.fixture
def joined_cluster(cluster, monkeypatch):
    """Set the cluster's token in this process's environment, and return the cluster."""
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    return cluster


def list_workers(cluster):
    """Return the pids of forerun's workers on the cluster."""
    return [
        pid
        for pid, line in list_processes("ray::RayWorker").items()
        if _find_session_folder(pid).startswith(str(cluster.folder))
    ]


def _find_session_folder(pid):
    """Return the path of a Ray process's log file, which begins with the folder of its session."""
    try:
        return str(Path(f"/proc/{pid}/fd/2").readlink())
    except OSError:
        return ""


class FailingNodeCheck:
    """A check that finds a problem on the second node, or cannot be unpickled there."""

    def __init__(self, head_raylet, unreadable=False):
        self.head_raylet, self.unreadable = head_raylet, unreadable

    def __call__(self):
        return [] if os.getppid() == self.head_raylet else ["the corpus is not there"]

    def __setstate__(self, state):
        self.__dict__ = state
        if self.unreadable and os.getppid() != self.head_raylet:
            raise ModuleNotFoundError("No module named 'sweeps'")


def test_cluster_is_joined_used_and_left_running(tmp_path, joined_cluster, capfd):
    specs = make_specs(12)
    factory = FakeHostFactory(str(tmp_path / "diary"), "crash 1")
    pool = RayPool(
        0, factory, place=WorkerPlacement(address=joined_cluster.address), node_check=list
    )
    try:
        free = "GPUs free: 2 (cluster.worker_gpus gives them shares)"
        assert (pool.num_workers, pool.where) == (3, f"3 workers on 2 nodes; {free}")
        assert len(list_workers(joined_cluster)) == 3
        with Ledger.open(tmp_path / "study", {}, create=True) as ledger:
            drive(
                StaticSource(specs, get_bank_key),
                pool,
                ledger,
                tmp_path / "study",
                bank_key_for=get_bank_key,
            )
            assert dict(ledger.get_results()) == {spec.id: make_outcome(spec)[0] for spec in specs}
        assert len(list_executions(tmp_path / "diary", "begin")) > len(specs), (
            "a worker must have crashed"
        )
    finally:
        pool.close()
    wait_until(lambda: not list_workers(joined_cluster), 10)
    assert len(joined_cluster.list_pids("raylet/raylet")) == 2, "the cluster must not be stopped"
    assert os.environ["RAY_AUTH_TOKEN"] == joined_cluster.environment["RAY_AUTH_TOKEN"]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("unreadable", "problem"),
    [(False, "the corpus is not there"), (True, "forerun does not run there")],
    ids=["no corpus", "no forerun"],
)
def test_node_that_cannot_run_the_study_is_named(tmp_path, joined_cluster, unreadable, problem):
    place = WorkerPlacement(address=joined_cluster.address)
    factory = FakeHostFactory(str(tmp_path / "diary"))
    head = next(
        pid
        for pid in joined_cluster.list_pids("raylet/raylet")
        if "--head" in list_processes(joined_cluster.folder)[pid]
    )
    with pytest.raises(
        ClusterUnfit,
        match=f"of 2 nodes that were checked, these cannot run this study:\n  .*: {problem}",
    ) as refusal:
        RayPool(0, factory, place=place, node_check=FailingNodeCheck(head, unreadable))
    assert str(refusal.value).count("\n") == 1, "the first node has no problem"


def test_workers_without_room_are_refused(tmp_path, joined_cluster):
    factory = FakeHostFactory(str(tmp_path / "diary"))
    with pytest.raises(
        ClusterUnfit, match=r"num_workers = 9: 3 workers of CPU 1 each(?s:.*)\n.*2 CPUs"
    ):
        RayPool(9, factory, place=WorkerPlacement(address=joined_cluster.address))
    with pytest.raises(ClusterUnfit, match=r": 0 workers of CPU 2, GPU 0\.5 each"):
        RayPool(
            0,
            factory,
            place=WorkerPlacement(address=joined_cluster.address, worker_cpus=2, worker_gpus=0.5),
        )


class DeviceHost:
    """A host that answers a probe with the kind of its GPU, and any other call with an error that
    names the devices its process sees. The two GPUs are of different kinds.
    """

    def advance(self, call):
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        if call.probe == PLACE_PROBE:
            kind = {"0": "NVIDIA A100", "1": "NVIDIA H100"}[devices]
            return Report(answer={DEVICE: kind})
        raise ValueError(f"devices {devices}|")


def ask_devices(pool, workers):
    """Return the devices that these workers see."""
    for worker in workers:
        pool.start(worker, HostCall(bank_key="", num_slots=1, admit=(), seconds=1.0))
    reports = []
    for _ in workers:  # each wait returns at least one report, or none after 30 s
        reports += pool.wait(30 if len(reports) < len(workers) else 0)
    assert len(reports) == len(workers), "a worker did not answer"
    errors = [report.error for report in sorted(reports, key=lambda report: report.worker)]
    return [error.removeprefix("ValueError: devices ").removesuffix("|") for error in errors]


def test_workers_share_gpus_evenly_and_report_their_kinds(joined_cluster):
    place = WorkerPlacement(address=joined_cluster.address, worker_cpus=0.25, worker_gpus=0.25)
    pool = RayPool(0, DeviceHost, place=place)
    try:
        assert pool.num_workers == 4, "the node's CPU is shared by four workers"
        kinds = ask_device_kinds(pool, lambda: None)
        assert sorted(set(kinds)) == ["NVIDIA A100", "NVIDIA H100"] and len(kinds) == 4
        assert format_device_kinds(sorted(kinds)).count(" with NVIDIA ") == 2
        pool.restart(1)
        assert ask_device_kinds(pool, lambda: None) == kinds, "a restarted worker keeps its GPU"
        assert sorted(ask_devices(pool, range(4))) == ["0", "0", "1", "1"]
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker_gpus", "num_workers", "allowed_devices"),
    [
        (0.25, 2, [["0", "1"]]),
        (0.6, 0, [["0", "1"]]),
        (1.0, 1, [["0"], ["1"]]),
        (0.0, 1, [[""]]),
    ],
)
def test_gpus_are_shared_evenly(joined_cluster, worker_gpus, num_workers, allowed_devices):
    """No GPU has two workers while another GPU has none."""
    place = WorkerPlacement(
        address=joined_cluster.address, worker_cpus=0.25, worker_gpus=worker_gpus
    )
    pool = RayPool(num_workers, DeviceHost, place=place)
    try:
        assert pool.num_workers == len(allowed_devices[0])
        devices = ask_devices(pool, range(pool.num_workers))
        assert sorted(devices) in allowed_devices
        if len(devices) > 1:
            pool.restart(1)
            assert ask_devices(pool, [1]) == [devices[1]], "a restarted worker stays on its GPU"
    finally:
        pool.close()


def test_unreachable_or_refusing_cluster_is_named(tmp_path, joined_cluster, monkeypatch):
    factory = FakeHostFactory(str(tmp_path / "diary"))
    began = time.monotonic()
    with pytest.raises(ClusterUnfit, match=r"cluster.address = '127.0.0.1:1': nothing answers"):
        RayPool(1, factory, place=WorkerPlacement(address="127.0.0.1:1"))
    with pytest.raises(ClusterUnfit, match="Invalid address format"):
        RayPool(1, factory, place=WorkerPlacement(address="nonsense"))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with pytest.raises(ClusterUnfit, match="refuses this token: set RAY_AUTH_MODE=token"):
        RayPool(1, factory, place=WorkerPlacement(address=joined_cluster.address))
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ClusterUnfit, match="refuses this token"):
        RayPool(1, factory, place=WorkerPlacement(address=joined_cluster.address))
    assert time.monotonic() - began < 30


def start_driver(cluster, folder, worker_options=""):
    """Start a driver of 30 slow runs on the cluster in a new process.

    `worker_options` are arguments of its `WorkerPlacement`.
    """
    script = f"""
        import sys
        from pathlib import Path
        sys.path.insert(0, {str(SUPPORT)!r})
        from sweep_fakes import FakeHostFactory, make_specs
        from ray_pool_case import run_all
        from forerun._sweeps.ray.pool import RayPool
        from forerun._sweeps.ray.nodes import WorkerPlacement
        factory = FakeHostFactory({str(folder / "diary")!r}, step_seconds=0.5)
        place = WorkerPlacement(address={cluster.address!r}, {worker_options})
        pool = RayPool(2, factory, place=place)
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
    wait_until(lambda: list_executions(folder / "diary") or process.poll() is not None, 60)
    return process


def test_killed_driver_leaves_no_actor(tmp_path, joined_cluster, monkeypatch):
    """A killed driver leaves no reserved place either.

    While it lives, a second driver gets an error: other jobs hold the resources.
    """
    process = start_driver(joined_cluster, tmp_path, "worker_cpus=0.25, worker_gpus=0.25")
    assert len(list_workers(joined_cluster)) == 2
    whole_gpu = WorkerPlacement(address=joined_cluster.address, worker_cpus=0.25, worker_gpus=1.0)
    message = (
        r"2 workers of .* can be placed, 0 of them now(?s:.*)Other jobs hold the remaining "
        r"resources, and released none of them in 3 s"
    )
    with monkeypatch.context() as patch, pytest.raises(ClusterUnfit, match=message):
        patch.setattr(cluster_start, "MAX_IDLE_SECONDS", 3.0)
        RayPool(2, DeviceHost, place=whole_gpu)
    process.kill()
    process.communicate(timeout=20)
    quarter_gpu = WorkerPlacement(
        address=joined_cluster.address, worker_cpus=0.25, worker_gpus=0.25
    )
    # The pool starts at once, when the head does not know yet that the driver has ended.
    pool = RayPool(0, DeviceHost, place=quarter_gpu)
    try:
        assert pool.num_workers == 4, "the dead driver's places must count as free"
    finally:
        pool.close()
    wait_until(lambda: not list_workers(joined_cluster), 20)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["gcs_server", "raylet"])
def test_death_of_the_head_or_the_drivers_node_is_a_named_error(tmp_path, part):
    """The error comes in time, whatever the other node does."""
    cluster = RayCluster(1, 1)
    try:
        with start_driver(cluster, tmp_path) as process:
            lines = list_processes(cluster.folder)
            pids = [
                pid
                for pid in cluster.list_pids(part)
                if part == "gcs_server" or "--head" in lines[pid]
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
def test_worker_of_a_dead_node_starts_on_another(tmp_path):
    cluster = RayCluster(3, 1)
    try:
        with start_driver(cluster, tmp_path) as process:
            lines = list_processes(cluster.folder)
            (other_node,) = [
                pid for pid in cluster.list_pids("raylet/raylet") if "--head" not in lines[pid]
            ]
            os.kill(other_node, signal.SIGKILL)
            wait_until(
                lambda: len(list_executions(tmp_path / "diary")) >= 6 or process.poll() is not None,
                90,
            )
            assert process.poll() is None
            process.kill()
            process.communicate(timeout=20)
    finally:
        cluster.close()
