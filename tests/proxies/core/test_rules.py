"""Tests of the rules by which a parametrization scales hyperparameters, against published tables.

m_N, m_L, m_B and m_D are the ratios of width, depth, batch size and tokens to the base run.
"""

from typing import get_args

import pytest

from forerun._proxies.core import canon
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.numbers import KINDS
from forerun._proxies.core.powers import Powers, Ratios
from forerun._proxies.core.rules import (
    NAMES,
    PRESETS,
    Name,
    Parametrization,
    find_run_problems,
    get_parametrization,
    get_scaling,
    has_decay,
    make_forward_rule,
    make_kind_rule,
    scale_moments,
    scale_value,
)

# Tables as the papers print them. Each row is a kind of parameter; the columns are initial std,
# learning rate, eps and weight decay.
MUP_TABLE_8 = {  # the package mup 1.0.0 has the same powers
    "embedding": ("1", "1", "1", "1"),
    "hidden": ("m_N^-1/2", "m_N^-1", "1", "m_N"),
    "block_gain": ("1", "1", "1", "1"),
    "block_bias": ("1", "1", "1", "1"),
    "qk_gain": ("1", "1", "1", "1"),
    "final_gain": ("1", "1", "1", "1"),
    "final_bias": ("1", "1", "1", "1"),
    "readout": ("1", "1", "1", "1"),
}
COMPLETEP_TABLE_1 = {  # at alpha = 1/2, which makes every power visible
    "embedding": ("1", "1", "1", "1"),
    "hidden": ("m_N^-1/2", "m_N^-1 m_L^-1/2", "m_N^-1 m_L^-1/2", "m_N"),
    "block_gain": ("1", "m_L^-1/2", "m_N^-1 m_L^-1/2", "1"),
    "block_bias": ("1", "m_L^-1/2", "m_N^-1 m_L^-1/2", "1"),
    "final_gain": ("1", "1", "1", "1"),
    "readout": ("1", "1", "1", "1"),
}
COMPLETEDP_TABLE_1 = {
    "embedding": ("1", "m_B^1/2 m_D^-1/2", "m_N^-1 m_B^-1/2 m_D^1/2", "m_B^1/2 m_D^-1/2"),
    "hidden": (
        "m_N^-1/2",
        "m_N^-1 m_L^-1/2 m_B^1/2 m_D^-1/2",
        "m_N^-1 m_L^-1/2 m_B^-1/2 m_D^1/2",
        "m_N m_B^1/2 m_D^-1/2",
    ),
    "block_bias": (
        "1",
        "m_L^-1/2 m_B^1/2 m_D^-1/2",
        "m_N^-1 m_L^-1/2 m_B^-1/2 m_D^1/2",
        "m_B^1/2 m_D^-1/2",
    ),
    "block_gain": (
        "1",
        "m_L^-1/2 m_B^1/2 m_D^-1/2",
        "m_N^-1 m_L^-1/2 m_B^-1/2 m_D^1/2",
        "m_B^1/2 m_D^-1/2",
    ),
    "qk_gain": ("1", "m_L^-1/2 m_B^1/2 m_D^-1/2", "m_L^-1/2 m_B^-1/2 m_D^1/2", "m_B^1/2 m_D^-1/2"),
    "final_gain": ("1", "m_B^1/2 m_D^-1/2", "m_B^-1/2 m_D^1/2", "m_B^1/2 m_D^-1/2"),
    "final_bias": ("1", "m_B^1/2 m_D^-1/2", "m_B^-1/2 m_D^1/2", "m_B^1/2 m_D^-1/2"),
    "readout": ("m_N^-1", "m_N^-1 m_B^1/2 m_D^-1/2", "m_B^-1/2 m_D^1/2", "m_N m_B^1/2 m_D^-1/2"),
}
# Megatron core 0.18.2 and 0.19.2 with --use-mup
MEGATRON_LM = MUP_TABLE_8 | {"hidden": ("m_N^-1/2", "m_N^-1", "m_N^-1", "1")}
UMUP = {  # the weight decay is independent and is not scaled
    "embedding": ("1", "m_N^-1/2", "1", "1"),
    "hidden": ("m_N^-1/2", "m_N^-1 m_L^-1/2", "1", "1"),
    "block_gain": ("1", "m_L^-1/2", "1", "1"),
    "final_gain": ("1", "1", "1", "1"),
    "readout": ("1", "1", "1", "1"),
}
TABLES = [
    (get_parametrization("mup"), MUP_TABLE_8, {"residual": "1", "output": "m_N^-1"}),
    (
        get_parametrization("completep", depth_alpha=0.5),
        COMPLETEP_TABLE_1,
        {"residual": "m_L^-1/2", "output": "m_N^-1"},
    ),
    (
        get_parametrization("completedp", depth_alpha=0.5),
        COMPLETEDP_TABLE_1,
        {"residual": "m_L^-1/2", "output": "1"},
    ),
    (
        get_parametrization("mup_no_wd_scaling", eps="hidden"),
        MEGATRON_LM,
        {"residual": "1", "output": "m_N^-1"},
    ),
    (get_parametrization("umup"), UMUP, {"residual": "m_L^-1/2", "output": "m_N^-1"}),
]
"""Each parametrization with its table and the powers of its forward multipliers."""


