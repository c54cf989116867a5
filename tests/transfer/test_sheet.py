import math

import pyarrow
import pytest
from pyarrow import parquet

from transfer.tables.sheet import MOST_PROBLEMS, TableError, read_sheet
from transfer.tables.table import read_runs


def write(path, text):
    path.write_text(text)
    return path


def test_csv_jsonl_and_parquet_read_alike(tmp_path):
    rows = [(32, 0.01, 2.5, 0), (32, 0.02, math.nan, 1), (64, 0.01, math.inf, 0)]
    csv = "width,lr,loss,seed,note\n" + "".join(f"{w},{lr},{loss},{s},x\n" for w, lr, loss, s in rows)
    jsonl = '{"width": 32, "lr": 0.01, "loss": 2.5, "seed": 0, "note": "x"}\n\n'
    jsonl += '{"width": 32, "lr": 0.02, "loss": NaN, "seed": 1}\n{"width":64,"lr":0.01,"loss":Infinity,"seed":0}\n'
    columns = dict(zip(("width", "lr", "loss", "seed"), map(list, zip(*rows, strict=True)), strict=True))
    parquet.write_table(pyarrow.table({**columns, "note": ["x"] * 3}), tmp_path / "a.parquet")
    tables = [
        read_runs(write(tmp_path / "a.csv", csv)), read_runs(write(tmp_path / "a.jsonl", jsonl)),
        read_runs(tmp_path / "a.parquet"),
    ]  # fmt: skip
    assert tables[0] == tables[1] == tables[2]
    assert [p.loss_nats for p in tables[0].points] == [2.5, None, None]
    assert "columns ignored: note" in tables[0].notes


def test_of_a_parquet_file_only_known_columns_are_read(tmp_path):
    parquet.write_table(pyarrow.table({"width": [32], "huge": ["x"]}), tmp_path / "a.parquet")
    sheet = read_sheet(tmp_path / "a.parquet", {"width", "lr"})
    assert sheet.names == ("width", "huge")
    assert sheet.rows == ((2, {"width": 32}),)


@pytest.mark.parametrize(("name", "text", "said"), [
    ("a.txt", "width,lr,loss\n", "suffix"),
    ("a.csv", "", "no rows"),
    ("a.csv", "width,lr,loss\n", "no rows"),
    ("a.csv", "width,lr,lr,loss\n32,1,1,1\n", "the column 'lr' is there twice"),
    ("a.csv", 'width,lr,loss\n32,"0.1,2\n', "row"),
    ("a.jsonl", "[1]\n{\n", "row 1 is a list.*row 2 is not JSON"),
    ("a.parquet", "no parquet", "no Parquet file"),
])  # fmt: skip
def test_unreadable_tables_are_refused_in_a_sentence(tmp_path, name, text, said):
    with pytest.raises(TableError, match=said):
        read_sheet(write(tmp_path / name, text), set())


def test_text_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"width,lr,loss\n32,0.1,\xff\xfe\n")
    with pytest.raises(TableError, match="not UTF-8"):
        read_sheet(path, set())


def test_of_very_many_problems_the_number_is_said(tmp_path):
    text = "width,lr,loss\n" + "32,0.1,\n" * (MOST_PROBLEMS + 7)
    with pytest.raises(TableError, match="and 7 more") as caught:
        read_runs(write(tmp_path / "a.csv", text))
    assert len(caught.value.problems) == MOST_PROBLEMS + 7
