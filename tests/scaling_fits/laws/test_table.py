"""Tests of how a table of runs is read: which rows are dropped, what is refused, and how a message
names the place.
"""

import pytest

from forerun._scaling_fits.laws.table import TableError, from_columns, read_runs

GOOD = "params,tokens,loss\n1e6,2e7,3.25\n2000000,4e7,3.0\n"


def _write_file(tmp_path, text, name="runs.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_csv_columns_are_read_and_flops_are_computed(tmp_path):
    table = read_runs(_write_file(tmp_path, GOOD))
    assert table.params.tolist() == [1e6, 2e6]
    assert table.loss.tolist() == [3.25, 3.0]
    assert table.flops.tolist() == [6.0 * 1e6 * 2e7, 6.0 * 2e6 * 4e7]
    assert table.weight.tolist() == [1.0, 1.0]
    assert (table.budget, table.seed, table.dropped, table.flops_given) == (None, None, (), False)


def test_optional_columns_and_a_named_params_column_are_read(tmp_path):
    text = "n_body,params,tokens,loss,flops,budget,weight,seed,note\n9,1,2,3,4,5,6,0,x\n"
    table = read_runs(_write_file(tmp_path, text), columns={"params": "n_body"})
    row = (table.params, table.flops, table.budget, table.weight, table.seed)
    assert [float(column[0]) for column in row] == [9, 4, 5, 6, 0]
    assert table.flops_given


@pytest.mark.parametrize("cell", ["NaN", "-inf"])
def test_non_finite_loss_is_dropped_with_its_file_line(tmp_path, cell):
    table = read_runs(_write_file(tmp_path, f"params,tokens,loss\n1,1,2\n1,1,{cell}\n2,2,1\n"))
    assert table.loss.tolist() == [2.0, 1.0]
    assert [row.row for row in table.dropped] == [3]
    assert "not finite" in table.dropped[0].reason


def test_every_bad_cell_is_reported_at_once(tmp_path):
    text = "params,tokens,loss,weight\n0,1,2,1\n1,-5,2,1\n1,1,abc,1\n1,1,,1\n1,1,2\n1_00,1,0,nan\n1,1,2,1,9\n"  # noqa: E501
    with pytest.raises(TableError) as caught:
        read_runs(_write_file(tmp_path, text))
    messages = caught.value.problems
    expected_parts = [
        ("row 2,", "params", "0.0"),
        ("row 3,", "tokens", "-5"),
        ("row 4,", "loss", "abc"),
        ("row 5,", "loss", "missing"),
        ("row 6,", "weight", "missing"),
        ("row 7,", "params", "1_00"),
        ("row 7,", "loss", "0.0"),
        ("row 7,", "weight", "nan"),
        ("row 8 ", "5 cells", "must have 4"),
    ]
    for parts in expected_parts:
        assert any(all(part in problem for part in parts) for problem in messages), (
            parts,
            messages,
        )
    assert len(messages) == len(expected_parts)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("r.csv", "params,loss\n1,2\n", "no column 'tokens' .it has 'params', 'loss'"),
        ("r.csv", "params,tokens,loss\n1,1,nan\n", "no run with a finite loss .1 dropped"),
        ("r.xlsx", "", "one of .csv, .jsonl, .parquet"),
        ("r.jsonl", '{"params":1,"tokens":1,"loss":"two"}\n', "row 1, column 'loss': 'two'"),
        ("r.jsonl", '{"params":true,"tokens":1,"loss":2}\n', "row 1, column 'params': True"),
    ],
)
def test_error_names_the_place(tmp_path, name, text, message):
    with pytest.raises(TableError, match=message):
        read_runs(_write_file(tmp_path, text, name))


def test_arrays_are_checked():
    with pytest.raises(TableError, match="different lengths"):
        from_columns([1, 2], [1], [2, 2])
    with pytest.raises(TableError, match="row 1 of column 'loss' is nan"):
        from_columns([1, 2], [1, 2], [2, float("nan")])
