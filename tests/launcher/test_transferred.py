"""From transfer tests to the values that are launched: base optimum, measured exponents, verdicts at a target."""

from tiny_study import replay

from launcher.experiments.sweep_grids import Sizes, base_sizes
from launcher.experiments.transferred import SPEND, asked, verdicts_at
from sweeps.store.ledger import Ledger


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


def test_the_decision_holds_each_rule_with_its_evidence(study, found):
    from launcher.study.evidence import decision_of

    decision = decision_of(study, found)
    rules = {(rule.hyperparameter, rule.axis): rule for rule in decision.transfer}
    duration = rules["learning_rate", "duration"]
    assert (duration.source, duration.power) == ("measured", found.transferred.powers["duration"])
    assert duration.measured_low < duration.power < duration.measured_high
    assert rules["learning_rate", "width"].source == "parametrization" and rules["learning_rate", "width"].power == 0
    assert rules["clip_norm", "width"].measured_power is None
