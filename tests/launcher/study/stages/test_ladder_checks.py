"""Tests of the checks of the ladder's rungs at other learning rates, all checked rungs together:
the noise that is assumed, the gate, and the report. A rung is a run to which a scaling law is
fitted; `test_rung_checks` tests the check of a single one.
"""

import dataclasses
from types import SimpleNamespace

import pytest

from forerun._launcher.report.answers.report_text import format_ladder
from forerun._launcher.report.views.fit_findings import Ladder
from forerun._launcher.report.views.scaling_sections import describe_rung_check
from forerun._launcher.study.stages import ladder_checks
from forerun._launcher.study.stages.gates import judge_ladder_rates
from forerun._launcher.study.stages.ladder_checks import (
    LadderChecks,
    RateRegret,
    RungCheck,
    RungRate,
)
from forerun._proxies.core import canon
from forerun._proxies.core.shape import Shape

WIDTHS, STEPS = (32, 48, 64, 96, 128), (150, 400, 1000)


def make_rung(width, steps):
    shape = Shape(
        num_layers=2,
        width=width,
        num_heads=2,
        num_kv_heads=2,
        ffn_width=2 * width,
        vocab_size=256,
        seq_len=64,
    )
    return SimpleNamespace(
        id=f"{width}/{steps}",
        shape=shape,
        num_tokens=steps * 1024,
        schedule=SimpleNamespace(num_steps=steps),
        seed=100,
    )


RUNGS = [make_rung(width, steps) for width in WIDTHS for steps in STEPS]


def make_check(index, loss_above=2.04):
    """Return the check of a rung that is tuned, whose loss is 2.0 and whose regret is 0.001 nats.

    Args:
        index: Index of the rung in `RUNGS`.
        loss_above: Loss at a rate one octave higher.
    """
    regret = RateRegret(
        nats=0.001,
        interval=(0.001, 0.001),
        optimum_octaves=0.1,
        optimum_interval=(-0.1, 0.2),
        reach=(-1.0, 1.0),
    )
    losses = {-1.0: 2.05, 0.0: 2.0, 1.0: loss_above}
    tried = tuple(
        RungRate(octaves=x, learning_rate=0.01 * 2**x, losses_nats=(loss,), diverged=False)
        for x, loss in losses.items()
    )
    return RungCheck(
        rung=RUNGS[index],
        rates=tried,
        noise_nats=0.005,
        excess=regret,
        outcome="tuned",
        words="words",
    )


def test_noise_of_a_run_is_the_largest_of_the_learning_rates_tests():
    def make_test(hyperparameter, noise):
        verdict = SimpleNamespace(noise_nats=noise)
        return SimpleNamespace(hyperparameter=hyperparameter), verdict

    rates = [make_test("learning_rate", noise) for noise in (0.003, None, 0.005, 0.004)]
    clip = make_test("clip_norm", 0.1)
    assert ladder_checks.find_noise(SimpleNamespace(tests=[*rates, clip])) == 0.005
    assert ladder_checks.find_noise(SimpleNamespace(tests=[rates[1], clip])) is None


def make_checks(*outcomes, num_planned=None):
    """Return checks with these outcomes, out of `num_planned` rungs that should be checked."""
    rungs = tuple(
        dataclasses.replace(make_check(index), outcome=outcome, words=f"rung {index} says")
        for index, outcome in enumerate(outcomes)
    )
    return LadderChecks(rungs=rungs, num_planned=len(rungs) if num_planned is None else num_planned)


@pytest.mark.parametrize(
    ("checks", "outcome", "words"),
    [
        (None, "cannot_tell", "no rung is checked at other rates"),
        (make_checks("tuned", "tuned"), "passed", "rung 0 says; rung 1 says"),
        (make_checks("tuned", "mis_tuned"), "failed", "test it up to that size"),
        (make_checks("cannot_tell", "mis_tuned"), "failed", "transfer.durations"),
        (
            make_checks("tuned", num_planned=2),
            "cannot_tell",
            "1 of 2 rungs not checked yet: run `forerun ladder PLAN`",
        ),
    ],
)
def test_gate_of_the_ladders_learning_rates_follows_the_checks(checks, outcome, words):
    gate = judge_ladder_rates(checks)
    assert (gate.name, gate.outcome) == ("ladder_tuned", outcome)
    assert words in gate.reason


STUDY = SimpleNamespace(count_params=lambda shape: 1000)
"""A stand-in with all that the report needs of a study."""


def test_report_has_the_checks_as_json_and_as_a_table():
    check = describe_rung_check(STUDY, make_check(0, loss_above=1.99))
    assert [rate.octaves for rate in check.offsets] == [-1.0, 0.0, 1.0]
    assert check.better_octaves == 1.0
    body = canon.to_json(check.to_json())
    assert {"width", "params", "tokens", "offsets", "excess_nats", "outcome", "words"} <= set(body)
    assert body["excess_nats"] == {"value": 0.001, "interval": [0.001, 0.001]}
    text = format_ladder(Ladder(rungs=[], branches=None, checks=(check,)))
    assert "checked at other rates:" in text
    assert "checked" not in format_ladder(Ladder(rungs=[], branches=None))
