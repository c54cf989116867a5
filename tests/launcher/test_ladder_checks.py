"""What the checked rungs say together: the gate, and plain data."""

import dataclasses
from types import SimpleNamespace

import pytest

from launcher.answers.texts import ladder_text
from launcher.experiments.ladder import Excess, RungCheck, RungRate
from launcher.study import ladder_checks
from launcher.study.gates import Gate, tuned_gate
from launcher.study.ladder_checks import LadderChecks, checks_body
from proxies.core import canon
from proxies.core.shape import Shape

WIDTHS, STEPS = (32, 48, 64, 96, 128), (150, 400, 1000)


def a_rung(width, steps):
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


RUNGS = [a_rung(width, steps) for width in WIDTHS for steps in STEPS]


def a_check(index, nats, better=None, outcome="tuned"):
    """A checked rung that loses so many nats."""
    excess = Excess(
        nats=nats,
        interval=(nats, nats),
        optimum_octaves=0.1,
        optimum_interval=(-0.1, 0.2),
        reach=(-1.0, 1.0),
    )
    own = 2.0
    losses = {-1.0: own + 0.05, 0.0: own, 1.0: own + 0.04 if better is None else better}
    tried = tuple(
        RungRate(octaves=x, learning_rate=0.01 * 2**x, losses_nats=(loss,), diverged=False)
        for x, loss in losses.items()
    )
    return RungCheck(
        rung=RUNGS[index],
        tried=tried,
        noise_nats=0.005,
        excess=excess,
        outcome=outcome,
        words="words",
    )


def test_the_noise_of_a_run_is_the_largest_that_tests_of_the_rate_found():
    def a_test(hyperparameter, noise):
        verdict = SimpleNamespace(noise_nats=noise)
        return SimpleNamespace(hyperparameter=hyperparameter), SimpleNamespace(verdict=verdict)

    rates = [a_test("learning_rate", noise) for noise in (0.003, None, 0.005, 0.004)]
    assert (
        ladder_checks.noise_of(SimpleNamespace(tests=[*rates, a_test("clip_norm", 0.1)])) == 0.005
    )
    assert (
        ladder_checks.noise_of(SimpleNamespace(tests=[rates[1], a_test("clip_norm", 0.1)])) is None
    )


def checks(*outcomes, wanted=None):
    rungs = tuple(
        dataclasses.replace(a_check(index, 0.001), outcome=outcome, words=f"rung {index} says")
        for index, outcome in enumerate(outcomes)
    )
    return LadderChecks(rungs=rungs, wanted=len(rungs) if wanted is None else wanted)


@pytest.mark.parametrize(
    ("found", "outcome", "said"),
    [
        (None, "cannot_tell", "no rung is checked at other rates"),
        (checks("tuned", "tuned"), "passed", "rung 0 says; rung 1 says"),
        (checks("tuned", "mis_tuned"), "failed", "test it up to that size"),
        (checks("cannot_tell", "mis_tuned"), "failed", "transfer.durations"),
        (
            checks("tuned", wanted=2),
            "cannot_tell",
            "1 of 2 rungs not checked yet: run `forerun ladder PLAN`",
        ),
    ],
)
def test_the_gate(found, outcome, said):
    gate = tuned_gate(found)
    assert (gate.name, gate.outcome) == ("ladder_tuned", outcome)
    assert said in gate.reason


COUNTING = SimpleNamespace(num_params=lambda shape: 1000)
"""What of a study the body asks."""


def test_the_body_is_plain_data_and_reads_as_a_table():
    gate = Gate(name="ladder_tuned", outcome="passed", reason="because")
    found = LadderChecks(rungs=(a_check(0, 0.001, better=1.99),), wanted=1)
    body = checks_body(COUNTING, found, [gate])
    canon.canonical(body)
    assert set(body) == {"checks", "tuned"}
    (one,) = body["checks"]
    assert {"width", "params", "tokens", "offsets", "excess_nats", "outcome", "words"} <= set(one)
    assert [tried["octaves"] for tried in one["offsets"]] == [-1.0, 0.0, 1.0] and one[
        "better_octaves"
    ] == 1.0
    assert one["excess_nats"] == {"value": 0.001, "interval": [0.001, 0.001]}
    assert body["tuned"] == {"outcome": "passed", "reason": "because"}
    text = ladder_text({"rungs": [], **body})
    assert "checked at other rates:" in text
    assert "checked" not in ladder_text({"rungs": []}), "a report from before there were checks"
    assert checks_body(COUNTING, None, ()) == {"checks": [], "tuned": None}
