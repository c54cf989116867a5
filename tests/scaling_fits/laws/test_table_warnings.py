"""Tests of tables that would spoil a fit: each is refused by row or fitted with a warning."""

import math

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, compute_law_loss, make_ladder

from forerun._scaling_fits.laws.table import TableError, read_runs
from forerun._scaling_fits.laws.traps import format_rows

NOISY = make_ladder(CHINCHILLA, np.random.default_rng(0), noise=0.004)
RUNS = {
    "params": NOISY.params.tolist(),
    "tokens": NOISY.tokens.tolist(),
    "loss": NOISY.loss.tolist(),
}


def _write_csv(folder, columns):
    """Write a table and return its path."""
    rows = zip(*columns.values(), strict=True)
    text = ",".join(columns) + "\n"
    for row in rows:
        cells = [cell if isinstance(cell, str) else repr(cell) for cell in row]
        text += ",".join(cells) + "\n"
    path = folder / "runs.csv"
    path.write_text(text)
    return path


def _read_warnings(folder, **columns):
    """Return the warnings about the clean runs with some columns replaced or added."""
    return read_runs(_write_csv(folder, RUNS | columns)).warnings


def test_clean_table_has_no_warning(tmp_path):
    assert _read_warnings(tmp_path) == ()


def test_two_parameter_counts_are_reported_unless_the_user_chose_one(tmp_path):
    # Embeddings are a larger share of a smaller model.
    without_embeddings = [n - 2e4 for n in RUNS["params"]]
    messages = _read_warnings(tmp_path, params_non_embedding=without_embeddings)
    assert len(messages) == 1
    assert "column 'params_non_embedding' is 0.333 to 0.98 times it" in messages[0]
    assert "--params-column params_non_embedding" in messages[0]
    assert (
        read_runs(tmp_path / "runs.csv", columns={"params": "params_non_embedding"}).warnings == ()
    )
    # A constant factor changes no exponent.
    assert _read_warnings(tmp_path, active_params=[n / 4 for n in RUNS["params"]]) == ()
    assert _read_warnings(tmp_path, param_note=["x"] * 12) == ()


def test_flops_that_differ_from_six_nd_are_reported(tmp_path):
    six_nd = 6 * NOISY.params * NOISY.tokens
    assert _read_warnings(tmp_path, flops=(1.2 * six_nd).tolist()) == ()
    warnings = _read_warnings(tmp_path, flops=(six_nd * (1 + 5e4 / NOISY.params)).tolist())
    assert "1.05 to 2.67 times 6 * N * D" in warnings[0]
    warnings = _read_warnings(tmp_path, flops=(six_nd / 1e15).tolist())
    assert "1e-15 to 1e-15 times 6 * N * D" in warnings[0]


DEMO_LADDER = {
    "params": [37024] * 3 + [70896] * 3 + [115008] * 3,
    "tokens": [40960, 81920, 163840] * 3,
    "loss": [2.89772, 2.70378, 2.50837, 2.82941, 2.64991, 2.46437, 2.77653, 2.61962, 2.37977],
}
"""Nine runs whose sizes and tokens are those of the tutorial's demo study."""


def _make_published_ladder():
    """Return runs of published sizes: 0.1 to 7 billion parameters, 10 to 100 tokens for each."""
    n, d = (x.ravel() for x in np.meshgrid([1e8, 4e8, 1e9, 3e9, 7e9], [10, 30, 100]))
    tokens = np.round(n * d)
    return {
        "params": n.tolist(),
        "tokens": tokens.tolist(),
        "loss": compute_law_loss(CHINCHILLA, n, tokens).tolist(),
    }


@pytest.mark.parametrize("runs", [_make_published_ladder(), DEMO_LADDER], ids=["published", "demo"])
def test_columns_in_another_unit_are_reported(tmp_path, runs):
    n, d = (np.array(runs[name], dtype=float) for name in ("params", "tokens"))
    tokens_per_step = 2e6 if n.max() > 1e9 else 2048.0
    params_in_billions, tokens_in_billions = (n / 1e9).tolist(), (d / 1e9).tolist()
    steps = (d / tokens_per_step).tolist()
    scaled_columns = (
        {"params": params_in_billions},
        {"params": params_in_billions, "tokens": tokens_in_billions},
        {"tokens": steps},
    )
    assert read_runs(_write_csv(tmp_path, runs)).warnings == ()
    for columns in scaled_columns:
        messages = read_runs(_write_csv(tmp_path, runs | columns)).warnings
        assert sum("expects counts" in warning for warning in messages) == 1


