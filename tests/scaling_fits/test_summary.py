"""Tests of the JSON summaries of fits, predictions and allocations."""

import dataclasses

import numpy as np
from planted_ladders import CHINCHILLA, make_ladder
from summary_keys import ALLOCATION_KEYS, FIT_KEYS

from forerun._proxies.core import canon
from forerun._scaling_fits.allocation.allocate import allocate
from forerun._scaling_fits.forecast.uncertainty import fit_runs, predict
from forerun._scaling_fits.summary import summarize_allocation, summarize_fit, summarize_prediction


def test_summary_of_a_fit_has_every_key(law_fit):
    summary = summarize_fit(law_fit)
    assert set(summary) >= FIT_KEYS
    assert summary["form"] == "auto"
    assert summary["parameters"] == law_fit.fit.parameters
    assert [set(member) for member in summary["members"]] == [
        {"form", "weight", "status", "parameters"}
    ]
    assert set(summary["intervals"]) == set(summary["parameters"])
    assert all(low < high for low, high in summary["intervals"].values())
    assert set(summary["exponents"]) == {"params_vs_flops", "tokens_vs_flops"}
    assert set(summary["exponents"]["params_vs_flops"]) == {"value", "interval"}
    assert summary["flops_from"] == "6ND"
    assert canon.parse(canon.to_canonical_json(summary)) == summary


def test_values_of_an_unidentified_fit_are_null():
    summary = summarize_fit(
        fit_runs(make_ladder(CHINCHILLA, sizes=np.array([1e5])), "chinchilla", bootstrap=8)
    )
    assert summary["status"] == "unidentified"
    assert summary["parameters"] == dict.fromkeys(["E", "A", "B", "alpha", "beta"])
    assert summary["intervals"] == summary["parameters"]
    assert summary["exponents"]["params_vs_flops"] == {"value": None, "interval": None}
    assert summary["backtest"] is None
    assert summary["warnings"]
    assert canon.parse(canon.to_canonical_json(summary)) == summary


def test_intervals_are_null_if_they_are_too_wide_to_choose_a_size(law_fit):
    allocation = allocate(law_fit, 1e13)
    assert allocation.size_determined
    assert summarize_allocation(allocation)["params_interval"] is not None
    over_a_factor_of_1000 = (allocation.params / 2, 2000 * allocation.params)
    below_one_parameter = (2.6e-6, 1e3)
    for params_interval in (over_a_factor_of_1000, below_one_parameter):
        too_wide = dataclasses.replace(allocation, params_interval=params_interval)
        assert not too_wide.size_determined
        assert summarize_allocation(too_wide)["params_interval"] is None
        assert summarize_allocation(too_wide)["tokens_interval"] is None


def test_summaries_of_prediction_and_allocation_have_every_key(law_fit):
    prediction = summarize_prediction(predict(law_fit, 2e6, 2e6))
    assert set(prediction) == {
        "params",
        "tokens",
        "flops",
        "loss",
        "interval",
        "level",
        "extrapolation",
        "warnings",
    }
    allocation = summarize_allocation(allocate(law_fit, 1e13))
    assert set(allocation) >= ALLOCATION_KEYS
    assert list(allocation["flat_range"]) == ["params", "tokens"]
    assert allocation["batch_tokens"] is None
    assert summarize_allocation(allocate(law_fit, 1e13), batch_tokens=1024)["batch_tokens"] == 1024
