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
        FULL + """ --json '{{"lr": {lr}}}' "" 'a b' """,
        "env A=1 " + FULL + "\n  --out {run_dir}\n",
    ],
)
def test_good_templates(template):
    assert problems(template) == []


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("", "empty"),
        (FULL + " {widht}", "did you mean {width}?"),
        (FULL + " {}", "{} is unknown"),
        (FULL + " {lr.real}", "{lr.real} is unknown"),
        (FULL + " {l'r'}", "unknown"),
        (FULL + " {lr", "does not parse"),
        (FULL + " {lr:.2e}", "write {lr}"),
        (FULL + " {lr!r}", "write {lr}"),
        (FULL + " 'open", "quotes"),
        ("train --width {width} --steps {num_steps} --seed {seed}", "lacks {lr}"),
    ],
)
def test_bad_templates(template, said):
    assert any(said in problem for problem in problems(template)), problems(template)


def test_metrics_are_of_a_run_alone():
    for path in ("{run_dir}/m.jsonl", "logs/{seed}.jsonl", ".", "/scratch/{run_dir}/x"):
        assert problems(metrics_path=path) == []
    for path in ("/tmp/m.jsonl", "~/m.jsonl", "../m.jsonl", "{data}/m.jsonl", "{run_dir}/../m"):
        assert any("outside {run_dir}" in problem for problem in problems(metrics_path=path)), path


def test_factories():
    assert Factory(target="my_pkg.models:build", source_sha256="0" * 64).target
    with pytest.raises(SpecError, match=r"target = .*; source_sha256"):
        Factory(target="my_pkg/models.py", source_sha256="")
