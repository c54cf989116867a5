"""docs/reference/json.md: what verbs answer about a real study is what the page says, key by key
and kind by kind.
"""

import os
import shutil

import pytest
from reference_pages.answers import read_shapes, shape_of, write_shapes
from tiny_study import ask

STUDY = {
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
FROZEN = {
    "explain FROZEN": ("explain", "FROZEN"),
    "explain FROZEN seed": ("explain", "FROZEN", "seed"),
    "export FROZEN --to native": ("export", "FROZEN", "--to", "native"),
    "verify FROZEN": ("verify", "FROZEN"),
    "launch FROZEN --dry-run": ("launch", "FROZEN", "--dry-run"),
    "watch FROZEN --once": ("watch", "FROZEN", "--once", "--metrics", "log.jsonl"),
}
WRITING = os.environ.get("FORERUN_WRITE_REFERENCE") == "1"


@pytest.fixture(scope="module")
def answers(finished, tmp_path_factory):
    """The one object that each command printed."""
    folder = tmp_path_factory.mktemp("answers") / "here"
    shutil.copytree(finished, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "log.jsonl").write_text(
            "".join(f'{{"step": {i}, "loss": 5.5}}\n' for i in range(5))
        )
        found = {command: ask(*words)[1] for command, words in STUDY.items()}
        closed = [
            gate["name"] for gate in found["status study"]["gates"] if gate["outcome"] != "passed"
        ]
        accepted = [word for name in closed for word in ("--accept", name)]
        found["freeze study"] = ask(
            "freeze", "study", *accepted, *(("--reason", "a toy") if closed else ())
        )[1]
        frozen = f"study/frozen/{found['freeze study']['digest']}"
        for command, words in FROZEN.items():
            found[command] = ask(*(frozen if word == "FROZEN" else word for word in words))[1]
    return found


def plain(kind):
    """Without null, and a whole number as a number: which of them it is may hang on what the
    machine measured.
    """
    return {part.replace("integer", "number") for part in kind.split(" or ")} - {
        "null",
        "list",
        "list of null",
    }


def unlike(said, found):
    """Where the shape of an answer is not what the page says, in words."""
    top = {key for key in said | found if "." not in key}
    problems = [
        f"{key}: on the page {said.get(key)}, in truth {found.get(key)}"
        for key in sorted(top)
        if key not in said or key not in found
    ]
    for key in sorted(found.keys() & said.keys()):
        here, there = plain(found[key]), plain(said[key])
        if here and there and not here & there:
            problems.append(f"{key}: on the page {said[key]}, in truth {found[key]}")
    return problems + [
        f"{key}: not on the page" for key in sorted(found.keys() - said.keys() - top)
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_answer_is_as_the_page_says(answers):
    assert not any("error" in body for body in answers.values()), {
        k: b for k, b in answers.items() if "error" in b
    }
    shapes = {command: shape_of(body) for command, body in answers.items()}
    if WRITING:
        write_shapes(shapes)
    said = read_shapes()
    assert said.keys() == shapes.keys()
    wrong = {command: unlike(said[command], shape) for command, shape in shapes.items()}
    assert {command: problems for command, problems in wrong.items() if problems} == {}, (
        "mend: make reference"
    )


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ({"a": "string"}, {"a": "string", "b": "number"}),
        ({"a": "string", "b": "number"}, {"a": "string"}),
        ({"a": "string"}, {"a": "number"}),
        ({"a": "object", "a.b": "string"}, {"a": "object", "a.c": "string"}),
    ],
)
def test_another_key_or_kind_is_seen(said, found):
    assert unlike(said, found)


def test_null_and_whole_numbers_are_no_difference():
    assert unlike({"a": "null", "b": "number"}, {"a": "string", "b": "integer"}) == []
    assert shape_of({"a": [{"b": 1}, {"b": "x"}], "c": {"0.5": 1.0}}) == {
        "a": "list of object",
        "a[].b": "integer or string",
        "c": "object",
        "c.NAME": "number",
    }
