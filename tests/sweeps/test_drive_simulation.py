"""The driver under a simulated pool and clock: hundreds of seeds of crashes, hangs, duplicates, power losses."""

import math
import shutil
import tempfile
from pathlib import Path

import pytest
from sweep_fakes import PowerLossError, SimPool, bank_key, make_spec, num_slots, outcome

from sweeps import drive as drive_module
from sweeps.drive import drive
from sweeps.errors import SweepError
from sweeps.ledger import Ledger
from sweeps.source import SearchSource, StaticSource
from sweeps.space import SearchSpace

NUM_SEEDS = 200
SPECS = [make_spec(seed=seed, width=width) for width in (32, 64) for seed in range(4)] + [make_spec(log2_lr=-1)]
SPACE = SearchSpace(learning_rate=(2**-12, 2**-2), warmup_fraction=(0.0, 0.3), clip_norm=(0.25, 4.0))
MAX_POWER_LOSSES = 20


@pytest.fixture
def folder():
    """In memory where there is such a place: a power loss is simulated, not real, so syncing proves nothing."""
    root = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=root if root.is_dir() else None))
    yield folder
    shutil.rmtree(folder)


def static_source(_):
    return StaticSource(SPECS, bank_key)


def search_source(ledger):
    def make_run(point):
        return make_spec(log2_lr=math.log2(point["learning_rate"]))

    return SearchSource(SPACE, make_run, ledger, stage="sweep", study_seed=1, num_trials=14, parallelism=4)


def simulate(study, seed, make_source, *, faults, power_loss):
    """Drive to the end, through power losses; returns the ledger as read back, and what was executed."""
    told, executed = [], []
    for life in range(MAX_POWER_LOSSES):
        pool = SimPool(seed * 1000 + life, 3, faults=faults, power_loss=power_loss if life < 10 else 0.0)
        try:
            with Ledger.open(study, {"seed": seed}, create=True) as ledger:
                finished_before = set(ledger.results())
                drive(
                    make_source(ledger), pool, ledger, study, num_slots_for=num_slots, bank_key_for=bank_key,
                    steps_per_call=4, max_attempts=6, hang_seconds=30.0, clock=pool.clock,
                    progress=lambda event: told.extend(result.id for result in event.outcomes),
                )  # fmt: skip
            break
        except PowerLossError:
            continue
        finally:
            repeated = finished_before & set(pool.executed)
            assert not repeated, "a finished run was run again"
            executed += pool.executed
    else:
        pytest.fail("never got to the end")
    return Ledger.read(study), told, executed


def check(ledger, told, specs):
    """Exactly one outcome per run, the right one, told at most once; failed only after as many losses."""
    results = ledger.results()
    assert set(results) == {spec.id for spec in specs}, "a run has no outcome"
    assert len(told) == len(set(told)), "told twice"
    for spec in specs:
        if results[spec.id].status != "failed":
            assert results[spec.id] == outcome(spec)[0], "another result"
        else:
            assert results[spec.id].reason.startswith("lost 6 times")


@pytest.mark.parametrize("power_loss", [0.0, 0.03])
def test_static_runs(folder, power_loss):
    for seed in range(NUM_SEEDS // 2):
        study = folder / str(seed)
        ledger, told, _ = simulate(study, seed, static_source, faults=0.2, power_loss=power_loss)
        check(ledger, told, SPECS)


def test_a_search_is_the_same_through_all_of_it(folder):
    calm, _, _ = simulate(folder / "calm", 0, search_source, faults=0.0, power_loss=0.0)
    expected = [record.body for record in calm.records("suggestion")]
    for seed in range(1, 25):
        study = folder / str(seed)
        ledger, told, _ = simulate(study, seed, search_source, faults=0.1, power_loss=0.03)
        assert len(told) == len(set(told))
        if all(result.status != "failed" for result in ledger.results().values()):
            assert [record.body for record in ledger.records("suggestion")] == expected
            assert dict(ledger.results()) == dict(calm.results())


def test_the_simulation_does_what_it_says(folder):
    """Faults happen: runs are executed again, though each has one outcome."""
    num_executed = sum(
        len(simulate(folder / str(seed), seed, static_source, faults=0.2, power_loss=0.03)[2]) for seed in range(10)
    )
    assert num_executed > 10 * len(SPECS) * 1.1


def no_deduplication(monkeypatch):
    """Every result that comes in is recorded, whether or not its run has one."""
    settle = drive_module._Driver._settle

    def mutant(self, worker, finished):
        spec = next((spec for spec in SPECS if spec.id == finished.result["id"]), None)
        if spec is not None and spec.id not in self._open:
            self._open[spec.id] = drive_module.Attempt(spec=spec, bank_key=bank_key(spec))
        settle(self, worker, finished)

    monkeypatch.setattr(drive_module._Driver, "_settle", mutant)


def lost_runs_forgotten(monkeypatch):
    monkeypatch.setattr(drive_module._Driver, "_lose", lambda self, attempt, reason: None)


def resume_forgets(monkeypatch):
    """A driver that starts anew does not look at what has finished."""
    pull = drive_module._Driver.pull

    def mutant(self):
        ledger, self._ledger = self._ledger, type("Empty", (), {"results": lambda _: {}})()
        try:
            pull(self)
        finally:
            self._ledger = ledger

    monkeypatch.setattr(drive_module._Driver, "pull", mutant)


@pytest.mark.parametrize("plant", [no_deduplication, lost_runs_forgotten, resume_forgets])
def test_planted_bugs_are_caught(folder, monkeypatch, plant):
    """A fault test that has never caught a bug is not a test."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, SweepError)):
        for seed in range(20):
            ledger, told, _ = simulate(folder / str(seed), seed, static_source, faults=0.3, power_loss=0.05)
            check(ledger, told, SPECS)