def format_row(parametrization, kind):
    """Return the row of one kind of parameter in the notation of the tables."""
    rule = make_kind_rule(parametrization, kind)
    return tuple(map(str, (rule.init_std, rule.learning_rate, rule.eps, rule.weight_decay)))


@pytest.mark.parametrize(
    ("parametrization", "table", "forward"),
    [pytest.param(*row, id=str(row[0])) for row in TABLES],
)
def test_rules_match_the_published_tables(parametrization, table, forward):
    assert {kind: format_row(parametrization, kind) for kind in table} == table
    forward_rule = make_forward_rule(parametrization)
    assert {part: str(powers) for part, powers in forward_rule.items()} == forward


def test_standard_parametrization_scales_nothing():
    standard = get_parametrization("sp")
    for kind in KINDS:
        assert format_row(standard, kind) == ("1", "1", "1", "1")
    assert {str(powers) for powers in make_forward_rule(standard).values()} == {"1"}


@pytest.mark.parametrize(
    ("options", "kind", "expected"),
    [
        ({"weight_decay": "unscaled"}, "hidden", ("m_N^-1/2", "m_N^-1", "1", "1")),
        ({"weight_decay": "root"}, "hidden", ("m_N^-1/2", "m_N^-1", "1", "m_N^1/2")),
        ({"output": "absorbed"}, "readout", ("m_N^-1", "m_N^-1", "1", "m_N")),
        (
            {"output": "absorbed", "weight_decay": "unscaled"},
            "readout",
            ("m_N^-1", "m_N^-1", "1", "1"),
        ),
        (
            {"eps": "hidden", "depth_alpha": 0.5},
            "hidden",
            ("m_N^-1/2", "m_N^-1 m_L^-1/2", "m_N^-1 m_L^-1/2", "m_N"),
        ),
        ({"eps": "hidden"}, "readout", ("1", "1", "1", "1")),
        ({"eps": "blocks"}, "embedding", ("1", "1", "1", "1")),
        ({"eps": "all", "depth_alpha": 1.0}, "final_gain", ("1", "1", "m_N^-1 m_L^-1", "1")),
        ({"eps": "completedp"}, "readout", ("1", "1", "m_N^-1", "1")),
        ({"eps": "completedp", "output": "absorbed"}, "readout", ("m_N^-1", "m_N^-1", "1", "m_N")),
        ({"embedding_rate": "inverse_root"}, "embedding", ("1", "m_N^-1/2", "1", "1")),
        ({"rate_duration_power": -0.32}, "block_gain", ("1", "m_D^-0.32", "1", "1")),
        ({"rate_batch_power": 0.5}, "readout", ("1", "m_B^1/2", "1", "1")),
    ],
)
def test_option_changes_the_row_of_its_kind(options, kind, expected):
    assert format_row(get_parametrization("mup", **options), kind) == expected


def test_independent_decay_scales_as_rate_times_coupled_decay():
    coupled = get_parametrization("completedp")
    independent = get_parametrization("completedp", weight_decay="independent")
    rule = make_kind_rule(coupled, "hidden")
    product = rule.learning_rate.multiply(rule.weight_decay)
    assert str(product) == "m_B m_D^-1"
    assert str(make_kind_rule(independent, "hidden").weight_decay) == "m_B m_D^-1"


@pytest.mark.parametrize(
    ("decayed", "kinds"),
    [
        ("matrices", {"hidden", "readout"}),
        ("two_dimensional", {"hidden", "readout", "embedding"}),
        ("all", set(KINDS)),
    ],
)
def test_option_decayed_selects_the_kinds_with_weight_decay(decayed, kinds):
    parametrization = get_parametrization("mup", decayed=decayed)
    assert {kind for kind in KINDS if has_decay(parametrization, kind)} == kinds


def test_powers_are_formatted_multiplied_and_evaluated():
    powers = Powers(width=-1, depth=0.5, batch=1, duration=-0.28)
    assert str(powers) == "m_N^-1 m_L^1/2 m_B m_D^-0.28"
    assert powers.evaluate(Ratios(width=4, depth=9, batch=2, duration=3)) == pytest.approx(
        0.25 * 3 * 2 * 3**-0.28
    )
    assert powers.multiply(Powers(width=1, duration=0.28)) == Powers(depth=0.5, batch=1)
    assert powers.evaluate(Ratios()) == 1.0
    with pytest.raises(
        SpecError, match=r"width = 0: must be a finite number, above 0; depth = nan"
    ):
        Ratios(width=0, depth=float("nan"))


