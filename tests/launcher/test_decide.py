"""The decision: what the digest does and does not depend on."""

import pytest
from tiny_study import replay

from launcher.experiments.sweep_grids import base_sizes
from launcher.experiments.transferred import StageMissingError, searched, transferred
from launcher.study import decide
from launcher.study.evidence import decision_of, gather
from sweeps.store.ledger import Ledger


def test_the_choice_spends_the_budget_on_a_whole_shape(study, found):
    choice, plan = found.choice, study.plan
    params = decide.count_params(choice.shape).total
    assert choice.shape.width % plan.target.width_multiple == 0
    assert choice.num_tokens == choice.num_steps * plan.proxy.batch_tokens
    step_flops = 6 * params * plan.proxy.batch_tokens
    assert abs(choice.num_steps * step_flops - plan.target.budget_flops) <= step_flops / 2


@pytest.mark.parametrize(("params", "width", "heads"), [(1e9, 1536, 24), (7e9, 4608, 72)])
def test_both_verbs_at_sizes_that_had_two_answers(study, params, width, heads):
    """A 24-layer template: `freeze` took 1,664 wide with 26 heads and 4,736 with 74, `allocate` 15 and 30 layers."""
    plan = study.plan
    model = plan.model.model_copy(update={"num_layers": 24, "head_dim": 64, "ffn_ratio": 2.75, "seq_len": 1024})
    large = dataclasses.replace(study, manifest=dataclasses.replace(study.manifest, vocab_size=50_304))
    fit = fit_runs(ladder(CHINCHILLA), "chinchilla", bootstrap=0)
    low, high = 1e15, 1e25
    for _ in range(60):
        flops = (low * high) ** 0.5
        low, high = (flops, high) if allocate(fit, flops).params < params else (low, flops)
    proxy = plan.proxy.model_copy(update={"base_width": 256, "batch_tokens": 2**19})
    target = plan.target.model_copy(update={"budget_flops": low, "width_multiple": 64})
    large = dataclasses.replace(large, plan=plan.model_copy(update={"model": model, "proxy": proxy, "target": target}))
    choice = decide.choose(large, fit)
    assert (choice.shape.num_layers, choice.shape.width, choice.shape.num_heads) == (24, width, heads)
    nothing = dict.fromkeys(field.name for field in dataclasses.fields(Asked))
    asked = checked(Asked(**{**nothing, "flops": low, "shape": True, "tied": False, "beyond": True}))
    body = allocation_body(fit, asked, large.shape_template)
    assert body["shape"] == dataclasses.asdict(choice.shape)


def test_the_decision_says_what_was_found(study, found):
    decision = decision_of(study, found)
    assert decision.learning_rate.schedule.num_steps == found.choice.num_steps
    assert decision.clip_norm == found.searched.best["clip_norm"]
    hidden = next(group for group in decision.groups if group.kind == "hidden")
    scale = study.plan.proxy.base_width / decision.shape.width
    rate = found.transferred.rate_at(base_sizes(study), found.choice.sizes)
    assert hidden.learning_rate == pytest.approx(rate * scale)
    duration = found.choice.num_tokens / base_sizes(study).duration
    power = found.transferred.powers["duration"]
    assert rate == pytest.approx(found.transferred.learning_rate * duration**power, rel=1e-3) and power != 0
    assert decision.predicted.low_nats < decision.predicted.loss_nats < decision.predicted.high_nats
    assert decision.data.data_id == study.manifest.data_id


def test_the_digest_follows_a_result_and_not_its_time(finished, tmp_path, study, found):
    """The mutation that makes `same digest` mean something: one loss of the ladder, a thousandth higher."""
    rung = found.ladder[-1].id

    def edited(**changes):
        def edit(record):
            if (record.kind, record.key) != ("result", rung):
                return record.body
            return {**record.body, "result": {**record.body["result"], **changes}}

        other, records = replay(
            finished / "study", tmp_path / str(len(changes)), lambda record: record.kind != "fit", edit
        )
        return decision_of(other, gather(other, records)).digest

    digest = decision_of(study, found).digest
    loss = Ledger.read(finished / "study").results()[rung].loss_nats
    assert edited(seconds=1e6, environment={}) == digest
    assert edited(loss_nats=loss + 0.001) != digest


@pytest.mark.parametrize(
    ("kinds", "ask", "said"),
    [
        ((), searched, "the search has not ended: `forerun sweep PLAN` runs or resumes it"),
        (("suggestion",), searched, "the search has not ended: `forerun sweep PLAN` runs or resumes it"),
    ],
)
def test_a_stage_that_is_missing_is_named_with_its_command(finished, tmp_path, kinds, ask, said):
    study, ledger = replay(finished / "study", tmp_path / "study", lambda record: record.kind in kinds)
    with pytest.raises(StageMissingError) as caught:
        ask(study, ledger)
    assert str(caught.value) == said


def test_a_missing_rung_or_valley_point_is_missed(finished, tmp_path, study, ledger, found):
    rung, point = found.ladder[0].id, found.transferred.tests[0].specs[0].id
    _, no_rung = replay(finished / "study", tmp_path / "a", lambda record: record.key != rung)
    _, no_point = replay(finished / "study", tmp_path / "b", lambda record: record.key != point)
    with pytest.raises(StageMissingError, match="the ladder has not ended: `forerun ladder PLAN` runs or resumes it"):
        decide.ladder_table(found.ladder, no_rung.results())
    with pytest.raises(StageMissingError, match="the transfer runs have not ended: `forerun transfer PLAN`"):
        transferred(study, no_point)
