"""Text of docs/reference/plan.md, which lists every key of a plan (the TOML file of a study).

Type, default, unit, and description of a key come from the JSON Schema of the plan.
"""

from __future__ import annotations

import json
import re
from typing import Any

from forerun._launcher.report.explanations.plan_keys import describe_type, find_unit
from forerun._launcher.study.plan.presets import PRESETS, Values
from forerun._launcher.study.plan.writing import build_plan_schema, format_plan
from reference_pages.markdown import format_cell

_HEAD = """# Plan keys

A plan is one TOML file. Every key has a default, so a plan names only what it changes. Unknown keys are errors.
`forerun init` writes a plan with the keys that people change, and a JSON Schema for editors next to it. `forerun explain
plan KEY` explains a key, `forerun validate` names every problem at once, and `--set section.key=value` overrides a
value on the command line. If `init` (preset `cpu`) writes another value than the default, the table shows it too.

"""  # noqa: E501


def _read_written_values(values: Values) -> dict[str, dict[str, str]]:
    """Return the values that `forerun init` writes, by section and key.

    Args:
        values: Values that differ from the defaults.
    """
    values_by_section: dict[str, dict[str, str]] = {}
    section = ""
    for line in format_plan(values, every=True).splitlines():
        if head := re.match(r"\[(\w+)\]", line):
            section = head[1]
            values_by_section[section] = {}
        elif pair := re.match(r"(\w+) = (.*)", line):
            values_by_section[section][pair[1]] = pair[2]
    return values_by_section


def _format_rows(
    schema: dict[str, Any], defs: dict[str, Any], defaults: dict[str, str], written: dict[str, str]
) -> list[str]:
    """Return the table of one section.

    Args:
        schema: JSON Schema of the section.
        defs: Schemas that it may refer to, by name.
        defaults: Default of each key that has one.
        written: Value of each key in the plan that `forerun init` writes.
    """
    lines = ["| key | value | default | unit | what |", "|---|---|---|---|---|"]
    for key, value in schema["properties"].items():
        # The rules of a parametrization have no default of their own.
        default = f"`{defaults[key]}`" if key in defaults else "the source's own"
        if written.get(key) != defaults.get(key):
            default += f"; `init` writes `{written[key]}`"
        kind = describe_type(value, defs).replace("|", "\\|")
        lines.append(
            f"| `{key}` | {kind} | {default} | {find_unit(key)} | "
            f"{format_cell(value['description'])} |"
        )
    return lines


def format_plan_page() -> str:
    """Return the text of plan.md."""
    schema_of_plan = build_plan_schema()
    defs, defaults, written = (
        schema_of_plan["$defs"],
        _read_written_values({}),
        _read_written_values(PRESETS["cpu"].values),
    )
    lines = []
    for section, reference in schema_of_plan["properties"].items():
        # A section with a description of its own has its reference inside `allOf`.
        schema = defs[
            reference.get("$ref", reference.get("allOf", [{}])[0].get("$ref")).rpartition("/")[2]
        ]
        lines += [f"## `[{section}]`\n", schema["description"] + "\n"]
        lines += [*_format_rows(schema, defs, defaults[section], written[section]), ""]
        for key, inner in schema["properties"].items():
            if "RuleChoices" in json.dumps(inner):
                lines += [f"### `[{section}.{key}]`\n", defs["RuleChoices"]["description"] + "\n"]
                lines += [*_format_rows(defs["RuleChoices"], defs, {}, {}), ""]
    return _HEAD + "\n".join(lines).rstrip() + "\n"
