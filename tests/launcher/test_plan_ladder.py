"""What a plan's ladder may not be, and what `validate` warns of."""

import pytest
from pydantic import ValidationError
from tiny_study import ask, plan_with, write_corpus

from launcher.plan.ladder import ladder_problems, ladder_warnings
from launcher.plan.plan import Plan


def planned(**sections):
    return Plan.model_validate(sections)


@pytest.mark.parametrize("number", [0, -1, 101, 1.5, True])
def test_a_number_of_seeds_is_a_small_whole_one(number):
    with pytest.raises(ValidationError, match="num_seeds"):
        planned(ladder={"num_seeds": number})


def test_the_default_plan_warns_of_nothing():
    assert ladder_warnings(Plan()) == [] == ladder_problems(Plan())


@pytest.mark.parametrize(
    ("ladder", "said"),
    [
        ({"check_offsets_octaves": (0.0, 1.0)}, "rates below and above the rung's own"),
        ({"check_offsets_octaves": (1.0, 2.0)}, "ladder.check_offsets_octaves = [1.0, 2.0]: rates below and above"),
        ({"check_offsets_octaves": (-5.0, 1.0)}, "by at most 4 octaves, or none at all"),
        ({"batch_tokens": 100}, "ladder.batch_tokens = 100: no multiple of 64 tokens"),
        ({"seed": 2**31 - 2, "num_seeds": 3}, "ladder.seed = 2147483646: with 3 seeds at most 2147483645"),
        ({"seed": 2**31 - 1, "check_num_seeds": 2}, "with 2 seeds at most 2147483646"),
        ({"widths": (32,)}, "1 widths, 3 durations, 3 rungs: a law has five parameters"),
    ],
)
def test_what_cannot_be(ladder, said):
    (problem,) = ladder_problems(planned(ladder=ladder))
    assert said in problem


def test_none_at_all_may_be():
    assert ladder_problems(planned(ladder={"check_offsets_octaves": ()})) == []


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"proxy": {"schedule": "constant"}}, "no rung decays"),
        ({"proxy": {"schedule": "wsd", "decay_fraction": 0.001}}, "proxy.decay_fraction = 0.001: less than a step"),
        ({"search": {"warmup_fraction": (0.003, 0.5)}}, "search.warmup_fraction = [0.003, 0.5]: less than a step"),
        ({"proxy": {"batch_warmup_fraction": 0.01, "batch_warmup_stages": 16}}, "in the shortest rung's 150 steps"),
        ({"transfer": {"durations": ()}}, "one learning rate for all, since no rule over duration is measured"),
        ({"transfer": {"measured_rules": ("batch",)}}, "one learning rate for all"),
        ({"ladder": {"num_steps": (150, 400, 4000)}}, "measured from 200 to 1600 steps, and carried beyond"),
        ({"ladder": {"num_steps": (50, 400, 1000)}}, "measured from 200 to 1600 steps, and carried beyond"),
        ({"target": {"batch_tokens": 4096}}, "the ladder's batches have 1024 tokens, and the forecast is for those"),
        ({"ladder": {"batch_tokens": 4096}, "target": {"batch_tokens": 4096}},
         "no rule over batch is measured (transfer.batches"),
    ],
)  # fmt: skip
def test_what_would_bias_the_fit(sections, said):
    said = "of the shortest rung's 150 steps they take more" if said.startswith("in the") else said
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


def test_validate_says_it_and_goes_on(tmp_path):
    write_corpus(tmp_path)
    plan = plan_with(tmp_path, '[proxy]\nschedule = "constant"')
    code, body = ask("validate", plan)
    assert code == 0 and body["valid"]
    assert next(said.split(":")[0] for said in body["warnings"]) == 'proxy.schedule = "constant"'
