"""plan.md: every key of a plan with its type, default, unit and sentence, from the plan's JSON Schema."""

from __future__ import annotations

import json
import re
from typing import Any

from launcher.plan.presets import PRESETS, Values
from launcher.plan.writing import commented_plan, plan_schema
from reference_pages.command_line import cell

_UNITS = {
    "tokens": "tokens", "flops": "FLOPs", "nats": "nats per token", "usd": "US dollars", "seconds": "seconds",
    "hours": "hours", "gib": "GiB", "octaves": "powers of 2", "steps": "optimizer steps", "fraction": "share, 0 to 1",
    "share": "share, 0 to 1", "usd_per_device_hour": "US dollars an hour",
}  # fmt: skip
_HEAD = """# Plan keys

A plan is one TOML file; every key has the default shown, so a plan names what it changes. Unknown keys are errors.
`forerun init` writes one with every key and its sentence, and a JSON Schema for editors beside it; `forerun validate`
names every problem at once; `--set section.key=value` overrides a value on the command line. Where `init`
(preset `cpu`) asks for something else than the default, that is shown too: a plan without the key asks what it asked
before there was one.

"""


def unit_of(key: str) -> str:
    """The unit that a key carries in its name, or nothing."""
    return next((unit for end, unit in sorted(_UNITS.items(), key=lambda item: -len(item[0]))
                 if re.search(rf"(^|_){end}$", key)), "")  # fmt: skip


def _bounds(schema: dict[str, Any]) -> str:
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below",
             "multipleOf": "a multiple of"}  # fmt: skip
    said = [f"{text} {schema[name]:.12g}" for name, text in words.items() if name in schema]
    return (" " + ", ".join(said)) if said else ""


def kind_of(schema: dict[str, Any], defs: dict[str, Any]) -> str:
    """What a value has to be, in words."""
    if "$ref" in schema:
        return kind_of(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{json.dumps(one)}`" for one in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return " or ".join(kind_of(one, defs) for one in schema["anyOf"] if one.get("type") != "null")
    if "allOf" in schema:
        return " ".join(kind_of(one, defs) for one in schema["allOf"])
    kind = schema.get("type")
    if kind == "array":
        if "prefixItems" in schema:
            return "list of " + " and ".join(kind_of(one, defs) for one in schema["prefixItems"])
        least = f" (at least {schema['minItems']})" if schema.get("minItems") else ""
        return f"list of {kind_of(schema.get('items', {}), defs)}{least}"
    if kind == "object":
        if "properties" in schema:
            return "table of the keys below"
        return f"table of {kind_of(schema.get('additionalProperties', {}), defs)} by name"
    names = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true` or `false`"}
    return names.get(str(kind), "anything") + _bounds(schema)


def _defaults(values: Values) -> dict[str, dict[str, str]]:
    """Values as `forerun init` writes them, by section and key."""
    found: dict[str, dict[str, str]] = {}
    section = ""
    for line in commented_plan(values).splitlines():
        if head := re.match(r"\[(\w+)\]", line):
            section = head[1]
            found[section] = {}
        elif pair := re.match(r"(\w+) = (.*)", line):
            found[section][pair[1]] = pair[2]
    return found


def _rows(schema: dict[str, Any], defs: dict[str, Any], plain: dict[str, str], new: dict[str, str]) -> list[str]:
    lines = ["| key | value | default | unit | what |", "|---|---|---|---|---|"]
    for key, one in schema["properties"].items():
        default = f"`{plain[key]}`" if key in plain else "the source's own"
        if new.get(key) != plain.get(key):
            default += f"; `init` writes `{new[key]}`"
        kind = kind_of(one, defs).replace("|", "\\|")
        lines.append(f"| `{key}` | {kind} | {default} | {unit_of(key)} | {cell(one['description'])} |")
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
