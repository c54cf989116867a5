"""The JSON contract to the letter, and a file that carries every bit."""

import copy
import dataclasses
import json

import numpy as np
import pytest
from planted_ladders import CHINCHILLA, ladder

from proxies.core import canon
from scaling_fits.allocation.allocate import allocate
from scaling_fits.fit_file import FitFileError, from_file, to_file
from scaling_fits.forecast.uncertainty import fit_runs, predict
from scaling_fits.summary import allocation_summary, fit_summary, prediction_summary


@pytest.fixture(scope="module")
def fitted():
    return fit_runs(ladder(CHINCHILLA, np.random.default_rng(0), 0.01), bootstrap=12)


def test_fit_has_every_key(fitted):
    summary = fit_summary(fitted)
    wanted = {
        "form",
        "status",
        "parameters",
        "members",
        "intervals",
        "level",
        "exponents",
        "num_runs",
        "dropped",
        "backtest",
        "warnings",
    }
    assert wanted <= set(summary)
    assert summary["form"] == "auto"
    assert summary["parameters"] == fitted.fit.parameters
    assert [set(member) for member in summary["members"]] == [
        {"form", "weight", "status", "parameters"}
    ]
    assert set(summary["intervals"]) == set(summary["parameters"])
    assert all(low < high for low, high in summary["intervals"].values())
    assert set(summary["exponents"]) == {"params_vs_flops", "tokens_vs_flops"}
    assert set(summary["exponents"]["params_vs_flops"]) == {"value", "interval"}
    assert summary["flops_from"] == "6ND"
    canon.canonical(summary)


def test_unidentified_is_null_everywhere():
    summary = fit_summary(
        fit_runs(ladder(CHINCHILLA, sizes=np.array([1e5])), "chinchilla", bootstrap=8)
    )
    assert summary["status"] == "unidentified"
    assert summary["parameters"] == dict.fromkeys(["E", "A", "B", "alpha", "beta"])
    assert summary["intervals"] == summary["parameters"]
    assert summary["exponents"]["params_vs_flops"] == {"value": None, "interval": None}
    assert summary["backtest"] is None
    assert summary["warnings"]
    canon.canonical(summary)


def test_an_interval_that_tells_no_size_is_not_determined(fitted):
    found = allocate(fitted, 1e13)
    assert found.size_determined and allocation_summary(found)["params_interval"] is not None
    for low, high in ((found.params / 2, 2000 * found.params), (2.6e-6, 1e3)):
        wide = dataclasses.replace(found, params_interval=(low, high))
        assert not wide.size_determined
        assert (
            allocation_summary(wide)["params_interval"]
            is allocation_summary(wide)["tokens_interval"]
            is None
        )


def test_prediction_and_allocation_have_every_key(fitted):
    prediction = prediction_summary(predict(fitted, 2e6, 2e6))
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
    allocation = allocation_summary(allocate(fitted, 1e13))
    wanted = {
        "flops",
        "params",
        "tokens",
        "tokens_per_param",
        "batch_tokens",
        "loss",
        "interval",
        "params_interval",
        "tokens_interval",
        "flat_range",
        "warnings",
    }
    assert wanted <= set(allocation)
    assert list(allocation["flat_range"]) == ["params", "tokens"]
    assert allocation["batch_tokens"] is None
    assert allocation_summary(allocate(fitted, 1e13), batch_tokens=1024)["batch_tokens"] == 1024


def test_the_file_gives_back_the_same_bits(fitted):
    text = canon.canonical(to_file(fitted))
    again = from_file(canon.parse(text))
    assert canon.canonical(to_file(again)) == text
    assert predict(again, 3e6, 3e6) == predict(fitted, 3e6, 3e6)
    assert allocate(again, 1e13) == allocate(fitted, 1e13)
    assert fit_summary(again) == fit_summary(fitted)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("seed"), "seed"),
        (lambda d: d["fit"].update(form="linear"), "linear"),
        (lambda d: d["posterior"]["theta"][0].pop(), "inhomogeneous"),
    ],
)
def test_what_does_not_hold_together_is_refused(fitted, change, said):
    data = copy.deepcopy(json.loads(canon.canonical(to_file(fitted))))
    change(data)
    with pytest.raises(FitFileError, match=said):
        from_file(data)
