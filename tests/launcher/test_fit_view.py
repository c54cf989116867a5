"""What the report adds to a fit, by planted truth: each law's own frontier."""

import itertools
import math

import numpy as np
import pytest

from launcher.views import fit as fit_view
from scaling_fits.forecast.uncertainty import fit_runs, predict
from scaling_fits.laws.table import from_columns

TRUTH = {"E": 1.3, "A": 40.0, "B": 120.0, "alpha": 0.35, "beta": 0.4}
AT = (200_000, 8_000_000)


def truth(params, tokens):
    return TRUTH["E"] + TRUTH["A"] / params ** TRUTH["alpha"] + TRUTH["B"] / tokens ** TRUTH["beta"]


def rungs_of(noise=0.0):
    rng = np.random.default_rng(0)
    sizes = list(itertools.product((10_000, 30_000, 90_000, 270_000), (200_000, 600_000, 1_800_000)))
    return [
        {"width": n // 1000, "params": n, "tokens": d, "loss_nats": truth(n, d) * math.exp(float(rng.normal(0, noise)))}
        for n, d in sizes
    ]


def fitted(rungs, form="chinchilla", bootstrap=30):
    finished = [rung for rung in rungs if rung["loss_nats"] is not None]
    table = from_columns(*([rung[key] for rung in finished] for key in ("params", "tokens", "loss_nats")))
    return fit_runs(table, form=form, bootstrap=bootstrap)


def body_of(rungs, **options):
    fit = fitted(rungs, **options)
    return fit_view.fit_body(fit, predict(fit, *AT))


def test_a_law_alone_says_how_sizes_grow_and_the_loss_of_the_choice():
    (member,) = body_of(rungs_of())["members"]
    assert member["loss_at_choice_nats"] == pytest.approx(truth(*AT), rel=1e-4)
    assert member["params_vs_flops"] == pytest.approx(0.4 / 0.75, rel=1e-2)
    assert member["params_vs_flops"] + member["tokens_vs_flops"] == pytest.approx(1)


def test_without_a_choice_there_is_the_summary_alone():
    fit = fitted(rungs_of()[:4])
    assert fit.status == "unidentified"
    body = fit_view.fit_body(fit, None)
    for member in body["members"]:
        assert {member[key] for key in ("params_vs_flops", "loss_at_choice_nats")} == {None}
