"""The reference table against published totals and the counters of other trainers."""

import pytest

from launcher.base import reference
from launcher.base.reference import MODELS, UnknownNameError
from proxies.core.flops import count_params, flops_per_token


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
def test_parameters_to_the_last(name, params):
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
def test_totals_by_convention(name, convention, total, tolerance):
    found = MODELS[name]
    assert flops_per_token(found.shape, convention) * found.tokens == pytest.approx(
        total, rel=tolerance
    )


def test_names_as_people_type_them():
    assert reference.gpu("h100")[0] == reference.gpu("H-100")[0] == "H100"
    assert reference.model("Llama 3.1 405B")[0] == "llama-3.1-405b"
    with pytest.raises(UnknownNameError, match=r"did you mean H100\?"):
        reference.gpu("H10")
    with pytest.raises(UnknownNameError, match="known names are gpt-2"):
        reference.model("")
