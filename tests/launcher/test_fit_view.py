"""What the report adds to a fit, by planted truth: each law's own frontier, rungs by their place, runs worth adding."""

import dataclasses
import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
from example_report import BUDGET_FLOPS, DATA_ID
from main_run import spec_of

from launcher.report.body import report_body
from launcher.report.page import report_page
from launcher.views import fit as fit_view
from proxies.core import canon
from scaling_fits.allocation import next_rungs
from scaling_fits.forecast.uncertainty import fit_runs, predict
from scaling_fits.laws.table import from_columns

TRUTH = {"E": 1.3, "A": 40.0, "B": 120.0, "alpha": 0.35, "beta": 0.4}
STUDY = SimpleNamespace(base_shape=spec_of(DATA_ID).shape)
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
    return table, fit_runs(table, form=form, bootstrap=bootstrap)


def body_of(rungs, **options):
    table, fit = fitted(rungs, **options)
    return fit_view.fit_body(fit, table, predict(fit, *AT), BUDGET_FLOPS, rungs)


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


def test_a_rung_that_bears_no_loss_does_not_shift_the_others_places():
    rungs = [{"width": 5, "params": 5_000, "tokens": 100_000, "loss_nats": None}, *rungs_of(noise=0.001)]
    rungs[7]["loss_nats"] *= 1.05
    found = body_of(rungs)["influence"]
    assert all(row["rung"] == row["run"] + 1 for row in found["rows"])
    assert [row["rung"] for row in found["rows"] if row["outlier"]] == [7]
    named = f"width {rungs[7]['width']}, 200k tokens"
    assert any(warning.startswith(f"{named} off the law") for warning in found["warnings"]), found["warnings"]
    assert len(found["rows"]) == 12


def test_rungs_are_named_by_width_and_tokens_and_repeats_by_their_place():
    sizes = [(32, 819_200), (32, 819_200), (64, 819_200), (64, 819_300)]
    names = fit_view.rung_names([{"width": width, "tokens": tokens} for width, tokens in sizes])
    assert names[:2] == ["width 32, 819k tokens (seed 1 of 2)", "width 32, 819k tokens (seed 2 of 2)"]
    assert names[2:] == ["width 64, 819k tokens"] * 2


def test_without_a_choice_there_is_the_summary_alone():
    table, fit = fitted(rungs_of()[:4])
    assert fit.status == "unidentified"
    body = fit_view.fit_body(fit, table, None, BUDGET_FLOPS, rungs_of()[:4])
    assert body["influence"] is None
    for member in body["members"]:
        assert {member[key] for key in ("params_vs_flops", "frontier", "loss_at_choice_nats")} == {None}


def test_runs_to_add_are_within_their_share_and_shrinks_compound():
    _, fit = fitted(rungs_of(noise=0.01), bootstrap=60)
    at = predict(fit, 2_000_000, 80_000_000)
    found = fit_view.next_body(STUDY, fit, at)
    assert found["runs"]
    assert sum(run["flops"] for run in found["runs"]) <= next_rungs.NEXT_SHARE * at.flops * 1.001
    left = math.prod(1 - run["interval_shrink"] for run in found["runs"])
    assert found["interval_shrink"] == pytest.approx(1 - left)
    for run in found["runs"]:
        assert run["flops"] == pytest.approx(6 * run["params"] * run["tokens"])
        assert run["width"] % STUDY.base_shape.head_dim == 0


def test_a_budget_no_larger_than_the_ladder_adds_no_run():
    _, fit = fitted(rungs_of(noise=0.01))
    found = fit_view.next_body(STUDY, fit, predict(fit, 270_000, 1_800_000))
    assert found["runs"] == [] and found["interval_shrink"] is None
    assert "buys no run" in found["note"]


def test_the_same_runs_give_the_same_body(fitted_anew):
    once = body_of(rungs_of(noise=0.01))
    fitted_anew()
    assert body_of(rungs_of(noise=0.01)) == once


def test_a_study_whose_ladder_identifies_no_law_has_a_page(study, ledger, found):
    table = found.table.rows(np.arange(4))
    fit = fit_runs(table, form="auto", bootstrap=20)
    stopped = dataclasses.replace(found, table=table, fit=fit, choice=None, tilt=None, gates=())
    body = canon.parse(canon.pretty(report_body(study, ledger, stopped)))
    assert body["fit"]["status"] == "unidentified" and body["next_runs"] is None
    assert "The rungs identify none of these laws" in report_page(body)


def test_the_finished_study_says_all_of_it(study, ledger, found):
    body = report_body(study, ledger, found)
    assert body["next_runs"]["runs"] or body["next_runs"]["note"]
    assert len(body["fit"]["influence"]["rows"]) == len(body["ladder"]["rungs"])
    assert [point["flops"] for point in body["fit"]["members"][0]["frontier"]] == [p["flops"] for p in body["frontier"]]
