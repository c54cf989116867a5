"""Tests of how the columns of a table are recognized by their names, and of how the axis and the
hyperparameter to judge are chosen.
"""

import pytest

from forerun._proxies.core.hyperparameters import HYPERPARAMETERS
from forerun._proxies.core.tables.columns import COLUMN_NAMES
from forerun._proxies.core.tables.table_files import TableError
from forerun._transfer.tables.columns import OPTIMUM_COLUMNS, SIZE_COLUMNS, VALUE_COLUMNS


def test_every_name_of_a_size_is_recognized(read_table):
    for axis, names in SIZE_COLUMNS.items():
        for name in names:
            table = read_table(f"{name},lr,loss\n32,0.1,3\n64,0.1,2\n")
            assert (table.axis, [p.size for p in table.points]) == (axis, [32, 64])


def test_every_name_of_a_hyperparameter_is_recognized(read_table):
    for hyperparameter, names in VALUE_COLUMNS.items():
        if HYPERPARAMETERS[hyperparameter].scale == "log2_complement":
            log2_values = [-1.0, pytest.approx(-0.415, abs=1e-3)]  # of 1 - 0.5 and 1 - 0.25
        else:
            log2_values = [-1.0, -2.0]
        for name in names:
            table = read_table(f"width,{name},loss\n32,0.5,3\n64,0.25,2\n")
            assert table.hyperparameter == hyperparameter
            assert [p.log2_value for p in table.points] == log2_values


def test_every_name_of_an_optimum_is_recognized(read_table):
    """A column of optima takes precedence over a column of losses."""
    hyperparameters = {
        name: hyperparameter
        for hyperparameter, role in OPTIMUM_COLUMNS.items()
        for name in COLUMN_NAMES[role]
    }
    assert {
        "lr_opt",
        "opt_lr",
        "best_lr",
        "wd_opt",
        "batch_size_optimum",
        "optimal_batch",
        "clip_best",
    } <= set(hyperparameters)
    for name, hyperparameter in hyperparameters.items():
        table = read_table(f"params,{name},loss\n1e6,0.5,3\n2e6,0.25,2\n")
        assert table.hyperparameter == hyperparameter, name
        assert (len(table.optima), table.points) == (2, ()), name


REPEATED_SIZES = "width,opt_lr,loss\n32,0.5,3\n32,0.25,2\n64,0.5,3\n64,0.25,2\n"
"""A table in which `opt_lr` may be the optimal learning rate, or the optimizer's learning rate."""


def test_opt_in_a_column_name_is_ambiguous_where_sizes_repeat(read_table):
    with pytest.raises(
        TableError, match="--column learning_rate_optimum=opt_lr or --column learning_rate=opt_lr"
    ):
        read_table(REPEATED_SIZES)


@pytest.mark.parametrize(
    ("role", "kind"), [("learning_rate", "points"), ("learning_rate_optimum", "optima")]
)
def test_user_chooses_the_role_of_an_ambiguous_column(read_table, role, kind):
    assert len(getattr(read_table(REPEATED_SIZES, columns={role: "opt_lr"}), kind)) == 4


@pytest.mark.parametrize(("name", "kind"), [("lr_optimum", "optima"), ("opt/lr", "points")])
def test_optimum_at_the_end_or_a_path_in_a_column_name_is_not_ambiguous(read_table, name, kind):
    assert len(getattr(read_table(REPEATED_SIZES.replace("opt_lr", name)), kind)) == 4


def test_second_column_of_the_same_quantity_is_reported_as_ignored(read_table):
    table = read_table("steps,tokens,lr,loss\n5,64,0.1,3\n9,128,0.1,2\n")
    assert [p.size for p in table.points] == [64, 128]
    assert "columns ignored: steps" in table.notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("width,lr\n32,2\n", r"no column for loss \(or lr_optimum\)"),
        ("wide\n32\n", r"loss \(or lr_optimum\) and size .* and hyperparameter .*found: wide"),
    ],
)
def test_missing_column_is_named(read_table, text, message):
    with pytest.raises(TableError, match=message):
        read_table(text)


FOUR_FACTORS = "width,depth,clip,wd,loss\n" + "".join(
    f"{w},{d},{c},{wd},3\n" for w in (32, 64) for d in (2, 4) for c in (0.5, 1) for wd in (0.1, 0.2)
)
"""A table of all combinations of two values of each of two axes and of two hyperparameters."""


def test_ambiguous_axis_and_hyperparameter_are_listed_at_once(read_table):
    with pytest.raises(TableError) as caught:
        read_table(FOUR_FACTORS)
    assert caught.value.problems == [
        "the axis may be width, depth: name one with --axis",
        "the hyperparameter may be clip_norm, weight_decay: name one with --hyperparameter",
    ]
    table = read_table(FOUR_FACTORS, axis="depth", hyperparameter="weight_decay")
    assert (table.axis, table.hyperparameter, len(table.points)) == ("depth", "weight_decay", 4)


def test_learning_rate_is_judged_if_it_varies(read_table):
    two_rates = "width,lr,clip,loss\n" + "".join(
        f"{w},{lr},{c},3\n" for w in (8, 16) for lr in (1, 2) for c in (1, 2)
    )
    assert read_table(two_rates).hyperparameter == "learning_rate"
    one_rate = "width,lr,clip,loss\n" + "".join(f"{w},1,{c},3\n" for w in (8, 16) for c in (1, 2))
    assert read_table(one_rate).hyperparameter == "clip_norm"