def test_presets_have_their_name_and_survive_json():
    assert NAMES == get_args(Name) == tuple(PRESETS)
    for name in NAMES:
        assert get_parametrization(name).name == str(get_parametrization(name)) == name
        assert not get_parametrization(name).changed
        text = canon.to_canonical_json(get_parametrization(name))
        assert canon.decode(Parametrization, canon.parse(text), "p") == get_parametrization(name)
    changed = get_parametrization("completep", depth_alpha=0.5, eps="all")
    assert changed.changed == {"depth_alpha": 0.5, "eps": "all"}
    assert str(changed) == "completep(depth_alpha=0.5, eps=all)"


HPARAMS = Hparams(learning_rate=0.1, weight_decay=0.5, beta1=0.9, beta2=0.95)


def test_scale_moments_scales_one_minus_beta_by_batch_over_duration():
    completep, completedp = get_parametrization("completep"), get_parametrization("completedp")
    unscaled = {"beta1": 0.9, "beta2": 0.95}
    assert scale_moments(completep, Ratios(batch=4), HPARAMS) == unscaled
    scaled = scale_moments(completedp, Ratios(batch=4, duration=8), HPARAMS)
    assert scaled == pytest.approx({"beta1": 0.95, "beta2": 0.975})
    with pytest.raises(
        SpecError,
        match=r"m_B / m_D = 16 gives beta1 = -0.6, outside \[0, 1\): use a smaller batch",
    ):
        scale_moments(completedp, Ratios(batch=16), HPARAMS)
    with pytest.raises(SpecError, match=r"outside \[0, 1\): use a larger batch, a shorter run"):
        scale_moments(completedp, Ratios(duration=1e20), HPARAMS)


def test_scale_value_follows_the_table_of_powers():
    rules, ratios = get_parametrization("completedp"), Ratios(width=4, depth=2, batch=2, duration=4)
    rule = make_kind_rule(rules, "hidden")
    for name in ("learning_rate", "weight_decay", "eps"):
        powers = getattr(rule, name)
        assert get_scaling(rules, name) == powers
        assert scale_value(rules, name, 0.5, ratios) == 0.5 * powers.evaluate(ratios)
    assert scale_value(rules, "clip_norm", 0.5, ratios) == 0.5, "the clip norm is never scaled"


def test_all_problems_of_a_run_are_listed():
    problems = find_run_problems(
        get_parametrization("completedp"), Ratios(batch=16), HPARAMS, tied=True
    )
    assert [problem.split(":")[0] for problem in problems] == [
        "tied = True under completedp",
        "1 - beta1 times m_B / m_D = 16 gives beta1 = -0.6, outside [0, 1)",
    ]
    assert not find_run_problems(
        get_parametrization("completedp", output="multiplier"), Ratios(), HPARAMS, tied=True
    )
    assert not find_run_problems(get_parametrization("completedp"), Ratios(), HPARAMS, tied=False)


def test_all_wrong_names_and_options_are_listed():
    with pytest.raises(SpecError) as caught:
        get_parametrization(
            "complete_p", depth_alfa=0.5, eps="some", depth_alpha=0.3, rate_batch_power=3
        )
    assert caught.value.problems == [
        "parametrization = 'complete_p': did you mean completep?",
        "depth_alfa is not an option: did you mean depth_alpha?",
        "eps = 'some': must be one of unscaled, hidden, blocks, all, completedp",
        "rate_batch_power = 3: must be a finite number, at least -2 and at most 2",
        "depth_alpha = 0.3: must be a finite number, at least 0.5 and at most 1",
    ]
    with pytest.raises(
        SpecError, match="must be one of sp, mup, mup_no_wd_scaling, completep, completedp, umup"
    ):
        get_parametrization("zzz")


def test_option_without_effect_is_refused():
    for options in (
        {"output": "absorbed"},
        {"weight_decay": "root"},
        {"embedding_rate": "inverse_root"},
        {"eps": "blocks"},
    ):
        (name,) = options
        with pytest.raises(SpecError, match=f"{name} = .*: sp has no width rule"):
            get_parametrization("sp", **options)
        assert get_parametrization("mup", **options)


def test_depth_rule_works_without_a_width_rule():
    assert format_row(get_parametrization("sp", depth_alpha=0.5, eps="blocks"), "hidden") == (
        "1",
        "m_L^-1/2",
        "m_L^-1/2",
        "1",
    )
