"""The decision: what the digest does and does not depend on."""

import pytest
from tiny_study import replay

from launcher.experiments.sweep_grids import base_sizes
from launcher.experiments.transferred_values import StageMissingError, transferred
from launcher.study import decide
from launcher.study.evidence import decision_of, gather
from sweeps.store.ledger import Ledger


def test_the_decision_says_what_was_found(study, found):
    decision = decision_of(study, found)
    assert decision.learning_rate.schedule.num_steps == found.choice.num_steps
    assert decision.clip_norm == found.searched.best["clip_norm"]
    hidden = next(group for group in decision.groups if group.kind == "hidden")
    scale = study.plan.proxy.base_width / decision.shape.width
    rate = found.transferred.rate_at(base_sizes(study), found.choice.sizes)
    assert hidden.learning_rate == pytest.approx(rate * scale)
    duration = found.choice.num_tokens / base_sizes(study).duration
    power = found.transferred.powers_at(found.choice.sizes)["duration"]
    assert (
        rate == pytest.approx(found.transferred.learning_rate * duration**power, rel=1e-3)
        and power != 0
    )
    assert decision.predicted.low_nats < decision.predicted.loss_nats < decision.predicted.high_nats
    assert decision.data.data_id == study.manifest.data_id


def test_the_digest_follows_a_result_and_not_its_time(finished, tmp_path, study, found):
    """The mutation that makes `same digest` mean something: one loss of the ladder, a thousandth
    higher.
    """
    rung = found.ladder[-1].id

    def edited(**changes):
        def edit(record):
            if (record.kind, record.key) != ("result", rung):
                return record.body
            return {**record.body, "result": {**record.body["result"], **changes}}

        other, records = replay(
            finished / "study",
            tmp_path / str(len(changes)),
            lambda record: record.kind != "fit",
            edit,
        )
        return decision_of(other, gather(other, records)).digest

    digest = decision_of(study, found).digest
    loss = Ledger.read(finished / "study").results()[rung].loss_nats
    assert edited(seconds=1e6, environment={}) == digest
    assert edited(loss_nats=loss + 0.001) != digest


def test_a_missing_rung_or_valley_point_is_missed(finished, tmp_path, study, ledger, found):
    rung, point = found.ladder[0].id, found.transferred.tests[0].specs[0].id
    _, no_rung = replay(finished / "study", tmp_path / "a", lambda record: record.key != rung)
    _, no_point = replay(finished / "study", tmp_path / "b", lambda record: record.key != point)
    with pytest.raises(
        StageMissingError, match=f"the ladder has not ended: `{study.command_line('ladder')}` runs"
    ):
        decide.ladder_table(study, found.ladder, no_rung.results())
    with pytest.raises(
        StageMissingError, match=f"have not ended: `{study.command_line('transfer')}`"
    ):
        transferred(study, no_point)
