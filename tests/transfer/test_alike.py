import itertools

import pytest

from transfer.tables.cells import TableError


@pytest.fixture
def table(read):
    def table(columns, rows, **question):
        text = "\n".join([columns, *(",".join(map(str, row)) for row in rows)])
        return read(text, hyperparameter="learning_rate", **question)

    return table


def grid(*values):
    return [(*cells, 3.0) for cells in itertools.product(*values)]


def test_the_largest_slice_is_judged_and_the_rest_is_said(table):
    rows = (
        grid((32, 64), (0.1, 0.2), (1,))
        + grid((32, 64, 128), (0.1, 0.2), (0.5,))
        + grid((256,), (0.1,), (4,))
    )
    found = table("width,lr,clip,loss", rows)
    assert sorted({p.size for p in found.points}) == [32, 64, 128] and len(found.points) == 6
    assert found.notes[-1] == (
        "6 of 11 runs are judged, those at clip 0.5; the others are not used"
    )


def test_no_two_sizes_alike_are_refused(table):
    rows = [(w, 0.1, 1 + i, 3) for i, w in enumerate((32, 64, 32, 64))]
    with pytest.raises(TableError, match="no two sizes agree in clip: "):
        table("width,lr,clip,loss", rows)


def test_what_changes_with_the_size_goes_along_and_is_said(table):
    """Weight decay as 1/width, and parameters of a shape: with them held there would be one width a
    slice.
    """
    rows = [
        (w, w * w * d, d, 3.2 / w, lr, 3) for w in (32, 64, 128) for d in (2, 4) for lr in (1, 2)
    ]
    found = table("width,params,depth,wd,lr,loss", rows, axis="width")
    assert len(found.points) == 6
    assert "those at depth 2" in found.notes[-2]
    assert found.notes[-1].startswith("params, wd changes together with width: ")


def test_a_whole_family_grows_in_parameters(table):
    family = ((60, 384, 12), (125, 640, 12), (250, 896, 16))
    rows = [(*shape, 5 * shape[0], lr, 3) for shape in family for lr in (1, 2)]
    columns = "params,width,depth,tokens,lr,loss"
    assert len(table(columns, rows, axis="params").points) == 6
    # Depth is no consequence of width: at 12 layers there are two sizes, and the third is left
    # aside.
    assert len(table(columns, rows, axis="width").points) == 4
