"""Tests of how a table of runs or of optima is read, and of how bad cells are reported."""

import pytest

from forerun._proxies.core.tables.table_files import TableError


def test_runs_become_points(read_table):
    table = read_table(
        "width, lr, loss, seed, host\n32, 0.25, 2.5, 3, a\n64, 0.5, diverged, 4, b\n"
    )
    assert [(p.size, p.log2_value, p.loss_nats, p.seed) for p in table.points] == [
        (32, -2, 2.5, 3),
        (64, -1, None, 4),
    ]
    assert (table.axis, table.hyperparameter, table.optima) == ("width", "learning_rate", ())
    assert table.notes == (
        "judged: learning_rate (column lr) over width (column width)",
        "columns ignored: host",
    )


def test_optima_are_read(read_table):
    table = read_table("n_layer, lr_optimum\n128, 0.5\n256, 0.25\n")
    assert table.optima == ((128, -1.0), (256, -2.0)) and table.points == ()


def test_every_bad_cell_is_named_at_once(read_table):
    text = "width,lr,loss,seed\n32,0.01,2.5,0\nwide,-1,two,0.5\n32,nan,,0\n0,0,0,-1\n"
    with pytest.raises(TableError) as caught:
        read_table(text)
    assert [p.split(":")[0] for p in caught.value.problems] == [
        *(f"row 3, column {name}" for name in ("width", "lr", "loss", "seed")),
        *(f"row 4, column {name}" for name in ("lr", "loss")),
        *(f"row 5, column {name}" for name in ("width", "lr", "loss", "seed")),
    ]


def test_runs_with_the_hyperparameter_off_are_unused_and_reported(read_table):
    text = "width,clip,loss\n" + "".join(f"{w},{c},3\n" for w in (32, 64) for c in (0, 0.5, 1))
    table = read_table(text)
    assert [p.log2_value for p in table.points] == [-1, 0, -1, 0]
    assert "2 runs not used: clip = 0 means off and has no logarithm" in table.notes
    with pytest.raises(TableError, match="every clip is 0"):
        read_table("width,clip,loss\n32,0,3\n64,0,3\n")


@pytest.mark.parametrize(
    "text",
    ["", "width,lr,loss\n", "width,lr,lr,loss\n32,1,1,1\n", 'width,lr,loss\n32,"0.1,2\n'],
    ids=["empty", "no rows", "column twice", "open quote"],
)
def test_unreadable_table_is_refused(read_table, text):
    with pytest.raises(TableError):
        read_table(text)


@pytest.mark.parametrize(
    ("column", "cell"),
    [
        ("loss", "-1"),
        ("loss", "crashed"),
        ("width", "1.5"),
        ("width", "9" * 400),
        ("lr", "0"),
        ("beta2", "1"),
    ],
)
def test_invalid_number_in_a_cell_is_refused(read_table, column, cell):
    row = {"width": "32", "loss": "3"}
    if column != "beta2":
        row["lr"] = "0.1"  # A table needs one hyperparameter, and beta2 is one
    row[column] = cell
    with pytest.raises(TableError, match=f"row 2, column {column}: "):
        read_table(",".join(row) + "\n" + ",".join(row.values()) + "\n")
