"""Tests of docs/reference/json.md: the page lists the keys and types that the verbs print.

The page is generated from `docs/reference_pages/answers.json`, which records the shape of each
command's answer. The slow test runs the commands on a finished tiny study and compares their
answers with the recorded shapes. `make reference` sets FORERUN_WRITE_REFERENCE=1, with which the
slow test records the shapes again before it compares.
"""

import os
import shutil

import pytest
from reference_pages.answers import describe_shape, read_shapes, write_shapes
from tiny_study import run_json

STUDY_COMMANDS = {
    "init --data corpus": ("init", "--data", "corpus", "--out", "new.toml"),
    "validate plan.toml": ("validate", "plan.toml"),
    "estimate plan.toml": ("estimate", "plan.toml"),
    "tokenize texts --out tokens": ("tokenize", "corpus/../source", "--out", "tokens"),
    "check plan.toml": ("check", "plan.toml"),
    "sweep plan.toml": ("sweep", "plan.toml"),
    "transfer plan.toml": ("transfer", "plan.toml"),
    "ladder plan.toml": ("ladder", "plan.toml"),
    "run plan.toml": ("run", "plan.toml"),
    "repair study": ("repair", "study"),
    "status study": ("status", "study"),
    "fit study": ("fit", "study", "--form", "chinchilla", "--bootstrap", "20", "--out", "fit.json"),
    "predict fit.json": ("predict", "fit.json", "--params", "1e6", "--tokens", "1e8"),
    "allocate fit.json": ("allocate", "fit.json", "--flops", "1e12"),
    "flops --model llama-3-8b": ("flops", "--model", "llama-3-8b"),
    "explain": ("explain",),
    "note TEXT": ("note", "checked the cables"),
    "note": ("note",),
    "report study": ("report", "study"),
    "completion bash": ("completion", "bash"),
}
"""Arguments by the command's heading on the page. The commands run in this order, the tiny study's
plan being `plan.toml`."""
FROZEN_COMMANDS = {
    "explain FROZEN": ("explain", "FROZEN"),
    "explain FROZEN seed": ("explain", "FROZEN", "seed"),
    "export FROZEN --to native": ("export", "FROZEN", "--to", "native"),
    "verify FROZEN": ("verify", "FROZEN"),
    "launch FROZEN --dry-run": ("launch", "FROZEN", "--dry-run"),
    "watch FROZEN --once": ("watch", "FROZEN", "--once", "--metrics", "log.jsonl"),
}
"""Arguments by the command's heading on the page. "FROZEN" stands for the frozen config's path."""
SHOULD_WRITE = os.environ.get("FORERUN_WRITE_REFERENCE") == "1"


@pytest.fixture(scope="module")
def answers(finished_study_dir, tmp_path_factory):
    """JSON object that each command prints, by the command's heading on the page."""
    folder = tmp_path_factory.mktemp("answers") / "here"
    shutil.copytree(finished_study_dir, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "log.jsonl").write_text(
            "".join(f'{{"step": {i}, "loss": 5.5}}\n' for i in range(5))
        )
        answers = {command: run_json(*words)[1] for command, words in STUDY_COMMANDS.items()}
        # A freeze needs a reason for each gate that did not pass
        gates = answers["status study"]["gates"]
        not_passed = [gate["name"] for gate in gates if gate["outcome"] != "passed"]
        accept = [word for name in not_passed for word in ("--accept", name)]
        if not_passed:
            accept += ["--reason", "a toy"]
        answers["freeze study"] = run_json("freeze", "study", *accept)[1]
        frozen = f"study/frozen/{answers['freeze study']['digest']}"
        for command, words in FROZEN_COMMANDS.items():
            arguments = [frozen if word == "FROZEN" else word for word in words]
            answers[command] = run_json(*arguments)[1]
    return answers


def parse_stable_types(types):
    """Return the set of the types in "A or B" that do not depend on measured values.

    A measured value may be null or an integer by chance, and a list may be empty: nulls and lists
    of unknown content are left out, and an integer counts as a number.
    """
    names = {name.replace("integer", "number") for name in types.split(" or ")}
    return names - {"null", "list", "list of null"}


def find_differences(documented, actual):
    """Return one sentence for each key that is missing on one side or differs in its type.

    A nested key, which has a dot, may be documented and not printed, because it may depend on the
    study.

    Args:
        documented: Types by key, as recorded for the page.
        actual: Types by key, as printed now.
    """
    top_level = {key for key in documented | actual if "." not in key}
    problems = [
        f"{key}: documented as {documented.get(key)}, printed as {actual.get(key)}"
        for key in sorted(top_level)
        if key not in documented or key not in actual
    ]
    for key in sorted(actual.keys() & documented.keys()):
        printed_types = parse_stable_types(actual[key])
        documented_types = parse_stable_types(documented[key])
        if printed_types and documented_types and not printed_types & documented_types:
            problems.append(f"{key}: documented as {documented[key]}, printed as {actual[key]}")
    undocumented = sorted(actual.keys() - documented.keys() - top_level)
    return problems + [f"{key}: not on the page" for key in undocumented]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_page_documents_every_key_and_type(answers):
    errors = {command: body for command, body in answers.items() if "error" in body}
    assert errors == {}
    shapes = {command: describe_shape(body) for command, body in answers.items()}
    if SHOULD_WRITE:
        write_shapes(shapes)
    documented = read_shapes()
    assert documented.keys() == shapes.keys()
    differences = {
        command: find_differences(documented[command], shape) for command, shape in shapes.items()
    }
    different = {command: problems for command, problems in differences.items() if problems}
    assert different == {}, "run `make reference`"


@pytest.mark.parametrize(
    ("documented", "actual"),
    [
        ({"a": "string"}, {"a": "string", "b": "number"}),
        ({"a": "string", "b": "number"}, {"a": "string"}),
        ({"a": "string"}, {"a": "number"}),
        ({"a": "object", "a.b": "string"}, {"a": "object", "a.c": "string"}),
    ],
    ids=["key_not_documented", "key_not_printed", "other_type", "nested_key_not_documented"],
)
def test_different_key_or_type_is_found(documented, actual):
    assert find_differences(documented, actual)


def test_null_and_integers_are_no_difference():
    assert find_differences({"a": "null", "b": "number"}, {"a": "string", "b": "integer"}) == []


def test_shape_of_an_answer_joins_the_types_of_all_items():
    assert describe_shape({"a": [{"b": 1}, {"b": "x"}], "c": {"0.5": 1.0}}) == {
        "a": "list of object",
        "a[].b": "integer or string",
        "c": "object",
        "c.NAME": "number",
    }
