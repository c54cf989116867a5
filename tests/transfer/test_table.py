import math

import pyarrow
import pytest
from pyarrow import parquet

from transfer.table import TableError, read_runs
from transfer.verdict import judge

# GPT-speedrun-TPU, docs/HYPERPARAMETER_TRANSFER.md, batch 128; parameters stand for width. 250M: 3 seeds, whose
# spread (.0063, .0188, .0054, .0015) is given back as mean - sd, mean, mean + sd.
SPEEDRUN = """width,lr,loss,seed,batch
60000000,0.015625,4.1161,0,128
60000000,0.0078125,4.1469,0,128
60000000,0.00390625,4.0143,0,128
60000000,0.001953125,4.0546,0,128
60000000,0.0009765625,4.2304,0,128
125000000,0.0078125,3.7135,0,128
125000000,0.00390625,3.6823,0,128
125000000,0.001953125,3.7269,0,128
""" + "".join(
    f"250000000,{lr},{mean + k * sd:.5f},{k + 1},128\n"
    for lr, mean, sd in (
        (2**-6, 3.48843, 0.0063), (2**-7, 3.44372, 0.0188), (2**-8, 3.42985, 0.0054), (2**-9, 3.47398, 0.0015),
    )
    for k in (-1, 0, 1)
)  # fmt: skip


def write(path, text):
    path.write_text(text)
    return path


def test_a_published_grid_with_a_spike_and_a_short_row_cannot_be_told(tmp_path):
    points = read_runs(write(tmp_path / "runs.csv", SPEEDRUN)).points
    assert len(points) == 20
    found = judge(points, target_width=500_000_000, base_width=60_000_000, transferred_log2_lr=-8.0)
    assert found.outcome == "cannot_tell"
    assert found.optima[1].status == "too_few"
    assert any(s.width == 125_000_000 for s in found.what_to_run)


def test_csv_jsonl_and_parquet_read_alike(tmp_path):
    rows = [(32, 0.01, 2.5, 0), (32, 0.02, math.nan, 1), (64, 0.01, math.inf, 0)]
    csv = "width,lr,loss,seed,note\n" + "".join(f"{w},{lr},{loss},{s},x\n" for w, lr, loss, s in rows)
    jsonl = '{"width": 32, "lr": 0.01, "loss": 2.5, "seed": 0}\n\n{"width": 32, "lr": 0.02, "loss": NaN, "seed": 1}\n'
    jsonl += '{"width":64,"lr":0.01,"loss":Infinity,"seed":0}\n'
    columns = dict(zip(("width", "lr", "loss", "seed"), map(list, zip(*rows, strict=True)), strict=True))
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    tables = [
        read_runs(write(tmp_path / "a.csv", csv)), read_runs(write(tmp_path / "a.jsonl", jsonl)),
        read_runs(tmp_path / "a.parquet"),
    ]  # fmt: skip
    assert tables[0] == tables[1] == tables[2]
    assert [p.loss_nats for p in tables[0].points] == [2.5, None, None]


def test_optima_are_read_too(tmp_path):
    found = read_runs(write(tmp_path / "o.csv", "width, lr_optimum\n128, 0.5\n256, 0.25\n"))
    assert found.optima == ((128, -1.0), (256, -2.0)) and found.points == ()


def test_every_bad_cell_is_named_at_once(tmp_path):
    text = "width,lr,loss,seed\n32,0.01,2.5,0\nwide,-1,two,0.5\n32,nan,,0\n"
    with pytest.raises(TableError) as caught:
        read_runs(write(tmp_path / "bad.csv", text))
    said = caught.value.problems
    assert [p.split(":")[0] for p in said] == [
        *(f"row 3, column {name}" for name in ("width", "lr", "loss", "seed")),
        *(f"row 4, column {name}" for name in ("lr", "loss")),
    ]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "said"), [
    ("a.txt", "width,lr,loss\n", "suffix"),
    ("a.csv", "", "no rows"),
    ("a.csv", "width,lr,loss\n", "no rows"),
    ("a.csv", "width,loss\n32,2\n", "no column lr"),
    ("a.csv", "wide\n32\n", "no column width, lr_optimum"),
    ("a.csv", 'width,lr,loss\n32,"0.1,2\n', "row"),
    ("a.csv", "width,lr,loss\n32,0.1\n", "row 2, column loss"),
    ("a.jsonl", "[1]\n{\n", "row 1: a list.*row 2: not JSON"),
    ("a.parquet", "no parquet", "not a parquet file"),
])  # fmt: skip
def test_unreadable_tables_are_refused_in_a_sentence(tmp_path, name, text, said):
    with pytest.raises(TableError, match=said):
        read_runs(write(tmp_path / name, text))


def test_text_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"width,lr,loss\n32,0.1,\xff\xfe\n")
    with pytest.raises(TableError, match="not UTF-8"):
        read_runs(path)
