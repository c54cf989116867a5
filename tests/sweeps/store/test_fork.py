"""Tests of a study that takes over the finished runs of another one."""

import dataclasses

import pytest
from sweep_fakes import make_outcome, make_pruned_outcome, make_spec, make_specs

from forerun._sweeps.store.curves import get_curve_path, load_curve, store_curve
from forerun._sweeps.store.errors import ForkRefused
from forerun._sweeps.store.fork import ImportedRecords, import_runs, read_parent
from forerun._sweeps.store.ledger import LEDGER_NAME, Ledger

PLAN = {"data_id": "toy", "semantics": 2, "seed": 1}
MEANING = {"data_id": "toy", "semantics": 2}
# The last run diverges.
SPECS = [*make_specs(4), make_spec(log2_lr=-1)]
FAILED_SPEC = make_spec(seed=77)


@pytest.fixture
def parent_dir(tmp_path):
    """Write a study with four finished runs, one diverged and one failed; return its folder."""
    folder = tmp_path / "parent"
    with Ledger.open(folder, PLAN, create=True) as ledger:
        for spec in SPECS:
            store_curve(folder, spec.id, make_outcome(spec)[1])
            ledger.commit(spec, make_outcome(spec)[0])
        failed = dataclasses.replace(
            make_outcome(FAILED_SPEC)[0], status="failed", loss_nats=None, reason="lost 3 times"
        )
        ledger.commit(FAILED_SPEC, failed)
    return folder


def fork_study(child_dir, parent_dir):
    """Import the runs of a parent into a child study."""
    parent = read_parent(child_dir, parent_dir, MEANING)
    with Ledger.open(child_dir, PLAN | {"seed": 2}, create=True) as ledger:
        return import_runs(ledger, child_dir, parent, parent_dir)


def test_finished_and_diverged_runs_are_imported_at_no_cost(tmp_path, parent_dir):
    child_dir = tmp_path / "child"
    assert fork_study(child_dir, parent_dir) == ImportedRecords(num_runs=5, num_known=0, damaged=())
    child, parent = Ledger.read(child_dir), Ledger.read(parent_dir)
    assert dict(child.get_results()) == {spec.id: make_outcome(spec)[0] for spec in SPECS}
    assert child.read_runs() == parent.read_runs()[:5]
    assert child.read_imported_ids() == {spec.id for spec in SPECS}
    assert FAILED_SPEC.id not in child.get_results()
    assert list(child.get_own_results()) == [], "imported runs are not the study's own spend"
    (record,) = child.read_records("fork")
    assert record.body == {"parent": str(parent_dir), "head_hash": parent.head_hash, "num_runs": 5}
    assert record.seq < child.read_records("imported")[0].seq, (
        "the origin is recorded before the imported runs"
    )
    for spec in SPECS:
        assert load_curve(child_dir, child.get_results()[spec.id]) == make_outcome(spec)[1]


def test_second_import_adds_nothing(tmp_path, parent_dir):
    """test_ledger_faults.py interrupts an import at any call."""
    first = fork_study(tmp_path / "child", parent_dir)
    second = fork_study(tmp_path / "child", parent_dir)
    assert first.num_runs == 5
    assert second == ImportedRecords(num_runs=0, num_known=5, damaged=())
    assert len(Ledger.read(tmp_path / "child").read_records("fork")) == 1


def test_run_with_a_damaged_curve_is_not_imported_and_is_named(tmp_path, parent_dir):
    get_curve_path(parent_dir, SPECS[1].id).write_bytes(b"")
    get_curve_path(parent_dir, SPECS[2].id).unlink()
    imported = fork_study(tmp_path / "child", parent_dir)
    assert imported.num_runs == 3
    assert SPECS[1].id in imported.damaged[0] and SPECS[2].id in imported.damaged[1]
    child = Ledger.read(tmp_path / "child")
    assert SPECS[1].id not in child.get_results()
    assert not get_curve_path(tmp_path / "child", SPECS[1].id).exists()


def test_study_cannot_be_its_own_parent(tmp_path, parent_dir):
    (tmp_path / "link").symlink_to(parent_dir)
    (tmp_path / "hard").mkdir()
    (tmp_path / "hard" / LEDGER_NAME).hardlink_to(parent_dir / LEDGER_NAME)
    for folder in (parent_dir, tmp_path / "link", tmp_path / "hard"):
        with pytest.raises(ForkRefused, match="this is the same study"):
            read_parent(folder, parent_dir, MEANING)


def test_runs_of_other_data_or_semantics_are_refused(tmp_path, parent_dir):
    with pytest.raises(ForkRefused, match="data_id is 'toy' there and 'other' here"):
        read_parent(tmp_path / "child", parent_dir, MEANING | {"data_id": "other"})
    with pytest.raises(ForkRefused, match="semantics is 2 there and 3 here"):
        read_parent(tmp_path / "child", parent_dir, MEANING | {"semantics": 3})


def test_pruned_runs_are_not_imported(tmp_path):
    """The parent pruned a run by comparison with its other runs, and the run might win in the
    child. If the parent also trained a run to its end, that result is imported.
    """
    parent_dir, child_dir = tmp_path / "parent", tmp_path / "child"
    with Ledger.open(parent_dir, PLAN, create=True) as ledger:
        for spec in SPECS[:2]:
            ledger.commit(spec, make_pruned_outcome(spec, 2)[0])
        store_curve(parent_dir, SPECS[1].id, make_outcome(SPECS[1])[1])
        ledger.commit(SPECS[1], make_outcome(SPECS[1])[0])
    assert fork_study(child_dir, parent_dir) == ImportedRecords(num_runs=1, num_known=0, damaged=())
    child = Ledger.read(child_dir)
    assert dict(child.get_first_results()) == {SPECS[1].id: make_outcome(SPECS[1])[0]}
