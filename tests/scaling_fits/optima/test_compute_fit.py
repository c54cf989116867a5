import numpy as np
import pytest
from planted_optima import isoflop_runs, loss_at, runs

from scaling_fits.compute.isoflop import fit_isoflop
from scaling_fits.compute.optima import predict_at
from scaling_fits.fit_file import FitFileError, from_file, to_file
from scaling_fits.laws.law import CannotTellError, LawError

BUDGETS = 10.0 ** np.arange(16, 20, 0.5)


def test_a_file_gives_the_fit_back_and_what_is_none_is_refused():
    fit = fit_isoflop(isoflop_runs(BUDGETS), bootstrap=50)
    assert from_file(to_file(fit)) == fit
    for change in ({"optima": 3}, {"inflation": {"params": 0.5}}, {"kind": "x"}):
        with pytest.raises(FitFileError):
            from_file(to_file(fit) | change)


def test_questions_without_an_answer():
    fit = fit_isoflop(isoflop_runs(BUDGETS), bootstrap=50)
    with pytest.raises(LawError, match="flops = -1"):
        predict_at(fit, -1.0)
    with pytest.raises(CannotTellError, match="1 of 1 budget "):
        predict_at(fit_isoflop(isoflop_runs(BUDGETS[:1]), bootstrap=50), 1e20)


def test_intervals_grow_with_the_reach():
    """A clean law of optima says little of a budget a thousand times the largest: laws of sizes
    bend.
    """
    fit = fit_isoflop(isoflop_runs(BUDGETS), bootstrap=50)
    widths = []
    for times in (1, 30, 1000):
        low, high = predict_at(fit, times * fit.largest_flops).params_interval
        widths.append(np.log(high / low))
    assert widths[0] < widths[1] < widths[2]
    assert widths[2] > 0.7


def test_hindcasts_stretch_intervals_of_a_law_that_turns():
    """N* of the dear half grows with another exponent: what the cheap half says of them must not
    look sure.
    """
    table = isoflop_runs(BUDGETS)
    straight = fit_isoflop(table, bootstrap=100)
    bend = np.where(6 * table.params * table.tokens > 2e18, 0.3, 0.0) * np.log(
        6 * table.params * table.tokens / 2e18
    )
    loss = loss_at(table.params * np.exp(-bend), table.tokens * np.exp(bend))
    turned = fit_isoflop(runs(table.params, table.tokens, loss), bootstrap=100)
    assert turned.status == straight.status == "converged"
    assert turned.inflation.params > straight.inflation.params >= 1
