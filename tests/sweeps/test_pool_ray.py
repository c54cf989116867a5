"""Real Ray: one pool, started once (some 5 s); workers crash and hang in it, and at last Ray itself
is killed.
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
from ray_cluster import processes
from sweep_fakes import (
    FakeHostFactory,
    bank_key,
    executions,
    make_spec,
    make_specs,
    num_slots,
    outcome,
)

from sweeps.ray import own as ray_own
from sweeps.ray import start as ray_start
from sweeps.ray.pool import RayPool
from sweeps.run.driver import drive
from sweeps.run.pool import InlinePool
from sweeps.search.source import StaticSource
from sweeps.store.errors import ClusterUnfit, PoolDead
from sweeps.store.ledger import Ledger

HERE = Path(__file__).parent


def run_all(study, pool, specs, **kwargs):
    events = []
    with Ledger.open(study, {}, create=True) as ledger:
        drive(
            StaticSource(specs, bank_key),
            pool,
            ledger,
            study,
            num_slots_for=num_slots,
            bank_key_for=bank_key,
            progress=events.append,
            **kwargs,
        )
        return dict(ledger.results()), events


def test_a_crashed_and_a_hung_worker_cost_nothing_but_time(tmp_path, capfd, monkeypatch):
    heard = []
    handler = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    monkeypatch.setenv("DRIVERS_NICENESS", str(os.nice(0)))
    specs = [make_spec(seed=seed, width=width) for seed in range(4) for width in (32, 64)]
    expected = {spec.id: outcome(spec)[0] for spec in specs}
    crash, hang = tmp_path / "crash", tmp_path / "hang"
    pool = RayPool(2, SwitchingFactory(str(crash), str(hang), str(tmp_path / "now-hang")))
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM], "Ray has a handler of its own, which ends the process"
        results, events = run_all(tmp_path / "study", pool, specs)
        assert results == expected
        assert [
            lost
            for event in events
            for lost in event.lost
            if "worker lost (ActorDiedError)" in lost
        ]
        assert max(map(executions(crash, "begin").count, expected)) == 2

        (tmp_path / "now-hang").touch()
        for worker in range(2):
            pool.restart(worker)
        results, events = run_all(tmp_path / "other", pool, specs, hang_seconds=5.0, max_attempts=5)
        assert results == expected
        assert [lost for event in events for lost in event.lost if "no report for 5 s" in lost]

        own = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent
        (head,) = [pid for pid, line in processes(own).items() if "/gcs_server " in line]
        os.kill(head, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(PoolDead, match=r"Ray is gone.*run the same command again"):
            run_all(tmp_path / "third", pool, [make_spec(seed=7, num_steps=10**6)])
        assert time.monotonic() - killed < 20
    finally:
        pool.close()
        signal.signal(signal.SIGTERM, handler)
    assert list(ray_own.processes(own)) == [], "Ray's agents would outlive it"
    assert not own.exists()
    printed = capfd.readouterr()
    assert printed.out == "", "stdout is for our JSON"
    assert "Traceback" not in printed.err


def test_a_run_that_crashes_by_itself_fails_and_its_neighbours_do_not(tmp_path):
    pool = RayPool(1, FakeHostFactory(str(tmp_path / "diary"), fault="segfault 1"))
    specs = make_specs(3)
    try:
        results, events = run_all(tmp_path / "study", pool, specs)
    finally:
        pool.close()
    assert [results[spec.id].status for spec in specs] == ["finished", "failed", "finished"]
    assert "lost 3 times, the last: crashed" in results[specs[1].id].reason
    assert [lost for event in events for lost in event.lost if ": crashed: " in lost]


class SwitchingFactory:
    """Hosts that crash at run 1 at first, and hang at run 2 once the switch is there. Threads as
    told.
    """

    def __init__(self, crash, hang, switch):
        self.crash, self.hang, self.switch = crash, hang, switch

    def __call__(self):
        assert os.environ["OMP_NUM_THREADS"] == "1"
        assert os.nice(0) == int(os.environ["DRIVERS_NICENESS"])
        if Path(self.switch).exists():
            return FakeHostFactory(self.hang, "hang 2")()
        return FakeHostFactory(self.crash, "crash 1")()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_ray_itself_dies(tmp_path, part):
    """A part of Ray is killed under a driver: a named error once a call has waited its 30 s; a new
    pool finishes.
    """
    script = f"""
        import sys, time
        sys.path.insert(0, {str(HERE)!r})
        from pathlib import Path
        from sweep_fakes import FakeHostFactory, make_specs
        from test_pool_ray import RayPool, run_all
        pool = RayPool(1, FakeHostFactory({str(tmp_path / "diary")!r}, step_seconds=1.0))
        from ray_cluster import processes
        print(*[p for p, line in processes(pool._own.folder).items() if line.split()[0].endswith({part!r})],
              file=sys.stderr, flush=True)
        try:
            run_all(Path({str(tmp_path / "study")!r}), pool, make_specs(30))
        finally:
            print("named", time.monotonic(), file=sys.stderr, flush=True)
            pool.close()
    """  # noqa: E501
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stderr=subprocess.PIPE, text=True
    )
    with process:
        pid = int(process.stderr.readline())
        while not executions(tmp_path / "diary"):
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        _, errors = process.communicate(timeout=90)
    named = float(errors.split("named ")[1].split()[0])  # the monotonic clock is the machine's
    assert named - killed < 45
    assert "PoolDead" in errors
    assert "run the same command again" in errors

    pool = InlinePool(FakeHostFactory(str(tmp_path / "diary")))
    finished = set(Ledger.read(tmp_path / "study").results())
    before = len(executions(tmp_path / "diary"))
    results, _ = run_all(tmp_path / "study", pool, make_specs(30))
    assert len(results) == 30
    assert not finished & set(executions(tmp_path / "diary")[before:])


def planted_head(tmp_path, monkeypatch, text):
    """In place of Ray's head a program of so many lines; where it notes its process each time it
    starts.
    """
    script, diary = tmp_path / "head.py", tmp_path / "diary"
    noted = (
        f"import os\nwith open({str(diary)!r}, 'a') as file:\n    print(os.getpid(), file=file)\n"
    )
    script.write_text(noted + textwrap.dedent(text))
    monkeypatch.setattr(ray_start.ray_head, "__file__", str(script))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return diary


def test_a_head_that_raises_is_tried_twice_and_its_log_stays(tmp_path, monkeypatch):
    text = "import sys\nprint('waited for the raylet')\nsys.exit('Exception: the node timed out')"
    diary = planted_head(tmp_path, monkeypatch, text)
    with pytest.raises(PoolDead, match=r"its head.*the node timed out.*cluster.backend") as failed:
        RayPool(1, FakeHostFactory("nowhere"))
    assert len(diary.read_text().split()) == 2
    (log,) = tmp_path.glob("forerun-*")
    assert str(log) in str(failed.value)
    assert "waited for the raylet" in log.read_text()


def test_a_start_without_progress_ends(tmp_path, monkeypatch):
    """One that prints gets on, and is waited for longer."""
    monkeypatch.setattr(ray_start, "IDLE_SECONDS", 1.0)
    text = (
        "import sys, time\nfor i in range(30):\n    print(i, flush=True)\n    "
        "time.sleep(0.1)\ntime.sleep(60)"
    )
    planted_head(tmp_path, monkeypatch, text)
    with pytest.raises(PoolDead, match="no progress for 1 s") as failed:
        RayPool(1, FakeHostFactory("nowhere"))
    (log,) = tmp_path.glob("forerun-*")
    assert str(log) in str(failed.value)
    assert "29" in log.read_text().split()


def test_a_stop_ends_the_start(tmp_path, monkeypatch):
    """Whatever is raised is what the caller gets, and nothing is left."""
    diary = planted_head(tmp_path, monkeypatch, "import time\ntime.sleep(60)")

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


def test_a_start_that_is_broken_off_leaves_nothing(monkeypatch):
    from sweeps.ray import pool as pool_ray

    folders = []

    def break_off(self, num_workers, node_check):
        folders.append(self._own.folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool_ray.RayPool, "_open", break_off)
    with pytest.raises(KeyboardInterrupt):
        RayPool(1, FakeHostFactory("nowhere"))
    assert not folders[0].exists() and "RAY_AUTH_TOKEN_PATH" not in os.environ


def test_a_machine_starts_no_more_workers_than_it_can_hold(monkeypatch):
    """A hundred thousand on two cores: Ray's processes took 6 GB in a minute, and said nothing."""
    monkeypatch.setattr("sweeps.ray.pool.num_cores", lambda: 2)
    monkeypatch.setattr("sweeps.ray.pool.Head", None)
    with pytest.raises(
        ClusterUnfit,
        match=r"num_workers = 33: must be at most 32 on this machine, 16 for each core",
    ):
        RayPool(33, FakeHostFactory("unused"))
