"""Tests of predicted differences between an export and the decision, on planted views of Megatron.

Each predicted difference must be marked as predicted, and no other difference.
"""

import dataclasses

import pytest
from export_case import change_view, make_view
from megatron_lm_case import make_megatron_decision, make_megatron_spec

from forerun._launcher.main_run.exporters.comparison import (
    PREDICTED_MARK,
    RunNumbers,
    TrainerView,
    build_frozen_run,
    compare,
    compare_with_prediction,
)
from forerun._launcher.main_run.exporters.trainers import megatron_lm
from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule

READOUT, GAIN = "output_layer.weight", "decoder.final_layernorm.weight"


@pytest.fixture(scope="module")
def decision(manifest) -> Decision:
    """A decision that Megatron cannot express.

    Megatron would train with another weight decay and eps, another learning rate of the readout,
    and another rate at the first step of the warmup.
    """
    rules = get_parametrization("mup_no_wd_scaling", embedding_rate="inverse_root")
    schedule = Schedule(kind="cosine", num_steps=12, warmup_steps=4, final_fraction=0.1)
    return make_megatron_decision(
        manifest, make_megatron_spec(manifest.data_id, parametrization=rules, schedule=schedule)
    )


def make_megatron_view(decision: Decision, run: RunNumbers) -> TrainerView:
    """Return Megatron's view of an export, if it trains with these numbers."""
    return make_view(
        decision, megatron_lm.parameter_names(decision.shape), run, "megatron-lm", "0.19.2"
    )


def list_problems(decision: Decision, view: TrainerView) -> list[str]:
    """Return every difference of a view from the decision, with marks on the predicted ones."""
    return compare_with_prediction(
        decision,
        view,
        megatron_lm.parameter_names(decision.shape),
        megatron_lm.predict_run(decision),
    )


def list_unpredicted_problems(decision: Decision, view: TrainerView) -> list[str]:
    """Return the differences that are not marked as predicted."""
    problems = list_problems(decision, view)
    return [problem for problem in problems if not problem.endswith(PREDICTED_MARK)]


def test_every_known_difference_of_megatron_is_predicted(tmp_path, decision):
    view = make_megatron_view(decision, megatron_lm.predict_run(decision))
    problems = list_problems(decision, view)
    names = megatron_lm.parameter_names(decision.shape)
    assert problems == [f"{problem}{PREDICTED_MARK}" for problem in compare(decision, view, names)]
    lost = {entry.field for entry in megatron_lm.export(decision, tmp_path).lost}
    assert {
        "groups.weight_decay",
        "groups.eps",
        "groups.learning_rate",
        "learning_rate.table_sha256",
    } <= lost
    text = "\n".join(problems)
    for field in (
        "weight_decay is ",
        "eps is ",
        ": learning_rate is ",
        f"{READOUT}: the rate at step 0 is ",
    ):
        assert field in text


@pytest.mark.parametrize("field", ["learning_rate", "weight_decay", "eps"])
def test_wrong_number_in_a_lost_field_is_not_marked_as_predicted(decision, field):
    view = make_megatron_view(decision, megatron_lm.predict_run(decision))
    number = view.parameters[READOUT].settings[field] * 1.01
    [problem] = list_unpredicted_problems(decision, change_view(view, READOUT, **{field: number}))
    assert problem.startswith(f"{READOUT}: {field} is {number!r}, frozen as ")


@pytest.mark.parametrize("step", [0, 7, 11])
def test_wrong_rate_is_not_marked_as_predicted(decision, step):
    view = make_megatron_view(decision, megatron_lm.predict_run(decision))
    row = view.parameters[GAIN].rates
    rates = [list(rates) for rates in view.rates]
    rates[row][step] = 1e-3
    [problem] = list_unpredicted_problems(
        decision, dataclasses.replace(view, rates=tuple(map(tuple, rates)))
    )
    assert problem.startswith(f"{GAIN}: the rate at step {step} is 0.001, ")


def test_wrong_clip_norm_or_multiplier_is_not_marked_as_predicted(decision):
    view = make_megatron_view(decision, megatron_lm.predict_run(decision))
    forward = dataclasses.replace(decision.forward, output=1.0)
    assert list_unpredicted_problems(decision, dataclasses.replace(view, clip_norm=7.0)) == [
        "clip_norm is 7.0, frozen as 0.5"
    ]
    assert list_unpredicted_problems(decision, dataclasses.replace(view, forward=forward))[
        0
    ].startswith("forward.output is 1.0, frozen")


def test_trainer_that_does_as_frozen_contradicts_the_prediction(decision):
    problems = list_unpredicted_problems(
        decision, make_megatron_view(decision, build_frozen_run(decision))
    )
    assert problems
    assert all("predicted as" in problem for problem in problems)
