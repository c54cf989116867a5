import pytest

from transfer.tables.cells import TableError


def test_runs_become_points(read):
    found = read("width, lr, loss, seed, host\n32, 0.25, 2.5, 3, a\n64, 0.5, diverged, 4, b\n")
    assert [(p.size, p.log2_value, p.loss_nats, p.seed) for p in found.points] == [
        (32, -2, 2.5, 3),
        (64, -1, None, 4),
    ]
    assert (found.axis, found.hyperparameter, found.optima) == ("width", "learning_rate", ())
    assert found.notes == (
        "judged: learning_rate (column lr) over width (column width)",
        "columns ignored: host",
    )


def test_optima_are_read(read):
    found = read("n_layer, lr_optimum\n128, 0.5\n256, 0.25\n")
    assert found.optima == ((128, -1.0), (256, -2.0)) and found.points == ()


def test_every_bad_cell_is_named_at_once(read):
    text = "width,lr,loss,seed\n32,0.01,2.5,0\nwide,-1,two,0.5\n32,nan,,0\n0,0,0,-1\n"
    with pytest.raises(TableError) as caught:
        read(text)
    assert [p.split(":")[0] for p in caught.value.problems] == [
        *(f"row 3, column {name}" for name in ("width", "lr", "loss", "seed")),
        *(f"row 4, column {name}" for name in ("lr", "loss")),
        *(f"row 5, column {name}" for name in ("width", "lr", "loss", "seed")),
    ]


def test_what_is_off_is_left_aside_and_said(read):
    text = "width,clip,loss\n" + "".join(f"{w},{c},3\n" for w in (32, 64) for c in (0, 0.5, 1))
    found = read(text)
    assert [p.log2_value for p in found.points] == [-1, 0, -1, 0]
    assert "2 runs not used: clip = 0 means off, which has no octave" in found.notes
    with pytest.raises(TableError, match="every clip is 0"):
        read("width,clip,loss\n32,0,3\n64,0,3\n")


@pytest.mark.parametrize(
    "text", ["", "width,lr,loss\n", "width,lr,lr,loss\n32,1,1,1\n", 'width,lr,loss\n32,"0.1,2\n']
)
def test_an_unreadable_table_is_refused(read, text):
    with pytest.raises(TableError):
        read(text)


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
def test_a_cell_that_is_no_such_number_is_refused(read, column, cell):
    row = (
        {"width": "32", "loss": "3"}
        | ({} if column in ("beta2", "clip") else {"lr": "0.1"})
        | {column: cell}
    )
    with pytest.raises(TableError, match=f"row 2, column {column}: "):
        read(",".join(row) + "\n" + ",".join(row.values()) + "\n")
