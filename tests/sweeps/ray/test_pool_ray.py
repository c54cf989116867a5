"""Tests of a pool of Ray workers: workers that crash or hang, and Ray itself killed.

The first test starts Ray once (some 5 s).
"""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from ray_cluster import list_processes
from ray_pool_case import run_all
from sweep_fakes import (
    FakeHostFactory,
    list_executions,
    make_outcome,
    make_spec,
    make_specs,
)
from waiting import wait_until

from forerun._sweeps.ray import cluster_folder, cluster_start
from forerun._sweeps.ray.pool import RayPool
from forerun._sweeps.run.pool import InlinePool
from forerun._sweeps.store.errors import ClusterUnfit, PoolDead
from forerun._sweeps.store.ledger import Ledger

SUPPORT = Path(__file__).parents[2] / "support" / "sweeps"


class FaultyFactory:
    """A factory of hosts that read their fault from a file. It also checks that the worker has one
    arithmetic thread, and the driver's niceness.
    """

    def __init__(self, folder):
        self.folder = folder

    def set_fault(self, fault):
        (self.folder / "fault").write_text(fault)

    def get_diary(self):
        """Return the diary of the hosts with the present fault."""
        fault = (self.folder / "fault").read_text()
        return self.folder / fault.replace(" ", "-")

    def __call__(self):
        assert os.environ["OMP_NUM_THREADS"] == "1"
        assert os.nice(0) == int(os.environ["DRIVERS_NICENESS"])
        return FakeHostFactory(str(self.get_diary()), (self.folder / "fault").read_text())()


def restart_with_fault(pool, factory, fault):
    factory.set_fault(fault)
    for worker in range(pool.num_workers):
        pool.restart(worker)


def list_failure_messages(events, text):
    """Return the reported messages about failures that contain a text."""
    return [message for event in events for message in event.failures if text in message]


