"""Workers of two ranks on real Ray: one is killed, and its run goes on to the same last bit; a driver leaves nobody."""

import dataclasses
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from kill_case import Driver
from main_run import spec_of, write_corpus
from ray_cluster import await_true
from test_ray_sockets import listening

from launcher.study.stages import bank_key
from launcher.workers.host import HostFactory
from proxies.core.schedule import Schedule
from proxies.core.spec import Numerics
from sweeps.ray.nodes import Place
from sweeps.ray.pool import RayPool
from sweeps.run.drive import drive
from sweeps.search.source import StaticSource
from sweeps.store.ledger import Ledger

LOOPBACK = "0100007F"


@dataclasses.dataclass(frozen=True)
class SavesAlways:
    """Hosts that save after every call, and say which process is which rank."""

    inner: HostFactory
    pids: str

    def __call__(self, seat):
        from launcher.workers import resumable

        resumable.SAVE_SECONDS, resumable.SAVE_SHARE = 0.0, 1e9
        Path(f"{self.pids}-{seat.rank}").write_text(str(os.getpid()))
        return self.inner(seat)


def run(study, specs, pool, progress=lambda event: None):
    with Ledger.open(study, {}, create=True) as ledger:
        drive(
            StaticSource(specs, bank_key), pool, ledger, study, steps_per_call=3, progress=progress,
            num_slots_for=lambda spec: spec.numerics.num_slots, bank_key_for=bank_key,
        )  # fmt: skip
        lost = [(record.body["cause"], record.body["detail"]) for record in ledger.records("lost")]
        return {run_id: (result.loss_nats, result.curve_id) for run_id, result in ledger.results().items()}, lost


@pytest.mark.slow
def test_a_killed_ranks_run_goes_on(tmp_path):
    spec = spec_of(write_corpus(tmp_path).data_id)
    spec = dataclasses.replace(spec, schedule=Schedule(kind="cosine", num_steps=18, warmup_steps=3))
    specs = [dataclasses.replace(spec, seed=seed, numerics=Numerics(num_ranks=2)) for seed in range(2)]
    study, notes, kills, lost_events, reached = tmp_path / "study", [], [9], [], []

    def progress(event):
        notes.extend(event.notes)
        reached.extend(listening([int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]))
        lost_events.extend(event.lost)
        if kills and event.running and event.running[0].step >= kills[0]:
            kills.pop()
            os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGKILL)

    factory = SavesAlways(HostFactory(study_dir=str(study), corpus=str(tmp_path / "tokens")), str(tmp_path / "pid"))
    pool = RayPool(1, factory, place=Place(num_ranks=2, worker_cpus=0.5))
    try:
        whole, _ = run(tmp_path / "whole", specs, pool)
        shutil.rmtree(study / "checkpoints")  # of the worker's own study, which had no outcome
        found, lost = run(study, specs, pool, progress)
    finally:
        pool.close()
    assert found == whole and len(whole) == 2
    assert lost == [("lost_worker", "rank 1 lost (ActorDiedError)")], "one worker, though two ranks fail"
    assert len(lost_events) == 1
    (step,) = [int(note.rpartition(" ")[2]) for note in notes if " goes on from step " in note]
    assert step >= 9
    wide = {(name, port) for name, address, port in reached if address != LOOPBACK}
    assert len(wide) == 4, "Ray's own of two ranks, and of the two after them: a token is wanted there"
    assert len({port for _, address, port in reached if address == LOOPBACK}) >= 3, "of the ranks, for each other"
    assert not any((study / "checkpoints").iterdir())


RANKS = ("--set", "cluster.backend=ray", "--set", "cluster.num_workers=1", "--set", "cluster.worker_cpus=0.5")
RANKS += ("--set", "proxy.num_ranks=2", "--set", "proxy.num_steps=600")


def started(finished, study):
    """A study whose runs take a while, on a worker of two ranks at work."""
    driver = Driver(finished / "plan.toml", study, *RANKS)
    driver.wait_for(lambda: len(driver.pids("worker")) == 2)
    time.sleep(10.0)  # it has met its other half, and has trained some steps
    return driver


def ranks_of(driver):
    """Its actors that live, at work or not."""
    return [pid for pid, line in driver.processes().items() if line.startswith("ray::RayWorker")]


@pytest.mark.slow
def test_a_killed_driver_leaves_no_rank(finished, tmp_path):
    driver = started(finished, tmp_path / "study")
    try:
        driver.process.kill()
        driver.end()
        await_true(lambda: not ranks_of(driver), 20)  # an agent of Ray's may take a minute
    finally:
        driver.sweep_up()


@pytest.mark.slow
def test_ctrl_c_saves_what_ranks_hold(finished, tmp_path):
    study = tmp_path / "study"
    for turn in range(2):
        driver = started(finished, study)
        try:
            if turn:
                driver.wait_for(lambda said=driver.said: re.search(r"goes on from step [1-9]", said()))
            os.killpg(driver.process.pid, signal.SIGINT)
            code, _ = driver.end()
            assert code == 130, driver.said()
            assert ranks_of(driver) == []
        finally:
            driver.sweep_up()
        assert list((study / "checkpoints").rglob("step-*.safetensors"))
