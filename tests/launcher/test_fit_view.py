"""What the report adds to a fit, by planted truth: each law's own frontier."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from example_report import BUDGET_FLOPS

from launcher.report.body import report_body
from launcher.report.page import report_page
from launcher.views import fit as fit_view
from proxies.core import canon
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
    return fit_view.fit_body(fit, predict(fit, *AT), BUDGET_FLOPS)


def test_a_laws_own_frontier_is_the_best_loss_that_each_budget_pays_for():
    (member,) = body_of(rungs_of())["members"]
    assert len(member["frontier"]) == fit_view.NUM_FRONTIER_POINTS
    assert member["frontier"][0]["flops"] == pytest.approx(6 * 10_000 * 200_000)
    assert member["frontier"][-1]["flops"] == pytest.approx(BUDGET_FLOPS)
    for point in member["frontier"]:
        sizes = np.geomspace(1e2, 1e8, 20_001)
        assert point["loss_nats"] == pytest.approx(truth(sizes, point["flops"] / (6 * sizes)).min(), rel=1e-4)
    assert member["loss_at_choice_nats"] == pytest.approx(truth(*AT), rel=1e-4)
    assert member["params_vs_flops"] == pytest.approx(0.4 / 0.75, rel=1e-2)
    assert member["params_vs_flops"] + member["tokens_vs_flops"] == pytest.approx(1)


def test_without_a_choice_there_is_the_summary_alone():
    fit = fitted(rungs_of()[:4])
    assert fit.status == "unidentified"
    body = fit_view.fit_body(fit, None, BUDGET_FLOPS)
    for member in body["members"]:
        assert {member[key] for key in ("params_vs_flops", "frontier", "loss_at_choice_nats")} == {None}


def test_the_same_runs_give_the_same_body(fitted_anew):
    once = body_of(rungs_of(noise=0.01))
    fitted_anew()
    assert body_of(rungs_of(noise=0.01)) == once


def test_a_study_whose_ladder_identifies_no_law_has_a_page(study, ledger, found):
    table = found.table.rows(np.arange(4))
    fit = fit_runs(table, form="auto", bootstrap=20)
    stopped = dataclasses.replace(found, table=table, fit=fit, choice=None, gates=())
    body = canon.parse(canon.pretty(report_body(study, ledger, stopped)))
    assert body["fit"]["status"] == "unidentified"
    assert "The rungs identify none of these laws" in report_page(body)


def test_the_finished_study_says_all_of_it(study, ledger, found):
    body = report_body(study, ledger, found)
    assert [point["flops"] for point in body["fit"]["members"][0]["frontier"]] == [p["flops"] for p in body["frontier"]]