@pytest.mark.parametrize(
    ("params_factor", "tokens_factor", "advice"),
    [
        (1e-9, 1.0, ["params looks like billions (median 1)", "by 1e9"]),
        (
            1e-6,
            1e-9,
            ["params looks like millions", "by 1e6", "tokens looks like billions", "by 1e9"],
        ),
        (1.0, 1e-9, ["tokens looks like billions (median 30)", "by 1e9"]),
        (1.0, 1 / 2e6, ["millions or steps (median 15,000)", "by the tokens of a step"]),
    ],
)
def test_warning_names_the_factor_of_a_column_in_another_unit(
    tmp_path, params_factor, tokens_factor, advice
):
    """`advice` has two parts of the warning for each column in another unit."""
    runs = _make_published_ladder()
    scaled_columns = {
        name: (np.array(runs[name]) * factor).tolist()
        for name, factor in (("params", params_factor), ("tokens", tokens_factor))
    }
    (warning, *_) = read_runs(_write_csv(tmp_path, runs | scaled_columns)).warnings
    assert all(part in warning for part in advice)
    assert warning.count("expects counts") == len(advice) // 2


def test_swapped_columns_are_reported(tmp_path):
    runs = _make_published_ladder()
    (warning, *_) = read_runs(
        _write_csv(tmp_path, runs | {"params": runs["tokens"], "tokens": runs["params"]})
    ).warnings
    assert "look swapped" in warning and "--column" in warning


def test_rows_before_the_end_of_a_schedule_are_named(tmp_path):
    fraction = [1.0] * 10 + [0.5, 0.9995]
    assert _read_warnings(tmp_path, schedule_fraction=fraction)[0].startswith(
        "row 12: read before the end of the schedule"
    )
    steps = {"step": [100.0] * 12, "num_steps": [100.0, 250.0, 100.0, 200.0] + [100.0] * 8}
    assert _read_warnings(tmp_path, **steps)[0].startswith("rows 3 and 5: read before")
    assert _read_warnings(tmp_path, step=steps["step"]) == ()
    assert _read_warnings(tmp_path, schedule_fraction=[1.0] * 12) == ()


def test_points_along_one_run_are_reported(tmp_path):
    # Three lengths of each of four sizes
    names = [f"model-{n:.0f}" for n in RUNS["params"]]
    warnings = _read_warnings(tmp_path, run_name=names)
    assert warnings[0].startswith("12 rows are points along 4 runs by column 'run_name'")
    assert "'model-30000' is rows 2, 3 and 4" in warnings[0]
    assert _read_warnings(tmp_path, run=[f"r{i}" for i in range(12)]) == ()
    assert _read_warnings(tmp_path, run=[""] * 12) == ()


def test_run_entered_twice_is_not_counted_as_two_seeds(tmp_path):
    columns = {name: [*values, values[3], values[0]] for name, values in RUNS.items()}
    messages = read_runs(_write_csv(tmp_path, columns)).warnings
    assert messages[0].startswith(
        "rows 2 and 15 have the same params, tokens and loss (other such sets of rows: 1)"
    )
    near = columns | {"loss": [*RUNS["loss"], RUNS["loss"][3] + 1e-6, RUNS["loss"][0] - 1e-6]}
    assert read_runs(_write_csv(tmp_path, near)).warnings == messages
    assert read_runs(_write_csv(tmp_path, near)).num_runs == 12
    seeds = columns | {"seed": [0.0] * 12 + [1.0, 1.0]}
    assert read_runs(_write_csv(tmp_path, seeds)).warnings == ()


def test_losses_in_another_unit_are_reported_by_row(tmp_path):
    perplexities = [math.exp(loss) for loss in RUNS["loss"]]
    # Row 1 is the header. A loss above 12 nats cannot be one per token.
    rows = [i + 2 for i, x in enumerate(perplexities) if x > 12]
    assert _read_warnings(tmp_path, loss=perplexities)[0].startswith(format_rows(rows))
    assert format_rows([7]) == "row 7"
    assert format_rows(list(range(2, 9))) == "rows 2, 3, 4, 5, 6 and 2 more"


@pytest.mark.parametrize(
    ("column", "cell", "limit"), [("params", 1e-300, "from 1e-12"), ("loss", 1e300, "to 1e+")]
)
def test_impossible_cell_is_refused_by_its_row(tmp_path, column, cell, limit):
    cells = RUNS[column].copy()
    cells[2] = cell
    with pytest.raises(
        TableError, match=f"row 4, column '{column}': {cell:g}".replace("+", "\\+")
    ) as caught:
        read_runs(_write_csv(tmp_path, RUNS | {column: cells}))
    assert limit in str(caught.value)
