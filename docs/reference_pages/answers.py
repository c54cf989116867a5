"""json.md: what each verb's --json holds, from the shapes of real answers.

`tests/launcher/test_json_page.py` asks every verb below about a tiny study and holds the answers
against the shapes; `make reference` has it write them down anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

SHAPES = Path(__file__).with_name("answers.json")
Shape = dict[str, str]

_HEAD = """# What `--json` holds

Every verb takes `--json`: one object on stdout and nothing else there. The keys below are those of real answers, each
to the command above it, about a study of some 70 tiny runs; a test asks all of them again. Of values that are objects,
or lists of objects, the first level of keys is shown as `key.inner` and `key[].inner`. Where keys are names of things
(widths, files) they are written `NAME`. A value may also be null where there is nothing to say, and options, and parts
that the tiny study does without, may add keys.

A verb that ends with an error gives [another object](exit-codes.md#an-error-as-json).

"""  # noqa: E501


def kind_of(value: object) -> str:
    """JSON's word for what a value is; of a list, what it holds."""
    if isinstance(value, list):
        inner = sorted({kind_of(item) for item in value})
        return f"list of {' and '.join(inner)}" if inner else "list"
    if isinstance(value, Mapping):
        return "object"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return names[type(value)]


def _names_things(value: Mapping[str, object]) -> bool:
    """Whether keys are names of things: ids, numbers, paths, and the like are no words of ours."""
    return any(not key.isidentifier() or len(key) > 40 for key in value)


def shape_of(body: Mapping[str, object]) -> Shape:
    """Keys of an answer, those of the objects in it too, and the kind of each value."""
    found: Shape = {}
    for key, value in body.items():
        found[key] = kind_of(value)
        items = value if isinstance(value, list) else [value]
        dot = "[]." if isinstance(value, list) else "."
        for item in items:
            if not isinstance(item, Mapping):
                continue
            if _names_things(item):
                kinds = sorted({kind_of(inner) for inner in item.values()})
                found[f"{key}{dot}NAME"] = " or ".join(kinds)
                continue
            for name, inner in item.items():
                path = f"{key}{dot}{name}"
                known = found[path].split(" or ") if path in found else []
                found[path] = " or ".join(sorted({kind_of(inner), *known}))
    return found


def read_shapes() -> dict[str, Shape]:
    """The shapes that were written down, by the command that was asked."""
    found: dict[str, Shape] = json.loads(SHAPES.read_text(encoding="utf-8"))
    return found


def write_shapes(found: Mapping[str, Shape]) -> None:
    """Write them down, in the order of the commands."""
    SHAPES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def json_page(verbs: tuple[str, ...]) -> str:
    """json.md; `verbs`: all there are, so that those not asked are named."""
    shapes, lines = read_shapes(), [_HEAD]
    for verb in verbs:
        asked = {command: shape for command, shape in shapes.items() if command.split()[0] == verb}
        for command, shape in asked.items():
            lines += [f"## `forerun {command}`\n", "| key | value |", "|---|---|"]
            lines += [f"| `{key}` | {kind} |" for key, kind in sorted(shape.items())] + [""]
    missing = [verb for verb in verbs if not any(command.split()[0] == verb for command in shapes)]
    if missing:
        named = ", ".join(f"`{verb}`" for verb in missing)
        lines += [
            "## Not on this page\n",
            f"Of {named} no answer is recorded here.",
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"
