"""A study as a table."""

import dataclasses
import math

import pyarrow.csv
import pyarrow.parquet
import pytest
import sweep_fakes
from sweep_fakes import outcome, pruned_outcome

import sweeps
from proxies.core.spec import Run
from sweeps.store.curves import store_curve
from sweeps.store.errors import DiskFull, SweepError
from sweeps.store.ledger import Ledger

RATES = (-9.0, -7.0, -5.0)
"""log2; the last one diverges."""
PLAN = {"search": {"seed": 0}, "proxy": {"num_steps": 4, "batch_tokens": 16}}
"""What tells a trial from other runs."""


def make_spec(warmup_steps=1, **what):
    spec = sweep_fakes.make_spec(**what)
    return dataclasses.replace(spec, schedule=dataclasses.replace(spec.schedule, warmup_steps=warmup_steps))


def add_trial(ledger, study, index, log2_lr, *, ended=True):
    point = {"learning_rate": 2.0**log2_lr, "clip_norm": 1.0, "warmup_fraction": 0.1}
    ledger.append("suggestion", f"search/{index}", point)
    if ended:
        commit(ledger, study, make_spec(log2_lr=log2_lr))


def commit(ledger, study, spec):
    result, curve = outcome(spec)
    store_curve(study, spec.id, curve)
    ledger.commit(spec, result)


@pytest.fixture
def study(tmp_path):
    with Ledger.open(tmp_path, PLAN, create=True) as ledger:
        for index, log2_lr in enumerate(RATES):
            add_trial(ledger, tmp_path, index, log2_lr)
        commit(ledger, tmp_path, make_spec(log2_lr=-7.0, seed=5))  # a replicate: no trial of the search
        commit(ledger, tmp_path, make_spec(log2_lr=-7.0, width=64))
        add_trial(ledger, tmp_path, 3, -8.0, ended=False)
    return tmp_path


def test_a_row_for_every_run(study):
    frame = sweeps.load(study).trials()
    assert len(frame) == 5
    assert frame["status"].tolist() == ["finished", "finished", "diverged", "finished", "finished"]
    assert frame["trial"].tolist()[:3] == [0, 1, 2] and frame["trial"].isna().tolist() == [False] * 3 + [True] * 2
    assert frame["width"].tolist() == [32, 32, 32, 32, 64]
    assert frame["seed"].tolist() == [0, 0, 0, 5, 0]
    best = frame.loc[frame["loss_nats"].idxmin()]
    assert math.log2(best["learning_rate"]) == -7.0


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


def test_a_pruned_trial_is_a_row_with_its_step(study):
    """Also when its run has been run whole for another stage: then that is a row of its own, and no trial."""
    spec = make_spec(log2_lr=-8.0)  # trial 3
    result, curve = pruned_outcome(spec, 2)
    with Ledger.open(study, PLAN, create=False) as ledger:
        store_curve(study, spec.id, curve, pruned=True)
        ledger.commit(spec, result)
        (row,) = sweeps.load(study).trials().query("status == 'pruned'").to_dict("records")
        assert (row["trial"], row["num_steps"], row["planned_steps"], row["reason"]) == (3, 2, 4, "looked at")
        commit(ledger, study, spec)
    view = sweeps.load(study)
    rows = view.trials().query(f"run_id == '{spec.id}'")
    assert rows["status"].tolist() == ["pruned", "finished"] and rows["trial"].isna().tolist() == [False, True]
    assert view.curve(spec.id) == outcome(spec)[1]


def test_a_trial_is_told_from_all_that_is_like_it(tmp_path):
    """What a fork took over may have other steps, seeds or numerics; trials of a grid differ in their warmup alone."""
    with Ledger.open(tmp_path, PLAN, create=True) as ledger:
        for spec in (make_spec(num_steps=8), make_spec(seed=1), make_spec(num_slots=5)):
            store_curve(tmp_path, spec.id, outcome(spec)[1])
            ledger.append("imported", spec.id, Run(spec=spec, result=outcome(spec)[0]))
        for index, (warmup_steps, share) in enumerate(((1, 0.02), (2, 0.5), (3, 0.75))):
            point = {"learning_rate": 2.0**-8, "clip_norm": 1.0, "warmup_fraction": share}
            ledger.append("suggestion", f"search/{index}", point)
            if index < 2:
                commit(ledger, tmp_path, make_spec(warmup_steps))
    frame = sweeps.load(tmp_path).trials()
    assert frame["trial"].tolist()[-2:] == [0, 1] and frame["trial"].isna().tolist() == [True] * 3 + [False] * 2
    assert frame["warmup_steps"].tolist()[-2:] == [1, 2] and not frame["imported"].tolist()[-2]
