"""From transfer tests to the values that are launched: base optimum, measured exponents, verdicts
at a target.
"""

from launcher.experiments.sweep_grids import Sizes, base_sizes
from launcher.experiments.transferred_values import verdicts_at


def test_a_wider_longer_target_is_judged_anew(study, ledger, found):
    near = verdicts_at(study, ledger, found.transferred, base_sizes(study))
    far = verdicts_at(
        study, ledger, found.transferred, Sizes(width=4096, depth=1, batch=64, duration=10**9)
    )
    assert (
        far.tests[0][1].verdict.question.target_size == 4096
        and near.tests[0][1].verdict.question.target_size == 8
    )
    # over duration, as far as this tiny study says
    wide = [v.tests[1][1].verdict.offset for v in (near, far)]
    if None not in wide:  # with an older torch its runs do not say it
        assert wide[1].high - wide[1].low > wide[0].high - wide[0].low
    assert near.tests[0][1].verdict != far.tests[0][1].verdict
    assert far.together.untested == ()


def test_the_decision_holds_each_rule_with_its_evidence(study, found):
    from launcher.study.evidence import decision_of

    decision = decision_of(study, found)
    rules = {(rule.hyperparameter, rule.axis): rule for rule in decision.transfer}
    duration = rules["learning_rate", "duration"]
    assert (duration.source, duration.power) == (
        "measured",
        found.transferred.powers_at(found.choice.sizes)["duration"],
    )
    assert duration.measured_low < duration.power < duration.measured_high
    assert (
        rules["learning_rate", "width"].source == "parametrization"
        and rules["learning_rate", "width"].power == 0
    )
    assert rules["clip_norm", "width"].measured_power is None
