"""Tests of the reference tables against published totals and other trainers' counters."""

import pytest

from forerun._launcher.main_run.estimates import reference_tables
from forerun._launcher.main_run.estimates.reference_tables import MODELS, UnknownNameError
from forerun._proxies.core.flops import compute_flops_per_token, count_params


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("gpt-2", 124_439_808),
        ("gpt-2-xl", 1_557_611_200),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
    ],
)
def test_parameter_counts_equal_the_published_ones(name, params):
    assert count_params(MODELS[name].shape).total == params
    assert MODELS[name].params == pytest.approx(params, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "convention", "total", "tolerance"),
    [
        ("gpt-3-175b", "causal", 3.186e23, 1e-3),
        ("gpt-3-175b", "palm", 3.230e23, 1e-3),
        ("llama-3.1-405b", "full", 4.096e25, 1e-3),
        ("chinchilla-70b", "chinchilla", 5.68e23, 3e-3),
    ],
)
def test_total_flops_equal_the_published_ones(name, convention, total, tolerance):
    model = MODELS[name]
    assert compute_flops_per_token(model.shape, convention) * model.tokens == pytest.approx(
        total, rel=tolerance
    )


def test_names_may_be_typed_loosely():
    assert (
        reference_tables.look_up_gpu("h100")[0]
        == reference_tables.look_up_gpu("H-100")[0]
        == "H100"
    )
    assert reference_tables.look_up_model("Llama 3.1 405B")[0] == "llama-3.1-405b"
    with pytest.raises(UnknownNameError, match=r"did you mean H100\?"):
        reference_tables.look_up_gpu("H10")
    with pytest.raises(UnknownNameError, match="known names are gpt-2"):
        reference_tables.look_up_model("")
