"""Text of docs/reference/json.md, which lists the keys of the JSON that each verb prints.

The JSON is the verb's answer. The file answers.json records the shape of real answers: the kind of
each value, by key. `tests/launcher/cli/test_json_page.py` runs every command of answers.json on a
tiny study and compares the answers with the recorded shapes. `make reference` makes it record them
again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

SHAPES = Path(__file__).with_name("answers.json")
"""File of the recorded shapes."""
MAX_KEY_LENGTH = 40
"""Length of forerun's own keys, at most; longer keys are ids or other names of things."""
Shape = dict[str, str]
"""Kind of value by key."""

_HEAD = """# What `--json` holds

Every verb takes `--json`, which prints one object to stdout and nothing else. The keys below are those of real answers
to the command above them, on a study of about 70 tiny runs. A test runs all of these commands again. For values that
are objects or lists of objects, the first level of keys is shown as `key.inner` and `key[].inner`. Keys that are names
of things (widths, files) are written `NAME`. A value may also be null if there is nothing to report. Options, and parts
of a study that the tiny one does not have, may add keys.

A verb that ends with an error prints [another object](exit-codes.md#an-error-as-json).

"""  # noqa: E501


def describe_kind(value: object) -> str:
    """Return JSON's word for the kind of a value; for a list, with the kinds that it contains."""
    if isinstance(value, list):
        inner = sorted({describe_kind(item) for item in value})
        return f"list of {' and '.join(inner)}" if inner else "list"
    if isinstance(value, Mapping):
        return "object"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return names[type(value)]


def _has_names_as_keys(value: Mapping[str, object]) -> bool:
    """Return whether the keys are names of things, such as ids, numbers, or paths.

    All other keys are words of forerun, which are valid identifiers and short.
    """
    return any(not key.isidentifier() or len(key) > MAX_KEY_LENGTH for key in value)


def describe_shape(body: Mapping[str, object]) -> Shape:
    """Return the keys of an answer and of the objects in it, with the kind of each value."""
    shape: Shape = {}
    for key, value in body.items():
        shape[key] = describe_kind(value)
        items = value if isinstance(value, list) else [value]
        dot = "[]." if isinstance(value, list) else "."
        for item in items:
            if not isinstance(item, Mapping):
                continue
            if _has_names_as_keys(item):
                kinds = sorted({describe_kind(inner) for inner in item.values()})
                shape[f"{key}{dot}NAME"] = " or ".join(kinds)
                continue
            for name, inner in item.items():
                path = f"{key}{dot}{name}"
                known = shape[path].split(" or ") if path in shape else []
                shape[path] = " or ".join(sorted({describe_kind(inner), *known}))
    return shape


def read_shapes() -> dict[str, Shape]:
    """Return the recorded shapes by command."""
    shapes: dict[str, Shape] = json.loads(SHAPES.read_text(encoding="utf-8"))
    return shapes


def write_shapes(shapes: Mapping[str, Shape]) -> None:
    """Write shapes in the order of the commands."""
    SHAPES.write_text(json.dumps(shapes, indent=1) + "\n", encoding="utf-8")


def format_json_page(verbs: tuple[str, ...]) -> str:
    """Return the text of json.md.

    Args:
        verbs: All verbs, so that those without a recorded answer are named.
    """
    shapes, lines = read_shapes(), [_HEAD]
    for verb in verbs:
        verb_shapes = {
            command: shape for command, shape in shapes.items() if command.split()[0] == verb
        }
        for command, shape in verb_shapes.items():
            lines += [f"## `forerun {command}`\n", "| key | value |", "|---|---|"]
            lines += [f"| `{key}` | {kind} |" for key, kind in sorted(shape.items())] + [""]
    missing = [verb for verb in verbs if not any(command.split()[0] == verb for command in shapes)]
    if missing:
        names = ", ".join(f"`{verb}`" for verb in missing)
        lines += [
            "## Not on this page\n",
            f"The answers of {names} are not recorded here.",
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"
