"""Thresholds, the longest sensible run, and the reference runs."""

import pytest

from launcher.base.reference import MODELS
from launcher.estimates.duration import LONGEST_RUNS, beside_reference, duration_warnings, thresholds_passed
from launcher.estimates.spans import Span, exactly
from proxies.core.flops import flops_per_token


def test_the_longest_run_reproduces_three_rows_of_four():
    hardware, software, investment, everything = LONGEST_RUNS
    assert hardware.years == pytest.approx(3.55, abs=0.005)
    assert software.years == pytest.approx(1.22, abs=0.005)
    assert 12 * investment.years == pytest.approx(9.1, abs=0.05)
    assert 12 * everything.years == pytest.approx(6.4, abs=0.06)  # their own rates
    assert 12 * everything.published_years == pytest.approx(2.52)  # what they print


def test_a_plan_longer_than_that_says_so():
    assert duration_warnings(exactly(54.0)) == []
    (said,) = duration_warnings(Span(value=190.0, low=150.0, high=230.0))
    assert "may last longer than 196 days: while hardware, software, investment grow" in said
    assert len(duration_warnings(exactly(2000.0))) == 4
    assert "lasts longer than" in duration_warnings(exactly(2000.0))[0]


def test_thresholds_of_law():
    assert thresholds_passed(9.9e24) == []
    (european,) = thresholds_passed(3.8e25)
    assert "EU AI Act" in european
    assert len(thresholds_passed(1e26)) == 2


def test_the_reference_runs_at_their_own_price_and_at_ours():
    rows = {row["model"]: row for row in beside_reference(3.8e25, 989e12, exactly(0.4), exactly(2.0))}
    assert {"llama-3-8b", "palm-540b", "bloom-176b", "llama-3.1-405b", "deepseek-v3"} < set(rows)
    deepseek = rows["deepseek-v3"]
    assert deepseek["usd_published"] == pytest.approx(2.0 * deepseek["gpu_hours_published"])
    assert deepseek["six_nd"] == pytest.approx(3.286e24, rel=1e-3)
    assert rows["llama-3.1-405b"]["share"] == pytest.approx(1.0, rel=5e-3)
    # At Llama 3's own 41 % of the peak the published hours come out, less what was lost and what came after.
    hours = rows["llama-3.1-405b"]["gpu_hours_here"]["value"]
    assert hours == pytest.approx(4.096e25 / (0.4 * 989e12 * 3600), rel=1e-3)
    assert 0.85 < hours / rows["llama-3.1-405b"]["gpu_hours_published"] < 1.05


def test_opts_published_total_counts_what_is_recomputed():
    """4.30e23 at 300B tokens is hardware FLOPs, a third more than the model's."""
    shape = MODELS["opt-175b"].shape
    assert flops_per_token(shape, "recompute") * 300e9 == pytest.approx(4.30e23, rel=1e-3)
    assert flops_per_token(MODELS["gpt-3-175b"].shape, "full") * 300e9 == pytest.approx(3.230e23, rel=1e-3)
