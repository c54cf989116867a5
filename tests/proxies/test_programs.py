"""Templates: what they may say, and every way to get them wrong, said at once."""

import pytest
from command_cases import TEMPLATE, command

from proxies.core.checks import SpecError
from proxies.core.programs import Factory

FULL = "train --lr {lr} --width {width} --steps {num_steps} --seed {seed}"


def problems(template=FULL, **changes):
    try:
        command(template, **changes)
    except SpecError as error:
        return error.problems
    return []


@pytest.mark.parametrize(
    "template",
    [
        FULL,
        TEMPLATE,
        "'my trainer' {run_json}",
        FULL + """ --json '{{"lr": {lr}}}' "" 'a b' """,
        "env A=1 " + FULL,
        FULL + "\n  --out {run_dir}\n",
    ],
)
def test_good_templates(template):
    assert problems(template) == []


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("", "template: it is empty"),
        (FULL + " {lern_rate}", "{lern_rate} is unknown: "),
        (FULL + " {widht}", "{widht} is unknown: did you mean {width}?"),
        (FULL + " {}", "{} is unknown: one of lr, weight_decay"),
        (FULL + " {0}", "{0} is unknown"),
        (FULL + " {lr.real}", "{lr.real} is unknown"),
        (FULL + " {lr", "does not parse (expected '}' before end of string)"),
        (FULL + " lr}", "a brace of its own is written twice"),
        (FULL + " {lr:.2e}", "{lr} is written with :.2e, which would change the value"),
        (FULL + " {lr!r}", "{lr} is written with !r"),
        (FULL + " 'open", "does not split into words (No closing quotation)"),
        (FULL + " {l'r'}", "unknown"),
        ("'' " + FULL, "it names no program"),
        ("train --width {width} --steps {num_steps} --seed {seed}", "lacks {lr}: the search cannot reach the trainer"),
        ("train --lr {lr} --steps {num_steps} --seed {seed}", "it lacks {width}: nothing grows"),
        ("train --lr {lr} --steps {num_steps} --width {width}", "it lacks {seed}: repetitions would all be the same"),
        (FULL + "\0", "zero byte"),
    ],
)
def test_bad_templates(template, said):
    assert any(said in problem for problem in problems(template)), problems(template)


def test_all_at_once():
    found = problems(
        "t {widht} {lr:g} 'x", metrics_format="csv", metrics_path="/tmp/m.jsonl", step_key="", grad_norm_key="val_loss"
    )
    assert len(found) >= 8
    for said in (
        "metrics_format",
        "{widht}",
        ":g",
        "quotes",
        "{width}",
        "metrics_path",
        "step_key is empty",
        "'val_loss'",
    ):
        assert any(said in problem for problem in found), (said, found)


@pytest.mark.parametrize(
    "path", ["{run_dir}/m.jsonl", "m.jsonl", "logs/{seed}.jsonl", "{run_dir}", ".", "/scratch/{run_dir}/x"]
)
def test_metrics_of_a_runs_own(path):
    assert problems(metrics_path=path) == []


@pytest.mark.parametrize("path", ["/tmp/m.jsonl", "~/m.jsonl", "../m.jsonl", "{data}/m.jsonl", "a/../../m"])
def test_metrics_that_runs_would_share(path):
    assert any("outside {run_dir}" in problem for problem in problems(metrics_path=path))


def test_what_a_trainer_is_told():
    named, whole = command(FULL), command("train --config {run_json}")
    assert named.reaches("lr") and not named.reaches("clip_norm") and whole.reaches("clip_norm")


def test_factories():
    assert Factory(target="my_pkg.models:build", source_sha256="0" * 64).target
    with pytest.raises(SpecError, match=r"package.module:function is wanted; source_sha256"):
        Factory(target="my_pkg/models.py", source_sha256="")
