"""What a plan's ladder may not be, and what `validate` warns of."""

import pytest
from pydantic import ValidationError

from launcher.plan.plan import Plan
from launcher.plan.problems import problems_of
from launcher.study.plan_sense import ladder_warnings


def planned(**sections):
    return Plan.model_validate(sections)


@pytest.mark.parametrize(
    ("ladder", "key"),
    [
        ({"batch_tokens": 100}, "ladder.batch_tokens"),
        ({"widths": (32,)}, "ladder: 1 widths"),
    ],
)
def test_what_cannot_be(ladder, key):
    (problem,) = problems_of(planned(ladder=ladder))
    assert problem.startswith(key)


@pytest.mark.parametrize("offsets", [(0.0, 1.0), (1.0, 2.0), (-5.0, 1.0)])
def test_rates_that_check_no_rung(offsets):
    with pytest.raises(ValidationError, match="check_offsets_octaves"):
        planned(ladder={"check_offsets_octaves": offsets})


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"transfer": {"durations": ()}}, "one learning rate for all, since no rule over duration is measured"),
        ({"transfer": {"measured_rules": ("batch",)}}, "one learning rate for all"),
        ({"target": {"batch_tokens": 4096}}, "the ladder's batches have 1024 tokens, and the forecast is for those"),
        ({"ladder": {"batch_tokens": 4096}, "target": {"batch_tokens": 4096}},
         "no rule over batch is measured (transfer.batches"),
    ],
)  # fmt: skip
def test_what_would_bias_the_fit(sections, said):
    (warning,) = ladder_warnings(planned(**sections))
    assert said in warning


@pytest.mark.parametrize(
    "sections",
    [
        {"proxy": {"schedule": "wsd", "final_fraction": 0.5}},  # decays to its own end, whatever that is
        {"transfer": {"durations": ()}, "ladder": {"num_steps": (150, 200, 300)}},
        {"transfer": {"durations": ()}, "proxy": {"parametrization": "completedp"}},
        {"ladder": {"batch_tokens": 4096}, "target": {"batch_tokens": 4096}, "transfer": {"batches": (1.0, 4.0)}},
    ],
)
def test_what_is_a_choice(sections):
    assert ladder_warnings(planned(**sections)) == []
