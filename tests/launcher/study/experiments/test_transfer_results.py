"""Tests of the transfer results of a finished study: the verdicts at a target, and the transfer
rules of the decision.
"""

from forerun._launcher.study.experiments.sizes import Sizes, get_base_sizes
from forerun._launcher.study.experiments.transfer_results import judge_tests


def test_larger_target_gets_its_own_verdicts(study, ledger, findings):
    near = judge_tests(study, ledger, findings.transferred, get_base_sizes(study))
    far = judge_tests(
        study, ledger, findings.transferred, Sizes(width=4096, depth=1, batch=64, duration=10**9)
    )
    assert (
        far.tests[0][1].question.target_size == 4096 and near.tests[0][1].question.target_size == 8
    )
    # The interval over duration widens; with older versions of torch this tiny study has none.
    offsets = [verdicts.tests[1][1].offset for verdicts in (near, far)]
    if None not in offsets:
        near_offset, far_offset = offsets
        assert far_offset.high - far_offset.low > near_offset.high - near_offset.low
    assert near.tests[0][1] != far.tests[0][1]
    assert far.together.untested == ()


def test_decision_has_each_rule_with_its_evidence(study, findings):
    from forerun._launcher.study.stages.study_findings import build_decision_from_findings

    decision = build_decision_from_findings(study, findings)
    rules = {(rule.hyperparameter, rule.axis): rule for rule in decision.transfer}
    duration = rules["learning_rate", "duration"]
    assert (duration.source, duration.power) == (
        "measured",
        findings.transferred.powers_at(findings.choice.sizes)["duration"],
    )
    assert duration.measured_low < duration.power < duration.measured_high
    assert (
        rules["learning_rate", "width"].source == "parametrization"
        and rules["learning_rate", "width"].power == 0
    )
    assert rules["clip_norm", "width"].measured_power is None
