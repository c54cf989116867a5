"""Tests of a study's runs as a table."""

import math

import pyarrow.csv
import pyarrow.parquet
import pytest
from sweep_fakes import make_outcome, make_pruned_outcome, make_spec

from forerun._sweeps.store import view
from forerun._sweeps.store.curves import store_curve
from forerun._sweeps.store.errors import DiskFull, SweepError
from forerun._sweeps.store.ledger import Ledger
from forerun._sweeps.store.view import StudyView


def commit(ledger, study, spec):
    result, curve = make_outcome(spec)
    store_curve(study, spec.id, curve)
    ledger.commit(spec, result)


@pytest.fixture
def study(tmp_path):
    """Make a study in which the last rate diverges, one run is pruned, and one has another width;
    return its folder.
    """
    with Ledger.open(tmp_path, {}, create=True) as ledger:
        for log2_lr in (-9.0, -7.0, -5.0):
            commit(ledger, tmp_path, make_spec(log2_lr=log2_lr))
        ledger.commit(make_spec(log2_lr=-8.0), make_pruned_outcome(make_spec(log2_lr=-8.0), 2)[0])
        commit(ledger, tmp_path, make_spec(log2_lr=-7.0, width=64))
    return tmp_path


def test_table_has_a_row_for_every_run(study):
    frame = StudyView(study).trials()
    assert frame["status"].tolist() == ["finished", "finished", "diverged", "pruned", "finished"]
    assert frame["num_steps"].tolist() == [4, 4, 4, 2, 4] and set(frame["planned_steps"]) == {4}
    assert frame["width"].tolist() == [32, 32, 32, 32, 64]
    assert math.log2(frame.loc[frame["loss_nats"].idxmin()]["learning_rate"]) == -7.0


def test_every_column_has_its_value_in_a_row(study):
    run = Ledger.read(study).read_runs()[0]
    assert list(view._make_row(run, False)) == list(view._COLUMNS)


def test_table_is_restored_from_its_files(study, tmp_path):
    study_view = StudyView(study)
    study_view.write(tmp_path / "t.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "t.parquet").equals(study_view.table())
    study_view.write(tmp_path / "t.csv")
    restored = pyarrow.csv.read_csv(tmp_path / "t.csv")
    assert restored.column_names == study_view.table().column_names
    assert restored["learning_rate"].to_pylist() == study_view.table()["learning_rate"].to_pylist()
    with pytest.raises(SweepError, match=r"\.parquet or \.csv"):
        study_view.write(tmp_path / "t.xlsx")
    with pytest.raises(DiskFull, match="name a folder"):
        study_view.write(tmp_path / "missing" / "t.csv")
