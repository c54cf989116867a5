from sweep_fakes import bank_key, make_spec, make_specs, num_slots

from sweeps.run.backlog import Attempt, Backlog


def filled(*specs):
    backlog = Backlog(num_slots)
    attempts = [Attempt(spec=spec, run_id=spec.id, bank_key=bank_key(spec)) for spec in specs]
    for attempt in attempts:
        backlog.add(attempt)
    return backlog, attempts


def test_keys_come_in_order_and_are_kept_while_they_last():
    backlog, _ = filled(make_spec(width=64), make_spec(width=32), make_spec(width=64, seed=1))
    assert backlog.choose_key("") == "width 64"
    assert backlog.choose_key("width 32") == "width 32"
    slots = {}
    backlog.fill("width 64", slots)
    assert len(slots) == 2
    assert backlog.choose_key("width 64") == "width 32"
    assert len(backlog) == 1


def test_only_free_slots_are_filled():
    backlog, (a, b, c, d) = filled(*make_specs(4))
    slots = {1: a}
    backlog.discard(a)
    assert backlog.fill(a.bank_key, slots) == {0: b, 2: c}
    assert slots == {0: b, 1: a, 2: c}
    del slots[1]
    assert backlog.fill(a.bank_key, slots) == {1: d}


def test_lost_runs_come_first_and_lone_ones_last_and_alone():
    backlog, attempts = filled(*make_specs(2))
    lost, alone = (Attempt(spec=spec, run_id=spec.id, bank_key=bank_key(spec)) for spec in make_specs(4)[2:])
    alone.alone = True
    backlog.put_back(alone)
    backlog.put_back(lost)
    slots = {}
    backlog.fill(lost.bank_key, slots)
    assert list(slots.values()) == [lost, *attempts]
    del slots[0]
    assert backlog.fill(lost.bank_key, slots) == {}  # a neighbour is there still
    slots.clear()
    assert backlog.fill(lost.bank_key, slots) == {0: alone}
    backlog.add(Attempt(spec=make_spec(seed=9), run_id="9", bank_key=lost.bank_key))
    assert backlog.fill(lost.bank_key, slots) == {}  # nobody joins it
