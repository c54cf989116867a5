import pytest

from proxies.core.hyperparameters import HYPERPARAMETERS
from proxies.core.tables.columns import COLUMN_NAMES
from transfer.tables.cells import TableError
from transfer.tables.columns import OPTIMUM_COLUMNS, SIZE_COLUMNS, VALUE_COLUMNS


def test_every_name_of_a_size_is_known(read):
    for axis, size in ((axis, name) for axis, names in SIZE_COLUMNS.items() for name in names):
        found = read(f"{size},lr,loss\n32,0.1,3\n64,0.1,2\n")
        assert (found.axis, [p.size for p in found.points]) == (axis, [32, 64])


def test_every_name_of_a_hyperparameter_is_known(read):
    for what, name in ((what, name) for what, names in VALUE_COLUMNS.items() for name in names):
        found = read(f"width,{name},loss\n32,0.5,3\n64,0.25,2\n")
        values = (
            [-1.0, -2.0]
            if HYPERPARAMETERS[what].scale != "log2_complement"
            else [-1.0, pytest.approx(-0.415, abs=1e-3)]
        )
        assert (found.hyperparameter, [p.log2_value for p in found.points]) == (what, values)


def test_every_name_of_an_optimum_is_known(read):
    names = {name: what for what, ours in OPTIMUM_COLUMNS.items() for name in COLUMN_NAMES[ours]}
    assert {"lr_opt", "opt_lr", "best_lr", "wd_opt", "batch_size_optimum", "optimal_batch", "clip_best"} <= set(names)
    for name, what in names.items():
        found = read(f"params,{name},loss\n1e6,0.5,3\n2e6,0.25,2\n")
        assert (found.hyperparameter, len(found.optima), found.points) == (what, 2, ()), name


def test_opt_may_mean_optimizer_where_sizes_repeat(read):
    text = "width,opt_lr,loss\n32,0.5,3\n32,0.25,2\n64,0.5,3\n64,0.25,2\n"
    with pytest.raises(TableError, match="--column learning_rate_optimum=opt_lr or --column learning_rate=opt_lr"):
        read(text)
    assert len(read(text, columns={"learning_rate": "opt_lr"}).points) == 4
    assert len(read(text, columns={"learning_rate_optimum": "opt_lr"}).optima) == 4
    assert len(read(text.replace("opt_lr", "lr_optimum")).optima) == 4
    assert len(read(text.replace("opt_lr", "opt/lr")).points) == 4


def test_of_two_names_for_one_thing_the_first_is_used_and_the_other_said(read):
    found = read("steps,tokens,lr,loss\n5,64,0.1,3\n9,128,0.1,2\n")
    assert [p.size for p in found.points] == [64, 128]
    assert "columns ignored: steps" in found.notes


@pytest.mark.parametrize(("text", "said"), [
    ("width,lr\n32,2\n", r"no column for loss \(or lr_optimum\)"),
    ("wide\n32\n", r"loss \(or lr_optimum\) and size .* and hyperparameter .*found: wide"),
])  # fmt: skip
def test_a_missing_column_is_named(read, text, said):
    with pytest.raises(TableError, match=said):
        read(text)


GRID = "width,depth,clip,wd,loss\n" + "".join(
    f"{w},{d},{c},{wd},3\n" for w in (32, 64) for d in (2, 4) for c in (0.5, 1) for wd in (0.1, 0.2)
)


def test_what_may_be_meant_is_listed_all_at_once(read):
    with pytest.raises(TableError) as caught:
        read(GRID)
    assert caught.value.problems == [
        "the axis may be width, depth: name one with --axis",
        "the hyperparameter may be clip_norm, weight_decay: name one with --hyperparameter",
    ]
    found = read(GRID, axis="depth", hyperparameter="weight_decay")
    assert (found.axis, found.hyperparameter, len(found.points)) == ("depth", "weight_decay", 4)


def test_the_learning_rate_is_meant_if_it_varies(read):
    both = "width,lr,clip,loss\n" + "".join(f"{w},{lr},{c},3\n" for w in (8, 16) for lr in (1, 2) for c in (1, 2))
    assert read(both).hyperparameter == "learning_rate"
    fixed = "width,lr,clip,loss\n" + "".join(f"{w},1,{c},3\n" for w in (8, 16) for c in (1, 2))
    assert read(fixed).hyperparameter == "clip_norm"