def test_lost_workers_cost_no_result_and_a_dead_head_is_a_named_error(tmp_path, capfd, monkeypatch):
    """Starting Ray is slow, so one start serves all kinds of failure, one after another. All are in
    one study, because a study without a finished run would end at a repeated failure.
    """
    signals = []
    previous_handler = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    monkeypatch.setenv("DRIVERS_NICENESS", str(os.nice(0)))
    study = tmp_path / "study"
    factory = FaultyFactory(tmp_path)
    factory.set_fault("crash 1")
    pool = RayPool(2, factory)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals == [signal.SIGTERM], "Ray's own handler would end the process"

        # A worker that crashes once
        specs = [make_spec(seed=seed, width=width) for seed in range(4) for width in (32, 64)]
        expected = {spec.id: make_outcome(spec)[0] for spec in specs}
        results, events = run_all(study, pool, specs)
        assert results == expected
        assert list_failure_messages(events, "worker lost (ActorDiedError)")
        assert max(map(list_executions(factory.get_diary(), "begin").count, expected)) == 2

        # A worker that hangs once (a worker may need over 5 s to start on a busy machine)
        restart_with_fault(pool, factory, "hang 12")
        specs = [make_spec(seed=seed) for seed in range(10, 14)]
        results, events = run_all(study, pool, specs, hang_seconds=10.0, max_attempts=5)
        assert [results[spec.id] for spec in specs] == [make_outcome(spec)[0] for spec in specs]
        assert list_failure_messages(events, "no report for 10 s")

        # A run that crashes every worker: it fails, and its neighbors finish
        restart_with_fault(pool, factory, "segfault 21")
        specs = [make_spec(seed=seed) for seed in range(20, 23)]
        results, events = run_all(study, pool, specs)
        statuses = [results[spec.id].status for spec in specs]
        assert statuses == ["finished", "failed", "finished"]
        assert "lost 3 times, the last: crashed" in results[specs[1].id].reason
        assert list_failure_messages(events, ": crashed: ")

        # Ray's head is killed
        folder = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent
        (head,) = [pid for pid, line in list_processes(folder).items() if "/gcs_server " in line]
        os.kill(head, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(PoolDead, match=r"Ray is gone.*run the same command again"):
            run_all(study, pool, [make_spec(seed=30, num_steps=10**6)])
        assert time.monotonic() - killed < 20
    finally:
        pool.close()
        signal.signal(signal.SIGTERM, previous_handler)
    assert list(cluster_folder.find_processes(folder)) == [], "Ray's agents must not outlive it"
    assert not folder.exists()
    printed = capfd.readouterr()
    assert printed.out == "", "stdout is for our JSON"
    assert "Traceback" not in printed.err


@pytest.mark.slow
@pytest.mark.parametrize("program", ["raylet", "gcs_server"])
def test_death_of_a_part_of_ray_is_a_named_error(tmp_path, program):
    """The error comes within 45 s, and a new pool finishes the study."""
    script = f"""
        import sys, time
        sys.path.insert(0, {str(SUPPORT)!r})
        from pathlib import Path
        from sweep_fakes import FakeHostFactory, make_specs
        from forerun._sweeps.ray.pool import RayPool
        from ray_pool_case import run_all
        pool = RayPool(1, FakeHostFactory({str(tmp_path / "diary")!r}, step_seconds=1.0))
        from ray_cluster import list_processes
        for pid, line in list_processes(pool._cluster_folder.folder).items():
            if line.split()[0].endswith({program!r}):
                print(pid, file=sys.stderr, flush=True)
        try:
            run_all(Path({str(tmp_path / "study")!r}), pool, make_specs(30))
        finally:
            print("failed at", time.monotonic(), file=sys.stderr, flush=True)
            pool.close()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stderr=subprocess.PIPE, text=True
    )
    with process:
        pid = int(process.stderr.readline())
        wait_until(lambda: list_executions(tmp_path / "diary"), 60)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        _, errors = process.communicate(timeout=90)
    # All processes of a machine share its monotonic clock.
    failed = float(errors.split("failed at ")[1].split()[0])
    assert failed - killed < 45
    assert "PoolDead" in errors
    assert "run the same command again" in errors

    pool = InlinePool(FakeHostFactory(str(tmp_path / "diary")))
    finished_ids = set(Ledger.read(tmp_path / "study").get_results())
    num_before = len(list_executions(tmp_path / "diary"))
    results, _ = run_all(tmp_path / "study", pool, make_specs(30))
    assert len(results) == 30
    assert not finished_ids & set(list_executions(tmp_path / "diary")[num_before:])


def replace_head(tmp_path, monkeypatch, program):
    """Replace the program of Ray's head; return the file in which the new program writes its
    process id at each start.
    """
    script, diary = tmp_path / "head.py", tmp_path / "diary"
    note_pid = (
        f"import os\nwith open({str(diary)!r}, 'a') as file:\n    print(os.getpid(), file=file)\n"
    )
    script.write_text(note_pid + textwrap.dedent(program))
    monkeypatch.setattr(cluster_start.ray_head, "__file__", str(script))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return diary


def test_failing_head_is_started_twice_and_its_log_is_kept(tmp_path, monkeypatch):
    program = (
        "import sys\nprint('waited for the raylet')\nsys.exit('Exception: the node timed out')"
    )
    diary = replace_head(tmp_path, monkeypatch, program)
    with pytest.raises(PoolDead, match=r"its head.*the node timed out.*cluster.backend") as caught:
        RayPool(1, FakeHostFactory("nowhere"))
    assert len(diary.read_text().split()) == 2
    (log,) = tmp_path.glob("forerun-*")
    assert str(log) in str(caught.value)
    assert "waited for the raylet" in log.read_text()


def test_start_without_progress_fails(tmp_path, monkeypatch):
    """A head that prints makes progress: it may take longer than the limit, here 3 s."""
    monkeypatch.setattr(cluster_start, "MAX_IDLE_SECONDS", 1.0)
    program = """
        import time
        for i in range(30):
            print(i, flush=True)
            time.sleep(0.1)
        time.sleep(60)
    """
    replace_head(tmp_path, monkeypatch, program)
    with pytest.raises(PoolDead, match="no progress for 1 s") as caught:
        RayPool(1, FakeHostFactory("nowhere"))
    (log,) = tmp_path.glob("forerun-*")
    assert str(log) in str(caught.value)
    assert "29" in log.read_text().split()


def test_stop_during_the_start_is_raised(tmp_path, monkeypatch):
    """The caller gets the exception of `check_stop`, and nothing is left behind."""
    diary = replace_head(tmp_path, monkeypatch, "import time\ntime.sleep(60)")

    class StoppedError(Exception):
        pass

    def check_stop():
        if diary.exists() and diary.read_text().endswith("\n"):
            raise StoppedError

    with pytest.raises(StoppedError):
        RayPool(1, FakeHostFactory("nowhere"), check_stop=check_stop)
    (pid,) = diary.read_text().split()
    assert not Path(f"/proc/{pid}").exists()
    assert list(tmp_path.glob("forerun-*")) == []
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ


def test_interrupted_start_leaves_nothing(monkeypatch):
    folders = []

    def raise_interrupt(self, num_workers, node_check):
        folders.append(self._cluster_folder.folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(RayPool, "_open", raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        RayPool(1, FakeHostFactory("nowhere"))
    assert not folders[0].exists() and "RAY_AUTH_TOKEN_PATH" not in os.environ


def test_number_of_workers_is_limited_by_the_cores(monkeypatch):
    """A hundred thousand workers on two cores took 6 GB within a minute."""
    monkeypatch.setattr("forerun._sweeps.ray.pool.count_cores", lambda: 2)
    monkeypatch.setattr("forerun._sweeps.ray.pool.RayHead", None)
    with pytest.raises(
        ClusterUnfit,
        match=r"num_workers = 33: must be at most 32 on this machine, 16 for each core",
    ):
        RayPool(33, FakeHostFactory("unused"))
