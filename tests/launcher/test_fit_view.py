"""What the report adds to a fit, by planted truth: each law's own frontier."""

import itertools

import pytest

from launcher.views import tables
from scaling_fits.forecast.uncertainty import fit_runs, predict
from scaling_fits.laws.table import from_columns

TRUTH = {"E": 1.3, "A": 40.0, "B": 120.0, "alpha": 0.35, "beta": 0.4}
AT = (200_000, 8_000_000)


def truth(params, tokens):
    return TRUTH["E"] + TRUTH["A"] / params ** TRUTH["alpha"] + TRUTH["B"] / tokens ** TRUTH["beta"]


def fitted(num_rungs=12):
    sizes = list(
        itertools.product((10_000, 30_000, 90_000, 270_000), (200_000, 600_000, 1_800_000))
    )[:num_rungs]
    params, tokens = zip(*sizes, strict=True)
    table = from_columns(params, tokens, [truth(*size) for size in sizes])
    return fit_runs(table, form="chinchilla", bootstrap=30)


def test_a_law_alone_says_how_sizes_grow_and_the_loss_of_the_choice():
    fit = fitted()
    (member,) = tables.fit_body(fit, predict(fit, *AT))["members"]
    assert member["loss_at_choice_nats"] == pytest.approx(truth(*AT), rel=1e-4)
    assert member["params_vs_flops"] == pytest.approx(0.4 / 0.75, rel=1e-2)
    assert member["params_vs_flops"] + member["tokens_vs_flops"] == pytest.approx(1)


def test_without_a_choice_there_is_the_summary_alone():
    fit = fitted(4)
    assert fit.status == "unidentified"
    for member in tables.fit_body(fit, None)["members"]:
        assert {member[key] for key in ("params_vs_flops", "loss_at_choice_nats")} == {None}
