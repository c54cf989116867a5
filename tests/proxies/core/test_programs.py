"""Tests of users' commands and factories in a plan: which templates and targets are accepted."""

import pytest
from command_cases import TEMPLATE, make_command

from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.programs import Factory

FULL = "train --lr {lr} --width {width} --steps {num_steps} --seed {seed}"
"""Template with every placeholder that a command must have."""


def list_problems(template=FULL, **changes):
    """Return the problems of a command with this template."""
    try:
        make_command(template, **changes)
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
def test_valid_templates_are_accepted(template):
    assert list_problems(template) == []


@pytest.mark.parametrize(
    ("template", "words"),
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
def test_problems_of_templates_are_named(template, words):
    problems = list_problems(template)
    assert any(words in problem for problem in problems), problems


def test_metrics_path_must_be_inside_the_run_directory():
    """Two runs must not write the same file."""
    for path in ("{run_dir}/m.jsonl", "logs/{seed}.jsonl", ".", "/scratch/{run_dir}/x"):
        assert list_problems(metrics_path=path) == []
    for path in ("/tmp/m.jsonl", "~/m.jsonl", "../m.jsonl", "{data}/m.jsonl", "{run_dir}/../m"):
        problems = list_problems(metrics_path=path)
        assert any("outside {run_dir}" in problem for problem in problems), path


def test_factory_target_names_a_module_and_a_function():
    assert Factory(target="my_pkg.models:build", source_sha256="0" * 64).target
    with pytest.raises(SpecError, match=r"target = .*; source_sha256"):
        Factory(target="my_pkg/models.py", source_sha256="")
