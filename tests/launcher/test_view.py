"""Differences that an export foretells, on planted views of Megatron: those are marked, and no
others.
"""

import dataclasses

import pytest
from export_case import held, planted_view
from megatron_lm_case import decision_for, spec_for

from launcher.exporters.trainers import megatron_lm
from launcher.exporters.view import TOLD, RunNumbers, TrainerView, compare, frozen_run, marked
from launcher.frozen.frozen import Decision
from proxies.core.rules import named
from proxies.core.schedule import Schedule

READOUT, GAIN = "output_layer.weight", "decoder.final_layernorm.weight"


@pytest.fixture(scope="module")
def decision(manifest) -> Decision:
    """One that loses decay, eps, the readout's rate and the warmup's first step."""
    rules = named("mup_no_wd_scaling", embedding_rate="inverse_root")
    schedule = Schedule(kind="cosine", num_steps=12, warmup_steps=4, final_fraction=0.1)
    return decision_for(
        manifest, spec_for(manifest.data_id, parametrization=rules, schedule=schedule)
    )


def view_of(decision: Decision, run: RunNumbers) -> TrainerView:
    return planted_view(
        decision, megatron_lm.parameter_names(decision.shape), run, "megatron-lm", "0.19.2"
    )


def problems(decision: Decision, view: TrainerView) -> list[str]:
    return marked(
        decision, view, megatron_lm.parameter_names(decision.shape), megatron_lm.foretold(decision)
    )


def broken(decision: Decision, view: TrainerView) -> list[str]:
    return [problem for problem in problems(decision, view) if not problem.endswith(TOLD)]


def test_what_megatron_does_otherwise_is_all_foretold(tmp_path, decision):
    view = view_of(decision, megatron_lm.foretold(decision))
    found = problems(decision, view)
    names = megatron_lm.parameter_names(decision.shape)
    assert found == [f"{problem}{TOLD}" for problem in compare(decision, view, names)]
    lost = {entry.field for entry in megatron_lm.export(decision, tmp_path).lost}
    assert {
        "groups.weight_decay",
        "groups.eps",
        "groups.learning_rate",
        "learning_rate.table_sha256",
    } <= lost
    said = "\n".join(found)
    for field in (
        "weight_decay is ",
        "eps is ",
        ": learning_rate is ",
        f"{READOUT}: the rate at step 0 is ",
    ):
        assert field in said


@pytest.mark.parametrize("field", ["learning_rate", "weight_decay", "eps"])
def test_another_number_in_a_field_that_is_lost_is_not_foretold(decision, field):
    view = view_of(decision, megatron_lm.foretold(decision))
    number = view.parameters[READOUT].settings[field] * 1.01
    [problem] = broken(decision, held(view, READOUT, **{field: number}))
    assert problem.startswith(f"{READOUT}: {field} is {number!r}, frozen as ")


@pytest.mark.parametrize("step", [0, 7, 11])
def test_another_rate_than_the_late_one_is_not_foretold(decision, step):
    view = view_of(decision, megatron_lm.foretold(decision))
    row = view.parameters[GAIN].rates
    rates = [list(rates) for rates in view.rates]
    rates[row][step] = 1e-3
    [problem] = broken(decision, dataclasses.replace(view, rates=tuple(map(tuple, rates))))
    assert problem.startswith(f"{GAIN}: the rate at step {step} is 0.001, ")


def test_a_clip_or_multiplier_is_never_foretold(decision):
    view = view_of(decision, megatron_lm.foretold(decision))
    forward = dataclasses.replace(decision.forward, output=1.0)
    assert broken(decision, dataclasses.replace(view, clip_norm=7.0)) == [
        "clip_norm is 7.0, frozen as 0.5"
    ]
    assert broken(decision, dataclasses.replace(view, forward=forward))[0].startswith(
        "forward.output is 1.0, frozen"
    )


def test_a_trainer_that_does_as_frozen_against_the_report_makes_the_report_wrong(decision):
    found = broken(decision, view_of(decision, frozen_run(decision)))
    assert found
    assert all("predicted as" in problem for problem in found)
