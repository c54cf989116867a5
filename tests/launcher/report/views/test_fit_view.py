"""Tests of the report's section on the fit: exponents and forecast of a planted law."""

import itertools

import pytest

from forerun._launcher.report.views import tables
from forerun._scaling_fits.forecast.uncertainty import fit_runs, predict
from forerun._scaling_fits.laws.table import from_columns

PLANTED_LAW = {"E": 1.3, "A": 40.0, "B": 120.0, "alpha": 0.35, "beta": 0.4}
MAIN_RUN_SIZE = (200_000, 8_000_000)


def compute_loss(params, tokens):
    """Return the loss of the planted law."""
    law = PLANTED_LAW
    return law["E"] + law["A"] / params ** law["alpha"] + law["B"] / tokens ** law["beta"]


def fit_planted_law(num_rungs=12):
    """Fit the losses of the planted law at so many of twelve rungs."""
    params_grid, tokens_grid = (10_000, 30_000, 90_000, 270_000), (200_000, 600_000, 1_800_000)
    sizes = list(itertools.product(params_grid, tokens_grid))[:num_rungs]
    params, tokens = zip(*sizes, strict=True)
    table = from_columns(params, tokens, [compute_loss(*size) for size in sizes])
    return fit_runs(table, form="chinchilla", bootstrap=30)


def test_section_has_the_planted_exponents_and_the_loss_of_the_main_run():
    fit = fit_planted_law()
    (member,) = tables.build_fit_section(fit, predict(fit, *MAIN_RUN_SIZE)).members
    assert member.loss_at_choice_nats == pytest.approx(compute_loss(*MAIN_RUN_SIZE), rel=1e-4)
    assert member.params_vs_flops == pytest.approx(0.4 / 0.75, rel=1e-2)
    assert member.params_vs_flops + member.tokens_vs_flops == pytest.approx(1)


def test_unidentified_fit_has_no_exponents_and_no_forecast():
    fit = fit_planted_law(4)
    assert fit.status == "unidentified"
    for member in tables.build_fit_section(fit, None).members:
        assert member.params_vs_flops is member.loss_at_choice_nats is None
