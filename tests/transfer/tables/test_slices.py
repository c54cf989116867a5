"""Tests of how comparable runs are chosen from a table in which other factors vary as well."""

import itertools

import pytest

from forerun._proxies.core.tables.table_files import TableError


@pytest.fixture
def read_rows(read_table):
    """A function that reads a table of learning rates from its columns and rows."""

    def read_rows(columns, rows, **question):
        text = "\n".join([columns, *(",".join(map(str, row)) for row in rows)])
        return read_table(text, hyperparameter="learning_rate", **question)

    return read_rows


def list_grid_rows(*values):
    """Return one row with loss 3 for each combination of the values."""
    return [(*cells, 3.0) for cells in itertools.product(*values)]


def test_largest_slice_is_judged_and_unused_runs_are_reported(read_rows):
    rows = (
        list_grid_rows((32, 64), (0.1, 0.2), (1,))
        + list_grid_rows((32, 64, 128), (0.1, 0.2), (0.5,))
        + list_grid_rows((256,), (0.1,), (4,))
    )
    table = read_rows("width,lr,clip,loss", rows)
    assert sorted({p.size for p in table.points}) == [32, 64, 128] and len(table.points) == 6
    assert table.notes[-1] == (
        "6 of 11 runs are judged, those at clip 0.5; the others are not used"
    )


def test_table_without_two_comparable_sizes_is_refused(read_rows):
    rows = [(w, 0.1, 1 + i, 3) for i, w in enumerate((32, 64, 32, 64))]
    with pytest.raises(TableError, match="no two sizes agree in clip: "):
        read_rows("width,lr,clip,loss", rows)


def test_factors_that_follow_the_size_are_kept_and_reported(read_rows):
    """The weight decay is 1/width, and the parameters follow from the shape. If runs had to agree
    in these two columns, no two widths could be compared.
    """
    rows = [
        (w, w * w * d, d, 3.2 / w, lr, 3) for w in (32, 64, 128) for d in (2, 4) for lr in (1, 2)
    ]
    table = read_rows("width,params,depth,wd,lr,loss", rows, axis="width")
    assert len(table.points) == 6
    assert "those at depth 2" in table.notes[-2]
    assert table.notes[-1].startswith("params, wd changes together with width: ")


def test_sizes_of_a_family_are_compared_by_parameters(read_rows):
    family = ((60, 384, 12), (125, 640, 12), (250, 896, 16))
    rows = [(*shape, 5 * shape[0], lr, 3) for shape in family for lr in (1, 2)]
    columns = "params,width,depth,tokens,lr,loss"
    assert len(read_rows(columns, rows, axis="params").points) == 6
    # Depth does not follow from width: two sizes have 12 layers, and the third is not used
    assert len(read_rows(columns, rows, axis="width").points) == 4
