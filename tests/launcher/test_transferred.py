"""From transfer tests to the values that are launched: base optimum, measured exponents, verdicts at a target."""

import math

import pytest
from tiny_study import replay

from launcher.experiments.conventions import WarmupRule
from launcher.experiments.sweep_grids import Sizes, base_sizes
from launcher.experiments.transferred import SPEND, Transferred, asked, transfer_body, verdicts_at
from sweeps.store.ledger import Ledger

BASE = Sizes(width=8, depth=1, batch=64, duration=384)


def found_with(powers):
    best = {"clip_norm": 1.0, "warmup_fraction": 0.1, "learning_rate": 0.5}
    return Transferred(
        tests=(), best=best, ties=(), warmup=WarmupRule(rule="share"), log2_lr=-5.0, at_optimum=True, powers=powers
    )


def test_the_rate_follows_every_measured_exponent():
    target = Sizes(width=64, depth=4, batch=256, duration=384 * 16)
    assert found_with({}).rate_at(BASE, target) == 2**-5
    both = found_with({"duration": -0.25, "batch": 0.5})
    assert both.rate_at(BASE, target) == pytest.approx(2**-5 * 16**-0.25 * 4**0.5, rel=1e-3)
    assert both.rate_at(BASE, BASE) == 2**-5
    assert both.point == {"clip_norm": 1.0, "warmup_fraction": 0.1, "learning_rate": 2**-5}


def test_a_wider_longer_target_is_judged_anew(study, ledger, found):
    near = verdicts_at(study, ledger, found.transferred, base_sizes(study))
    far = verdicts_at(study, ledger, found.transferred, Sizes(width=4096, depth=1, batch=64, duration=10**9))
    assert far.tests[0][1].verdict.question.target_size == 4096 and near.tests[0][1].verdict.question.target_size == 8
    wide = [v.tests[1][1].verdict.offset for v in (near, far)]  # over duration, as far as this tiny study says
    if None not in wide:  # with an older torch its runs do not say it
        assert wide[1].high - wide[1].low > wide[0].high - wide[0].low
    assert near.tests[0][1].verdict != far.tests[0][1].verdict
    assert far.together.untested == ()


def test_spending_asks_for_more_and_is_remembered(finished, tmp_path, study):
    def rates(study, ledger):
        tests = [test for test in asked(study, ledger) if test.hyperparameter == "learning_rate"]
        return {spec.id for test in tests for spec in test.specs}

    other, before = replay(finished / "study", tmp_path / "a", lambda record: True)
    with Ledger.open(tmp_path / "a", other.question, create=False) as ledger:
        ledger.append(SPEND, "0", {"together": "cannot_tell"})
        after = rates(other, ledger)
    assert rates(other, before) < after, "the tiny study cannot tell, and wants more"
    assert rates(other, Ledger.read(tmp_path / "a")) == after


def test_the_body_says_what_every_value_becomes(study, ledger, found):
    body = transfer_body(study, found.transferred, found.verdicts, ledger.results())
    assert [(t["hyperparameter"], t["axis"]) for t in body["tests"]] == [
        ("learning_rate", "width"), ("learning_rate", "duration"), ("clip_norm", "width"),
    ]  # fmt: skip
    assert {run["arm"] for run in body["tests"][0]["runs"]} == {"mup", "sp"}
    values = {value["hyperparameter"]: value for value in body["values"]}
    rate = values["learning_rate"]
    power = found.transferred.powers["duration"]
    ratio = found.choice.num_tokens / base_sizes(study).duration
    assert rate["target_value"] == pytest.approx(rate["base_value"] * ratio**power, rel=1e-3)
    assert f"^{power:+.3f} over duration, as measured" in rate["rule"]
    assert rate["tested"] == ["width", "duration"] and rate["untested"] == []
    assert values["clip_norm"]["tested"] == ["width"] and values["clip_norm"]["untested"] == ["duration"]
    assert values["warmup_fraction"]["tested"] == [] and values["warmup_fraction"]["outcome"] is None
    assert rate["outcome"] == body["together"]["outcome"] == found.verdicts.together.outcome
    assert math.isclose(2**found.verdicts.together.transferred_log2, rate["target_value"], rel_tol=1e-3)


def test_the_decision_holds_each_rule_with_its_evidence(study, found):
    from launcher.study.evidence import decision_of

    decision = decision_of(study, found)
    rules = {(rule.hyperparameter, rule.axis): rule for rule in decision.transfer}
    duration = rules["learning_rate", "duration"]
    assert (duration.source, duration.power) == ("measured", found.transferred.powers["duration"])
    assert duration.measured_low < duration.power < duration.measured_high
    assert rules["learning_rate", "width"].source == "parametrization" and rules["learning_rate", "width"].power == 0
    assert rules["clip_norm", "width"].measured_power is None
