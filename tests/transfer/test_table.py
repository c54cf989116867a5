import math

import pyarrow
import pytest
from pyarrow import parquet

from transfer.tables.sheet import MOST_PROBLEMS, TableError
from transfer.tables.table import read_runs


def read(tmp_path, text, **kwargs):
    path = tmp_path / "runs.csv"
    path.write_text(text)
    return read_runs(path, **kwargs)


def test_runs_become_points(tmp_path):
    found = read(tmp_path, "width, lr, loss, seed, host\n32, 0.25, 2.5, 3, a\n64, 0.5, diverged, 4, b\n")
    assert [(p.size, p.log2_value, p.loss_nats, p.seed) for p in found.points] == [(32, -2, 2.5, 3), (64, -1, None, 4)]
    assert (found.axis, found.hyperparameter, found.optima) == ("width", "learning_rate", ())
    assert found.notes == ("judged: learning_rate (column lr) over width (column width)", "columns ignored: host")


def test_optima_are_read(tmp_path):
    found = read(tmp_path, "n_layer, lr_optimum\n128, 0.5\n256, 0.25\n")
    assert found.optima == ((128, -1.0), (256, -2.0)) and found.points == ()


def test_optima_of_several_depths_are_judged_at_one(tmp_path):
    text = "width,depth,lr_optimum\n" + "".join(f"{w},{d},0.5\n" for w in (64, 128, 256) for d in (2, 4))
    found = read(tmp_path, text, axis="width")
    assert len(found.optima) == 3 and "depth 2" in found.notes[-1]


def test_every_bad_cell_is_named_at_once(tmp_path):
    text = "width,lr,loss,seed\n32,0.01,2.5,0\nwide,-1,two,0.5\n32,nan,,0\n0,0,0,-1\n"
    with pytest.raises(TableError) as caught:
        read(tmp_path, text)
    assert [p.split(":")[0] for p in caught.value.problems] == [
        *(f"row 3, column {name}" for name in ("width", "lr", "loss", "seed")),
        *(f"row 4, column {name}" for name in ("lr", "loss")),
        *(f"row 5, column {name}" for name in ("width", "lr", "loss", "seed")),
    ]


def test_what_is_off_is_left_aside_and_said(tmp_path):
    text = "width,clip,loss\n" + "".join(f"{w},{c},3\n" for w in (32, 64) for c in (0, 0.5, 1))
    found = read(tmp_path, text)
    assert [p.log2_value for p in found.points] == [-1, 0, -1, 0]
    assert "2 runs left aside: clip 0 is off, and at no octave" in found.notes
    with pytest.raises(TableError, match="every clip is 0"):
        read(tmp_path, "width,clip,loss\n32,0,3\n64,0,3\n")


def test_csv_jsonl_and_parquet_read_alike(tmp_path):
    rows = [(32, 0.01, 2.5, 0), (32, 0.02, math.nan, 1), (64, 0.01, math.inf, 0)]
    csv = "width,lr,loss,seed,note\n" + "".join(f"{w},{lr},{loss},{s},x\n" for w, lr, loss, s in rows)
    jsonl = '{"width": 32, "lr": 0.01, "loss": 2.5, "seed": 0, "note": "x"}\n\n'
    jsonl += '{"width": 32, "lr": 0.02, "loss": NaN, "seed": 1}\n{"width":64,"lr":0.01,"loss":Infinity,"seed":0}\n'
    (tmp_path / "runs.jsonl").write_text(jsonl)
    columns = dict(zip(("width", "lr", "loss", "seed"), map(list, zip(*rows, strict=True)), strict=True))
    parquet.write_table(pyarrow.table({**columns, "note": ["x"] * 3}), tmp_path / "runs.parquet")
    found = read(tmp_path, csv)
    assert found == read_runs(tmp_path / "runs.jsonl") == read_runs(tmp_path / "runs.parquet")
    assert [p.loss_nats for p in found.points] == [2.5, None, None]


@pytest.mark.parametrize("text", ["", "width,lr,loss\n", "width,lr,lr,loss\n32,1,1,1\n", 'width,lr,loss\n32,"0.1,2\n'])
def test_an_unreadable_table_is_refused(tmp_path, text):
    with pytest.raises(TableError):
        read(tmp_path, text)


@pytest.mark.parametrize(("column", "cell"), [
    ("loss", "-1"), ("loss", "crashed"), ("width", "1.5"), ("width", "9" * 400), ("lr", "0"), ("beta2", "1"),
])  # fmt: skip
def test_a_cell_that_is_no_such_number_is_refused(tmp_path, column, cell):
    row = {"width": "32", "loss": "3"} | ({} if column in ("beta2", "clip") else {"lr": "0.1"}) | {column: cell}
    with pytest.raises(TableError, match=f"row 2, column {column}: ") as caught:
        read(tmp_path, ",".join(row) + "\n" + ",".join(row.values()) + "\n")
    assert len(str(caught.value)) < 250


def test_of_very_many_problems_the_number_is_said(tmp_path):
    with pytest.raises(TableError, match="and 7 more") as caught:
        read(tmp_path, "width,lr,loss\n" + "32,0.1,\n" * (MOST_PROBLEMS + 7))
    assert len(caught.value.problems) == MOST_PROBLEMS + 7
