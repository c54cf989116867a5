"""Runs of one trunk: who waits for whom, whose state is kept, and that waiting ones block nobody
else.
"""

import dataclasses

import pytest
from sweep_fakes import FakeHost, bank_key, make_spec, num_slots

from proxies.core.branches import branch_step, trunk_id
from proxies.core.schedule import Schedule
from sweeps.run.backlog import Attempt, Backlog
from sweeps.run.driver import drive
from sweeps.run.pool import InlinePool
from sweeps.run.trunks import Trunks
from sweeps.search.source import StaticSource
from sweeps.store.checkpoints import checkpoint_dir
from sweeps.store.ledger import Ledger


def wsd(num_steps, *, seed=0, decay_shape="linear", **changes):
    schedule = Schedule(
        kind="wsd", num_steps=num_steps, decay_steps=num_steps // 5, decay_shape=decay_shape
    )
    return dataclasses.replace(make_spec(seed=seed, **changes), schedule=schedule)


def attempt(spec):
    return Attempt(spec=spec, run_id=spec.id, bank_key=bank_key(spec))


@pytest.fixture
def trunks(tmp_path):
    return Trunks(tmp_path)


def test_a_longer_run_waits_for_the_next_shorter_ones_branch_step(trunks):
    short, middle, long = (attempt(wsd(n)) for n in (10, 20, 40))
    other = attempt(wsd(40, seed=1))
    for each in (long, short, middle, other):
        trunks.add(each)
    steps = {}
    assert [trunks.may_start(each, steps.get) for each in (short, middle, long, other)] == [
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
        "the one before it is now the shortest, which is past its step"
    )
    trunk = trunk_id(short.spec)
    assert [trunks.kept(each) for each in (short, long, other)] == [(8, trunk), None, None]


def test_of_two_decays_at_one_step_one_goes_on_from_the_other(trunks):
    pair = [attempt(wsd(20, decay_shape=shape)) for shape in ("linear", "sqrt")]
    for each in pair:
        trunks.add(each)
    first, second = sorted(pair, key=lambda each: each.run_id)
    assert (trunks.may_start(first, {}.get), trunks.may_start(second, {}.get)) == (True, False)
    assert trunks.kept(first) and not trunks.kept(second)


def test_states_go_with_the_last_run_of_their_trunk_and_spare_its_flops(trunks, tmp_path):
    short, long = attempt(wsd(10)), attempt(wsd(40))
    for each in (short, long):
        trunks.add(each)
    folder = checkpoint_dir(tmp_path, trunk_id(short.spec))
    assert trunks.flops(long) == long.spec.flops
    folder.mkdir(parents=True)
    (folder / f"step-{8:08d}-{'0' * 64}.safetensors").touch()
    assert trunks.flops(long) == pytest.approx(long.spec.flops * 32 / 40)
    trunks.drop(short.run_id)
    assert folder.is_dir()
    trunks.drop(long.run_id)
    assert not folder.exists()


def test_who_waits_is_passed_over_in_its_queue_and_in_the_choice_of_a_bank():
    waiting, ready, elsewhere = attempt(wsd(40)), attempt(wsd(10)), attempt(wsd(10, width=64))
    backlog = Backlog(lambda spec: 2)
    for each in (waiting, ready, elsewhere):
        backlog.add(each)

    def may(each):
        return each is not waiting

    slots = {}
    assert backlog.choose_key("", may) == "width 32"
    assert backlog.fill("width 32", slots, may, lambda _: True) == {0: ready}
    assert backlog.choose_key("width 32", may) == "width 64", "only one that waits is left there"
    assert backlog.fill("width 32", slots, lambda _: True, lambda _: True) == {1: waiting}


def test_a_drive_begins_them_by_duration_and_ends_them_all(tmp_path):
    specs = [wsd(n, seed=seed) for seed in (0, 1) for n in (40, 10, 20)]
    host = FakeHost(tmp_path / "diary")
    with Ledger.open(tmp_path, {}, create=True) as ledger:
        drive(
            StaticSource(specs, bank_key),
            InlinePool(lambda: host),
            ledger,
            tmp_path,
            num_slots_for=num_slots,
            bank_key_for=bank_key,
        )
        assert {run.spec.id for run in ledger.runs()} == {spec.id for spec in specs}
    begun = [
        line.split()[1]
        for line in (tmp_path / "diary").read_text().splitlines()
        if line.startswith("begin")
    ]
    assert sorted(begun) == sorted(spec.id for spec in specs)
    for trunk in (specs[:3], specs[3:]):
        by_duration = [spec.id for spec in sorted(trunk, key=branch_step)]
        assert [run_id for run_id in begun if run_id in by_duration] == by_duration
