from typing import get_args

import pytest

from proxies.core import canon
from proxies.core.checks import SpecError
from proxies.core.hyperparameters import Hparams
from proxies.core.numbers import KINDS
from proxies.core.powers import Powers, Ratios
from proxies.core.rules import (
    NAMES,
    PRESETS,
    Name,
    Parametrization,
    decays,
    forward_rule,
    kind_rule,
    moments,
    named,
    refusals,
    scaled,
    scaling,
)

# Tables as their papers print them: init std, learning rate, eps, weight decay per kind of
# parameter.
MUP_TABLE_8 = {  # and mup 1.0.0
    "embedding": ("1", "1", "1", "1"),
    "hidden": ("m_N^-1/2", "m_N^-1", "1", "m_N"),
    "block_gain": ("1", "1", "1", "1"),
    "block_bias": ("1", "1", "1", "1"),
    "qk_gain": ("1", "1", "1", "1"),
    "final_gain": ("1", "1", "1", "1"),
    "final_bias": ("1", "1", "1", "1"),
    "readout": ("1", "1", "1", "1"),
}
COMPLETEP_TABLE_1 = {  # alpha = 1/2, where every power shows
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
# core 0.18.2 and 0.19.2, --use-mup
MEGATRON_LM = MUP_TABLE_8 | {"hidden": ("m_N^-1/2", "m_N^-1", "m_N^-1", "1")}
UMUP = {  # rates against width and depth; decay is a share, and scales with nothing
    "embedding": ("1", "m_N^-1/2", "1", "1"),
    "hidden": ("m_N^-1/2", "m_N^-1 m_L^-1/2", "1", "1"),
    "block_gain": ("1", "m_L^-1/2", "1", "1"),
    "final_gain": ("1", "1", "1", "1"),
    "readout": ("1", "1", "1", "1"),
}
TABLES = [
    (named("mup"), MUP_TABLE_8, {"residual": "1", "output": "m_N^-1"}),
    (
        named("completep", depth_alpha=0.5),
        COMPLETEP_TABLE_1,
        {"residual": "m_L^-1/2", "output": "m_N^-1"},
    ),
    (
        named("completedp", depth_alpha=0.5),
        COMPLETEDP_TABLE_1,
        {"residual": "m_L^-1/2", "output": "1"},
    ),
    (named("mup_no_wd_scaling", eps="hidden"), MEGATRON_LM, {"residual": "1", "output": "m_N^-1"}),
    (named("umup"), UMUP, {"residual": "m_L^-1/2", "output": "m_N^-1"}),
]


def row(parametrization, kind):
    rule = kind_rule(parametrization, kind)
    return tuple(map(str, (rule.init_std, rule.learning_rate, rule.eps, rule.weight_decay)))


@pytest.mark.parametrize(("parametrization", "table", "forward"), TABLES, ids=str)
def test_the_rules_are_the_papers_tables(parametrization, table, forward):
    assert {kind: row(parametrization, kind) for kind in table} == table
    assert {part: str(powers) for part, powers in forward_rule(parametrization).items()} == forward


def test_the_standard_form_scales_nothing():
    for kind in KINDS:
        assert row(named("sp"), kind) == ("1", "1", "1", "1")
    assert {str(powers) for powers in forward_rule(named("sp")).values()} == {"1"}


@pytest.mark.parametrize(
    ("choice", "kind", "wanted"),
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
def test_each_choice_changes_what_it_says(choice, kind, wanted):
    assert row(named("mup", **choice), kind) == wanted


def test_independent_decay_follows_the_noise_as_rate_times_decay_would():
    coupled, share = named("completedp"), named("completedp", weight_decay="independent")
    rule = kind_rule(coupled, "hidden")
    product = rule.learning_rate.times(rule.weight_decay)
    assert str(product) == str(kind_rule(share, "hidden").weight_decay) == "m_B m_D^-1"


def test_what_decays():
    def decayed(choice):
        return {kind for kind in KINDS if decays(named("mup", decayed=choice), kind)}

    assert decayed("matrices") == {"hidden", "readout"}
    assert decayed("two_dimensional") == {"hidden", "readout", "embedding"}
    assert decayed("all") == set(KINDS)


def test_powers():
    powers = Powers(width=-1, depth=0.5, batch=1, duration=-0.28)
    assert str(powers) == "m_N^-1 m_L^1/2 m_B m_D^-0.28"
    assert powers.at(Ratios(width=4, depth=9, batch=2, duration=3)) == pytest.approx(
        0.25 * 3 * 2 * 3**-0.28
    )
    assert powers.times(Powers(width=1, duration=0.28)) == Powers(depth=0.5, batch=1)
    assert powers.at(Ratios()) == 1.0
    with pytest.raises(
        SpecError, match=r"width = 0: must be a finite number, above 0; depth = nan"
    ):
        Ratios(width=0, depth=float("nan"))


def test_presets_are_named_after_themselves_and_survive_json():
    assert NAMES == get_args(Name) == tuple(PRESETS)
    for name in NAMES:
        assert named(name).name == str(named(name)) == name
        assert not named(name).changed
        assert canon.decode(
            Parametrization, canon.parse(canon.canonical(named(name))), "p"
        ) == named(name)
    own = named("completep", depth_alpha=0.5, eps="all")
    assert own.changed == {"depth_alpha": 0.5, "eps": "all"}
    assert str(own) == "completep(depth_alpha=0.5, eps=all)"


USUAL = Hparams(learning_rate=0.1, weight_decay=0.5, beta1=0.9, beta2=0.95)


def test_moving_averages_are_scaled_by_one_minus_beta():
    assert moments(named("completep"), Ratios(batch=4), USUAL) == {"beta1": 0.9, "beta2": 0.95}
    scaled = moments(named("completedp"), Ratios(batch=4, duration=8), USUAL)
    assert scaled == pytest.approx({"beta1": 0.95, "beta2": 0.975})
    with pytest.raises(
        SpecError, match=r"m_B / m_D = 16 gives beta1 = -0.6, outside \[0, 1\): use a smaller batch"
    ):
        moments(named("completedp"), Ratios(batch=16), USUAL)
    with pytest.raises(SpecError, match=r"outside \[0, 1\): use a larger batch, a shorter run"):
        moments(named("completedp"), Ratios(duration=1e20), USUAL)


def test_every_hyperparameter_is_scaled_as_the_table_of_powers_says():
    rules, ratios = named("completedp"), Ratios(width=4, depth=2, batch=2, duration=4)
    rule = kind_rule(rules, "hidden")
    for one in ("learning_rate", "weight_decay", "eps"):
        assert scaling(rules, one) == getattr(rule, one)
        assert scaled(rules, one, 0.5, ratios) == 0.5 * getattr(rule, one).at(ratios)
    assert scaled(rules, "clip_norm", 0.5, ratios) == 0.5, "the same number at every shape"


def test_what_a_run_may_not_be_is_said_at_once():
    problems = refusals(named("completedp"), Ratios(batch=16), USUAL, tied=True)
    assert [problem.split(":")[0] for problem in problems] == [
        "tied = True under completedp",
        "1 - beta1 times m_B / m_D = 16 gives beta1 = -0.6, outside [0, 1)",
    ]
    assert not refusals(named("completedp", output="multiplier"), Ratios(), USUAL, tied=True)
    assert not refusals(named("completedp"), Ratios(), USUAL, tied=False)


def test_bad_names_and_choices_are_said_at_once():
    with pytest.raises(SpecError) as caught:
        named("complete_p", depth_alfa=0.5, eps="some", depth_alpha=0.3, rate_batch_power=3)
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
        named("zzz")


def test_a_choice_that_nothing_would_follow_is_refused():
    for choice in (
        {"output": "absorbed"},
        {"weight_decay": "root"},
        {"embedding_rate": "inverse_root"},
        {"eps": "blocks"},
    ):
        with pytest.raises(SpecError, match=f"{next(iter(choice))} = .*: sp has no width rule"):
            named("sp", **choice)
        assert named("mup", **choice)


def test_a_depth_rule_needs_no_width_rule():
    assert row(named("sp", depth_alpha=0.5, eps="blocks"), "hidden") == (
        "1",
        "m_L^-1/2",
        "m_L^-1/2",
        "1",
    )
