"""A worker of Ray's is killed in the midst of its runs: they go on from their checkpoints, to the same last bit."""

import dataclasses
import os
import signal
from pathlib import Path

import pytest
from main_run import spec_of, write_corpus

from launcher.study.stages import bank_key
from launcher.workers.host import HostFactory
from proxies.core.schedule import Schedule
from proxies.core.spec import Numerics
from sweeps.ray.pool import RayPool
from sweeps.run.drive import drive
from sweeps.run.pool import InlinePool
from sweeps.search.source import StaticSource
from sweeps.store.ledger import Ledger


@dataclasses.dataclass(frozen=True)
class SavesAlways:
    """Hosts that save after every call, and say which process they are."""

    inner: HostFactory
    pid_file: str

    def __call__(self):
        from launcher.workers import resumable

        resumable.SAVE_SECONDS, resumable.SAVE_SHARE = 0.0, 1e9
        Path(self.pid_file).write_text(str(os.getpid()))
        return self.inner()


def run(study, specs, pool, progress=lambda event: None):
    with Ledger.open(study, {}, create=True) as ledger:
        drive(
            StaticSource(specs, bank_key), pool, ledger, study, steps_per_call=3, progress=progress,
            num_slots_for=lambda spec: spec.numerics.num_slots, bank_key_for=bank_key,
        )  # fmt: skip
        lost = [record.body["cause"] for record in ledger.records("lost")]
        return {run_id: (result.loss_nats, result.curve_id) for run_id, result in ledger.results().items()}, lost


@pytest.mark.slow
def test_a_killed_workers_runs_go_on(tmp_path):
    spec = spec_of(write_corpus(tmp_path).data_id)
    schedule = Schedule(kind="cosine", num_steps=60, warmup_steps=5)
    specs = [
        dataclasses.replace(spec, schedule=schedule, seed=seed, numerics=Numerics(num_slots=2)) for seed in range(3)
    ]
    factory = HostFactory(study_dir=str(tmp_path / "whole"), corpus=str(tmp_path / "tokens"))
    whole, _ = run(tmp_path / "whole", specs, InlinePool(factory))

    study, pid_file, notes, kills = tmp_path / "study", tmp_path / "pid", [], [9, 18, 27, 36, 45]

    def progress(event):
        notes.extend(event.notes)
        if kills and event.running and event.running[0].step >= kills[0]:
            kills.pop(0)
            os.kill(int(pid_file.read_text()), signal.SIGKILL)

    pool = RayPool(1, SavesAlways(dataclasses.replace(factory, study_dir=str(study)), str(pid_file)))
    try:
        found, lost = run(study, specs, pool, progress)
    finally:
        pool.close()
    assert found == whole
    assert lost == ["lost_worker"] * 10, "more often than a run may be lost for reasons of its own"
    steps = [int(note.rpartition(" ")[2]) for note in notes if " goes on from step " in note]
    assert len(steps) == 10 and min(steps) >= 9 and max(steps) >= 45
    assert list((study / "checkpoints").iterdir()) == []
