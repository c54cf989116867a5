"""A study as a table."""

import math

import pyarrow.csv
import pyarrow.parquet
import pytest
from sweep_fakes import make_spec, outcome, pruned_outcome

import sweeps
from sweeps.store.curves import store_curve
from sweeps.store.errors import DiskFull, SweepError
from sweeps.store.ledger import Ledger


def commit(ledger, study, spec):
    result, curve = outcome(spec)
    store_curve(study, spec.id, curve)
    ledger.commit(spec, result)


@pytest.fixture
def study(tmp_path):
    """The last rate diverges, one run is pruned, one is of another size."""
    with Ledger.open(tmp_path, {}, create=True) as ledger:
        for log2_lr in (-9.0, -7.0, -5.0):
            commit(ledger, tmp_path, make_spec(log2_lr=log2_lr))
        ledger.commit(make_spec(log2_lr=-8.0), pruned_outcome(make_spec(log2_lr=-8.0), 2)[0])
        commit(ledger, tmp_path, make_spec(log2_lr=-7.0, width=64))
    return tmp_path


def test_a_row_for_every_run(study):
    frame = sweeps.load(study).trials()
    assert frame["status"].tolist() == ["finished", "finished", "diverged", "pruned", "finished"]
    assert frame["num_steps"].tolist() == [4, 4, 4, 2, 4] and set(frame["planned_steps"]) == {4}
    assert frame["width"].tolist() == [32, 32, 32, 32, 64]
    assert math.log2(frame.loc[frame["loss_nats"].idxmin()]["learning_rate"]) == -7.0


def test_the_table_survives_its_files(study, tmp_path):
    view = sweeps.load(str(study))
    view.write(tmp_path / "t.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "t.parquet").equals(view.table())
    view.write(tmp_path / "t.csv")
    back = pyarrow.csv.read_csv(tmp_path / "t.csv")
    assert back.column_names == view.table().column_names
    assert back["learning_rate"].to_pylist() == view.table()["learning_rate"].to_pylist()
    with pytest.raises(SweepError, match=r"\.parquet or \.csv"):
        view.write(tmp_path / "t.xlsx")
    with pytest.raises(DiskFull, match="name a folder"):
        view.write(tmp_path / "missing" / "t.csv")
