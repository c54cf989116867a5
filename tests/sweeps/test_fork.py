import dataclasses

import pytest
from sweep_fakes import make_spec, make_specs, outcome, pruned_outcome

from sweeps.store.curves import curve_path, load_curve, store_curve
from sweeps.store.errors import ForkRefused
from sweeps.store.fork import ImportedRecords, import_runs, read_parent
from sweeps.store.ledger import LEDGER_NAME, Ledger

PLAN = {"data_id": "toy", "semantics": 2, "seed": 1}
SAME = {"data_id": "toy", "semantics": 2}
SPECS = [*make_specs(4), make_spec(log2_lr=-1)]  # the last diverges
LOST = make_spec(seed=77)


@pytest.fixture
def parent_dir(tmp_path):
    """Four finished runs, one diverged, one failed."""
    folder = tmp_path / "parent"
    with Ledger.open(folder, PLAN, create=True) as ledger:
        for spec in SPECS:
            store_curve(folder, spec.id, outcome(spec)[1])
            ledger.commit(spec, outcome(spec)[0])
        failed = dataclasses.replace(
            outcome(LOST)[0], status="failed", loss_nats=None, reason="lost 3 times"
        )
        ledger.commit(LOST, failed)
    return folder


def forked(child_dir, parent_dir):
    parent = read_parent(child_dir, parent_dir, SAME)
    with Ledger.open(child_dir, PLAN | {"seed": 2}, create=True) as ledger:
        return import_runs(ledger, child_dir, parent, parent_dir)


def test_what_ended_well_is_an_outcome_here_and_no_spend(tmp_path, parent_dir):
    child_dir = tmp_path / "child"
    assert forked(child_dir, parent_dir) == ImportedRecords(num_runs=5, num_known=0, damaged=())
    child, parent = Ledger.read(child_dir), Ledger.read(parent_dir)
    assert dict(child.results()) == {spec.id: outcome(spec)[0] for spec in SPECS}
    assert child.runs() == parent.runs()[:5]
    assert child.imported() == {spec.id for spec in SPECS}
    assert LOST.id not in child.results()
    assert list(child.own_results()) == [], "it cost nothing"
    (record,) = child.records("fork")
    assert record.body == {"parent": str(parent_dir), "head_hash": parent.head_hash, "num_runs": 5}
    assert record.seq < child.records("imported")[0].seq, "what is taken over names its origin"
    for spec in SPECS:
        assert load_curve(child_dir, child.results()[spec.id]) == outcome(spec)[1]


def test_again_it_adds_nothing(tmp_path, parent_dir):
    """What cuts it short at any call is in test_ledger_faults.py."""
    first, again = (forked(tmp_path / "child", parent_dir) for _ in range(2))
    assert (first.num_runs, again) == (5, ImportedRecords(num_runs=0, num_known=5, damaged=()))
    assert len(Ledger.read(tmp_path / "child").records("fork")) == 1


def test_a_damaged_curve_stays_behind_and_is_named(tmp_path, parent_dir):
    curve_path(parent_dir, SPECS[1].id).write_bytes(b"")
    curve_path(parent_dir, SPECS[2].id).unlink()
    found = forked(tmp_path / "child", parent_dir)
    assert found.num_runs == 3
    assert [SPECS[1].id in found.damaged[0], SPECS[2].id in found.damaged[1]] == [True, True]
    child = Ledger.read(tmp_path / "child")
    assert SPECS[1].id not in child.results()
    assert not curve_path(tmp_path / "child", SPECS[1].id).exists()


def test_the_study_itself_is_no_parent(tmp_path, parent_dir):
    (tmp_path / "link").symlink_to(parent_dir)
    (tmp_path / "hard").mkdir()
    (tmp_path / "hard" / LEDGER_NAME).hardlink_to(parent_dir / LEDGER_NAME)
    for folder in (parent_dir, tmp_path / "link", tmp_path / "hard"):
        with pytest.raises(ForkRefused, match="this is the same study"):
            read_parent(folder, parent_dir, SAME)


def test_runs_of_another_meaning_are_refused(tmp_path, parent_dir):
    with pytest.raises(ForkRefused, match="data_id is 'toy' there and 'other' here"):
        read_parent(tmp_path / "child", parent_dir, SAME | {"data_id": "other"})
    with pytest.raises(ForkRefused, match="semantics is 2 there and 3 here"):
        read_parent(tmp_path / "child", parent_dir, SAME | {"semantics": 3})


def test_what_was_pruned_stays_there_and_its_whole_comes_over(tmp_path):
    """A pruned run has lost against the parent's runs; here it may win."""
    parent_dir, child_dir = tmp_path / "parent", tmp_path / "child"
    with Ledger.open(parent_dir, PLAN, create=True) as ledger:
        for spec in SPECS[:2]:
            ledger.commit(spec, pruned_outcome(spec, 2)[0])
        store_curve(parent_dir, SPECS[1].id, outcome(SPECS[1])[1])
        ledger.commit(SPECS[1], outcome(SPECS[1])[0])
    assert forked(child_dir, parent_dir) == ImportedRecords(num_runs=1, num_known=0, damaged=())
    child = Ledger.read(child_dir)
    assert dict(child.first_results()) == {SPECS[1].id: outcome(SPECS[1])[0]}
