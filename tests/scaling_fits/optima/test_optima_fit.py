"""Tests of a fit of best sizes to IsoFLOP runs: its file, its intervals, and its refusals."""

import numpy as np
import pytest
from planted_optima import compute_loss, make_isoflop_runs, make_table

from forerun._scaling_fits.fit_file import FitFileError, from_json, to_json
from forerun._scaling_fits.laws.law import CannotTellError, LawError
from forerun._scaling_fits.optima.isoflop import fit_isoflop
from forerun._scaling_fits.optima.optima_fit import predict_at

BUDGETS = 10.0 ** np.arange(16, 20, 0.5)


def test_fit_is_restored_from_json_and_invalid_json_is_refused():
    fit = fit_isoflop(make_isoflop_runs(BUDGETS), bootstrap=50)
    assert from_json(to_json(fit)) == fit
    for change in ({"optima": 3}, {"inflation": {"params": 0.5}}, {"kind": "x"}):
        with pytest.raises(FitFileError):
            from_json(to_json(fit) | change)


def test_unanswerable_questions_are_refused():
    fit = fit_isoflop(make_isoflop_runs(BUDGETS), bootstrap=50)
    with pytest.raises(LawError, match="flops = -1"):
        predict_at(fit, -1.0)
    with pytest.raises(CannotTellError, match="1 of 1 budget "):
        predict_at(fit_isoflop(make_isoflop_runs(BUDGETS[:1]), bootstrap=50), 1e20)


def test_intervals_grow_with_the_distance():
    """Even a clean law of optima says little about a budget 1,000 times the largest one, because
    such laws bend.
    """
    fit = fit_isoflop(make_isoflop_runs(BUDGETS), bootstrap=50)
    widths = []
    for factor in (1, 30, 1000):
        low, high = predict_at(fit, factor * fit.largest_flops).params_interval
        widths.append(np.log(high / low))
    assert widths[0] < widths[1] < widths[2]
    assert widths[2] > 0.7


def test_hindcasts_widen_the_intervals_of_a_law_that_bends():
    """Above 2e18 FLOPs, the best size grows with another exponent, which the cheaper runs do not
    show.
    """
    table = make_isoflop_runs(BUDGETS)
    straight = fit_isoflop(table, bootstrap=100)
    bend = np.where(6 * table.params * table.tokens > 2e18, 0.3, 0.0) * np.log(
        6 * table.params * table.tokens / 2e18
    )
    loss = compute_loss(table.params * np.exp(-bend), table.tokens * np.exp(bend))
    bent = fit_isoflop(make_table(table.params, table.tokens, loss), bootstrap=100)
    assert bent.status == straight.status == "converged"
    assert bent.inflation.params > straight.inflation.params >= 1
