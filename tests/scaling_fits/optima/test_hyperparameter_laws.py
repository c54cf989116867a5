"""Tests of the laws of the best learning rate and batch over size and tokens."""

import numpy as np
import pytest
from planted_optima import BATCH_LAW, LR_LAW, compute_law, make_grid_runs, make_table

from forerun._scaling_fits.fit_file import FitFileError, from_json, to_json
from forerun._scaling_fits.laws.law import CannotTellError, LawError
from forerun._scaling_fits.optima.hyperparameter_laws import fit_runs_law, predict_value
from forerun._scaling_fits.optima.optima_fit import OptimaError

CELLS = [(params, tokens) for params in (1e8, 3e8, 9e8) for tokens in (2e9, 8e9, 3.2e10)]
"""Cells of the grid: parameters and tokens of runs that differ in learning rate and batch only."""
LAWS = {"learning_rate": LR_LAW, "batch": BATCH_LAW}


@pytest.mark.parametrize("form", LAWS)
def test_planted_laws_are_recovered(form):
    fit = fit_runs_law(make_grid_runs(CELLS), form, bootstrap=50)
    assert (fit.status, fit.design) == ("converged", "both")
    assert fit.law.exponents == pytest.approx(LAWS[form][1:], abs=0.01)
    far = predict_value(fit, 5e9, 1e11)
    assert far.value == pytest.approx(compute_law(LAWS[form], 5e9, 1e11), rel=0.03)


def test_intervals_cover_under_noise_and_scatter():
    covered = {"exponents": [], "value": []}
    for seed in range(40):
        fit = fit_runs_law(
            make_grid_runs(CELLS, noise=0.001, scatter=0.2, seed=seed),
            "learning_rate",
            bootstrap=100,
        )
        for index, exponent in enumerate(LR_LAW[1:]):
            low, high = fit.law.compute_exponent_interval(index, 0.9)
            covered["exponents"].append(low <= exponent <= high)
        # The new optimum scatters by 0.2 octaves, as the fitted ones do.
        scatter = 0.2 * np.random.default_rng(seed + 1000).standard_normal()
        optimum = compute_law(LR_LAW, 3e9, 1e11) * 2**scatter
        low, high = predict_value(fit, 3e9, 1e11).interval
        covered["value"].append(low <= optimum <= high)
    assert 0.8 <= np.mean(covered["exponents"]) <= 0.98
    assert np.mean(covered["value"]) >= 0.8


@pytest.mark.parametrize(
    ("cells", "design", "left_out", "elsewhere"),
    [
        (
            [(1e8, 4e9 * 2**i) for i in range(4)],
            "tokens",
            "the exponent of N is left out",
            (2e8, 8e9),
        ),
        (
            [(1e8 * 2**i, 20e8 * 2**i) for i in range(4)],
            "ratio",
            "N and D grow together",
            (1e9, 2e11),
        ),
    ],
)
def test_exponent_that_the_design_does_not_identify_is_left_out(cells, design, left_out, elsewhere):
    fit = fit_runs_law(make_grid_runs(cells), "learning_rate", bootstrap=50)
    assert (fit.status, fit.design) == ("converged", design)
    assert len(fit.law.exponents) == 1
    assert any(left_out in warning for warning in fit.warnings)
    params, tokens = cells[-1]
    inside = (params if design == "tokens" else 2 * params, 2 * tokens)
    assert predict_value(fit, *inside).value == pytest.approx(
        compute_law(LR_LAW, *inside), rel=0.02
    )
    with pytest.raises(CannotTellError, match="run cells that vary"):
        predict_value(fit, *elsewhere)


def test_cells_at_the_edge_or_with_too_few_runs_are_refused():
    table = make_grid_runs(CELLS)
    best_lr = compute_law(LR_LAW, *CELLS[0])
    lr = table.extra["lr"]
    first = (table.params == CELLS[0][0]) & (table.tokens == CELLS[0][1])
    second = (table.params == CELLS[1][0]) & (table.tokens == CELLS[1][1])
    few = np.zeros(table.num_runs, dtype=bool)
    few[np.flatnonzero(second)[:12:3]] = True
    keep = ~(first & (lr > best_lr * 1.1)) & (~second | few)
    fit = fit_runs_law(table.select_runs(keep), "learning_rate", bootstrap=50)
    assert [cell.status for cell in fit.cells[:3]] == ["edge", "too_few", "ok"]
    assert (
        "the best learning_rate is the largest that was run: add larger ones" in fit.cells[0].reason
    )
    assert fit.status == "converged"
    single_cell_fit = fit_runs_law(table.select_runs(first), "learning_rate", bootstrap=50)
    assert single_cell_fit.status == "unidentified"
    with pytest.raises(CannotTellError):
        predict_value(single_cell_fit, 1e9, 1e10)


def test_every_bad_input_is_reported_at_once():
    table = make_grid_runs(CELLS[:1])
    with pytest.raises(OptimaError, match="no column 'learning_rate' or 'lr'"):
        fit_runs_law(make_table(table.params, table.tokens, table.loss), "learning_rate")
    lr = table.extra["lr"].copy()
    lr[:2] = -1, np.nan
    with pytest.raises(OptimaError) as error:
        fit_runs_law(
            make_table(
                table.params,
                table.tokens,
                table.loss,
                extra={"lr": lr},
                column_names={"learning_rate": "lr"},
            ),
            "learning_rate",
            level=2,
        )
    assert len(error.value.problems) == 3
    fit = fit_runs_law(make_grid_runs(CELLS), "batch", bootstrap=0)
    with pytest.raises(LawError, match=r"params = -1.*tokens = nan"):
        predict_value(fit, -1, float("nan"))


def test_law_is_restored_from_json_and_invalid_json_is_refused():
    fit = fit_runs_law(make_grid_runs(CELLS), "batch", bootstrap=50)
    assert from_json(to_json(fit)) == fit
    for change in ({"kind": "other"}, {"cells": 3}):
        with pytest.raises(FitFileError):
            from_json(to_json(fit) | change)
