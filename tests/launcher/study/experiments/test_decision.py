"""Tests of the decision of a study, that is, all numbers of the main run: they come from the
findings, the digest depends on losses only, and no decision is made while runs are missing.
"""

import pytest
from tiny_study import copy_records

from forerun._launcher.study.experiments.sizes import get_base_sizes
from forerun._launcher.study.experiments.transfer_results import (
    StageMissingError,
    load_transfer_result,
)
from forerun._launcher.study.stages import main_run_choice
from forerun._launcher.study.stages.study_findings import (
    build_decision_from_findings,
    gather_findings,
)
from forerun._sweeps.store.ledger import Ledger


def test_decision_has_the_findings_numbers(study, findings):
    decision = build_decision_from_findings(study, findings)
    assert decision.learning_rate.schedule.num_steps == findings.choice.num_steps
    assert decision.clip_norm == findings.searched.best["clip_norm"]
    hidden = next(group for group in decision.groups if group.kind == "hidden")
    scale = study.plan.proxy.base_width / decision.shape.width
    rate = findings.transferred.get_rate(get_base_sizes(study), findings.choice.sizes)
    assert hidden.learning_rate == pytest.approx(rate * scale)
    duration = findings.choice.num_tokens / get_base_sizes(study).duration
    power = findings.transferred.powers_at(findings.choice.sizes)["duration"]
    assert (
        rate == pytest.approx(findings.transferred.learning_rate * duration**power, rel=1e-3)
        and power != 0
    )
    assert decision.predicted.low_nats < decision.predicted.loss_nats < decision.predicted.high_nats
    assert decision.data.data_id == study.manifest.data_id


def test_digest_depends_on_losses_and_not_on_times(finished_study_dir, tmp_path, study, findings):
    """A loss of the ladder that is 0.001 nats higher changes the digest; seconds do not."""
    rung = findings.ladder[-1].id

    def compute_digest(**changes):
        def edit(record):
            if (record.kind, record.key) != ("result", rung):
                return record.body
            return {**record.body, "result": {**record.body["result"], **changes}}

        edited_study, records = copy_records(
            finished_study_dir / "study",
            tmp_path / "-".join(changes),
            lambda record: record.kind != "fit",
            edit,
        )
        findings = gather_findings(edited_study, records)
        return build_decision_from_findings(edited_study, findings).digest

    digest = build_decision_from_findings(study, findings).digest
    loss = Ledger.read(finished_study_dir / "study").get_results()[rung].loss_nats
    assert compute_digest(seconds=1e6, environment={}) == digest
    assert compute_digest(loss_nats=loss + 0.001) != digest


def test_missing_rung_or_transfer_run_is_an_error(finished_study_dir, tmp_path, study, findings):
    rung, point = findings.ladder[0].id, findings.transferred.tests[0].specs[0].id
    _, no_rung = copy_records(
        finished_study_dir / "study", tmp_path / "a", lambda record: record.key != rung
    )
    _, no_point = copy_records(
        finished_study_dir / "study", tmp_path / "b", lambda record: record.key != point
    )
    with pytest.raises(
        StageMissingError,
        match=f"the ladder has not ended: `{study.format_command('ladder')}` runs",
    ):
        main_run_choice.build_ladder_table(study, findings.ladder, no_rung.get_results())
    with pytest.raises(
        StageMissingError, match=f"have not ended: `{study.format_command('transfer')}`"
    ):
        load_transfer_result(study, no_point)
