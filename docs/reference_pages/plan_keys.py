"""plan.md: every key of a plan with its type, default, unit and sentence, from the plan's JSON
Schema.
"""

from __future__ import annotations

import json
import re
from typing import Any

from launcher.explanations.plan_keys import kind_of, unit_of
from launcher.plan.presets import PRESETS, Values
from launcher.plan.writing import commented_plan, plan_schema
from reference_pages.command_line import cell

_HEAD = """# Plan keys

A plan is one TOML file; every key has the default shown, so a plan names what it changes. Unknown keys are errors.
`forerun init` writes one with the keys that people change, and a JSON Schema for editors beside it; `forerun explain
plan KEY` says what a key means; `forerun validate` names every problem at once; `--set section.key=value` overrides a
value on the command line. Where `init` (preset `cpu`) writes another value than the default, that is shown too.

"""  # noqa: E501


def _defaults(values: Values) -> dict[str, dict[str, str]]:
    """Values as `forerun init` writes them, by section and key."""
    found: dict[str, dict[str, str]] = {}
    section = ""
    for line in commented_plan(values, every=True).splitlines():
        if head := re.match(r"\[(\w+)\]", line):
            section = head[1]
            found[section] = {}
        elif pair := re.match(r"(\w+) = (.*)", line):
            found[section][pair[1]] = pair[2]
    return found


def _rows(
    schema: dict[str, Any], defs: dict[str, Any], plain: dict[str, str], new: dict[str, str]
) -> list[str]:
    lines = ["| key | value | default | unit | what |", "|---|---|---|---|---|"]
    for key, one in schema["properties"].items():
        default = f"`{plain[key]}`" if key in plain else "the source's own"
        if new.get(key) != plain.get(key):
            default += f"; `init` writes `{new[key]}`"
        kind = kind_of(one, defs).replace("|", "\\|")
        lines.append(
            f"| `{key}` | {kind} | {default} | {unit_of(key)} | {cell(one['description'])} |"
        )
    return lines


def plan_page() -> str:
    """plan.md."""
    whole = plan_schema()
    defs, plain, new = whole["$defs"], _defaults({}), _defaults(PRESETS["cpu"].values)
    parts = []
    for section, one in whole["properties"].items():
        schema = defs[one.get("$ref", one.get("allOf", [{}])[0].get("$ref")).rpartition("/")[2]]
        parts += [f"## `[{section}]`\n", schema["description"] + "\n"]
        parts += [*_rows(schema, defs, plain[section], new[section]), ""]
        for key, inner in schema["properties"].items():
            if "RuleChoices" in json.dumps(inner):
                parts += [f"### `[{section}.{key}]`\n", defs["RuleChoices"]["description"] + "\n"]
                parts += [*_rows(defs["RuleChoices"], defs, {}, {}), ""]
    return _HEAD + "\n".join(parts).rstrip() + "\n"
