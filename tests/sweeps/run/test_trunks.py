"""Tests of runs that share a trunk: runs of several durations with the same steps before their
learning rates decay. The tests cover which run waits for which, which state is kept, and that a
waiting run blocks no other run.
"""

import dataclasses

import pytest
from sweep_fakes import FakeHost, get_bank_key, make_spec

from forerun._proxies.core.branches import compute_branch_step, compute_trunk_id
from forerun._proxies.core.schedule import Schedule
from forerun._sweeps.run.backlog import Backlog, OpenRun
from forerun._sweeps.run.driver import drive
from forerun._sweeps.run.pool import InlinePool
from forerun._sweeps.run.trunks import TrunkRuns
from forerun._sweeps.search.source import StaticSource
from forerun._sweeps.store.checkpoints import get_checkpoint_dir
from forerun._sweeps.store.ledger import Ledger


def make_stable_decay_spec(num_steps, *, seed=0, decay_shape="linear", **changes):
    schedule = Schedule(
        kind="wsd", num_steps=num_steps, decay_steps=num_steps // 5, decay_shape=decay_shape
    )
    return dataclasses.replace(make_spec(seed=seed, **changes), schedule=schedule)


def make_open_run(spec):
    return OpenRun(spec=spec, run_id=spec.id, bank_key=get_bank_key(spec))


@pytest.fixture
def trunks(tmp_path):
    return TrunkRuns(tmp_path)


def test_longer_run_waits_for_the_branch_step_of_the_next_shorter_one(trunks):
    short, middle, long = (make_open_run(make_stable_decay_spec(n)) for n in (10, 20, 40))
    other_seed = make_open_run(make_stable_decay_spec(40, seed=1))
    for open_run in (long, short, middle, other_seed):
        trunks.add(open_run)
    steps = {}
    assert [
        trunks.may_start(open_run, steps.get) for open_run in (short, middle, long, other_seed)
    ] == [
        True,
        False,
        False,
        True,
    ]
    steps[short.run_id] = 7
    assert not trunks.may_start(middle, steps.get), "its branch step is 8"
    steps[short.run_id] = 8
    assert trunks.may_start(middle, steps.get) and not trunks.may_start(long, steps.get)
    trunks.drop(middle.run_id)
    assert trunks.may_start(long, steps.get), (
        "the next shorter run is now the shortest one, which is past its branch step"
    )
    trunk = compute_trunk_id(short.spec)
    assert [trunks.plan_saved_state(open_run) for open_run in (short, long, other_seed)] == [
        (8, trunk),
        None,
        None,
    ]


def test_one_of_two_runs_that_branch_at_the_same_step_continues_from_the_other(trunks):
    pair = [
        make_open_run(make_stable_decay_spec(20, decay_shape=shape)) for shape in ("linear", "sqrt")
    ]
    for open_run in pair:
        trunks.add(open_run)
    first, second = sorted(pair, key=lambda open_run: open_run.run_id)
    assert (trunks.may_start(first, {}.get), trunks.may_start(second, {}.get)) == (True, False)
    assert trunks.plan_saved_state(first) and not trunks.plan_saved_state(second)


def test_states_are_removed_with_the_last_run_and_save_its_flops(trunks, tmp_path):
    short, long = (
        make_open_run(make_stable_decay_spec(10)),
        make_open_run(make_stable_decay_spec(40)),
    )
    for open_run in (short, long):
        trunks.add(open_run)
    folder = get_checkpoint_dir(tmp_path, compute_trunk_id(short.spec))
    assert trunks.count_flops(long) == long.spec.flops
    folder.mkdir(parents=True)
    (folder / f"step-{8:08d}-{'0' * 64}.safetensors").touch()
    # The saved state of step 8 spares 8 of the 40 steps
    assert trunks.count_flops(long) == pytest.approx(long.spec.flops * 32 / 40)
    trunks.drop(short.run_id)
    assert folder.is_dir()
    trunks.drop(long.run_id)
    assert not folder.exists()


def test_waiting_run_is_skipped_in_its_queue_and_in_the_choice_of_a_bank():
    waiting, ready, other_bank = (
        make_open_run(make_stable_decay_spec(40, num_slots=2)),
        make_open_run(make_stable_decay_spec(10, num_slots=2)),
        make_open_run(make_stable_decay_spec(10, num_slots=2, width=64)),
    )
    backlog = Backlog()
    for open_run in (waiting, ready, other_bank):
        backlog.add(open_run)

    def is_ready(open_run):
        return open_run is not waiting

    slots = {}
    assert backlog.choose_key("", is_ready) == "width 32"
    assert backlog.fill("width 32", slots, is_ready, lambda _: True) == {0: ready}
    assert backlog.choose_key("width 32", is_ready) == "width 64", (
        "only a waiting run is left there"
    )
    assert backlog.fill("width 32", slots, lambda _: True, lambda _: True) == {1: waiting}


def test_driver_starts_runs_by_duration_and_finishes_all(tmp_path):
    specs = [make_stable_decay_spec(n, seed=seed) for seed in (0, 1) for n in (40, 10, 20)]
    host = FakeHost(tmp_path / "diary")
    with Ledger.open(tmp_path, {}, create=True) as ledger:
        drive(
            StaticSource(specs, get_bank_key),
            InlinePool(lambda: host),
            ledger,
            tmp_path,
            bank_key_for=get_bank_key,
        )
        assert {run.spec.id for run in ledger.read_runs()} == {spec.id for spec in specs}
    begun_ids = [
        line.split()[1]
        for line in (tmp_path / "diary").read_text().splitlines()
        if line.startswith("begin")
    ]
    assert sorted(begun_ids) == sorted(spec.id for spec in specs)
    for trunk in (specs[:3], specs[3:]):
        by_duration = [spec.id for spec in sorted(trunk, key=compute_branch_step)]
        assert [run_id for run_id in begun_ids if run_id in by_duration] == by_duration
