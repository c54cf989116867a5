"""Explanations of the plan's keys: meaning, possible values, unit, and default.

They come from the plan's JSON Schema. Nothing heavy is loaded before a function is called.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from proxies.core.canon import Json
from proxies.core.errors import InputError

MOST_BLOCKS = 3
"""Maximum number of keys that are shown in full; more are shown one per line."""
_UNITS = {
    "tokens": "tokens",
    "flops": "FLOPs",
    "nats": "nats per token",
    "usd": "US dollars",
    "seconds": "seconds",
    "hours": "hours",
    "gib": "GiB",
    "octaves": "powers of 2",
    "steps": "optimizer steps",
    "fraction": "share, 0 to 1",
    "share": "share, 0 to 1",
    "usd_per_device_hour": "US dollars an hour",
    "usd_per_device_hour_by_kind": "US dollars an hour",
}


class UnknownKeyError(InputError):
    """No key of a plan has the given name."""


def explained_keys(name: str | None, study_dir: Path | None = None) -> tuple[dict[str, Json], str]:
    """Explain the keys of a plan that a name stands for, as data and as text.

    Args:
        name: Name of keys (`search.num_trials`, `num_trials`, `search`, `*seed*`); None for all.
        study_dir: Study whose values are shown besides the defaults, if its plan can be read.

    Raises:
        UnknownKeyError: No key has the name; the message has the nearest names.
    """
    from launcher.plan.file import PlanError, checked_plan
    from launcher.plan.study import PLAN_FILE
    from launcher.plan.writing import plan_schema, toml_value

    plan, file = None, (study_dir or Path()) / PLAN_FILE
    if study_dir is not None and file.is_file():
        # An unreadable plan is no problem: the meaning of a key helps to mend it.
        with contextlib.suppress(PlanError, OSError):
            plan, _ = checked_plan(file)
    schema, keys = plan_schema(), {}
    for section in schema["properties"]:
        for key, key_schema in schema["$defs"][f"{section.title()}Section"]["properties"].items():
            default = "" if "default" not in key_schema else toml_value(key_schema["default"])
            keys[f"{section}.{key}"] = {
                "key": f"{section}.{key}",
                "what": key_schema["description"],
                "value": kind_of(key_schema, schema["$defs"]),
                "default": default,
                "unit": unit_of(key),
                "study_value": None
                if plan is None
                else toml_value(getattr(getattr(plan, section), key)),
            }
    explanations = (
        list(keys.values())
        if name is None
        else [keys[key] for key in _match_keys(name, list(keys))]
    )
    lines = (
        [_format_block(explanation, file) for explanation in explanations]
        if len(explanations) <= MOST_BLOCKS
        else [
            *map(_format_line, explanations),
            "one key: forerun explain plan search.num_trials",
        ]
    )
    return {"keys": [{**explanation} for explanation in explanations]}, "\n".join(lines)


def _match_keys(name: str, keys: list[str]) -> list[str]:
    for pattern in (name, f"{name}.*", f"*.{name}"):
        if matches := [key for key in keys if fnmatch.fnmatchcase(key, pattern)]:
            return matches
    ends = {key.partition(".")[2]: key for key in keys}
    suggestions = [
        ends.get(word, word) for word in difflib.get_close_matches(name, [*keys, *ends], n=2)
    ]
    hint = (
        f"did you mean {' or '.join(dict.fromkeys(suggestions))}?"
        if suggestions
        else "`forerun explain plan` lists them"
    )
    raise UnknownKeyError(f"{name}: no key of a plan has that name; {hint}")


def _format_line(explanation: dict[str, Any]) -> str:
    study_value, default = explanation["study_value"], explanation["default"] or "(empty)"
    differs = f" Default: {default}." if study_value not in (None, explanation["default"]) else ""
    return f"{explanation['key']} = {study_value or default}  # {explanation['what']}{differs}"


def _format_block(explanation: dict[str, Any], file: Path) -> str:
    study_value, default = explanation["study_value"], explanation["default"]
    value = f"{default}  (the default)"
    if study_value is not None:
        value = (
            f"{study_value}  (in {file}; the "
            f"default{'' if study_value == default else ': ' + (default or 'empty')})"
        )
    unit = f", in {explanation['unit']}" if explanation["unit"] else ""
    description_lines = textwrap.wrap(explanation["what"], 100, break_on_hyphens=False)
    kind = explanation["value"].replace("`", "")
    return "\n".join(
        [
            f"{explanation['key']} = {value}",
            *(f"  {line}" for line in description_lines),
            f"  must be: {kind}{unit}",
        ]
    )


def unit_of(key: str) -> str:
    """Return the unit that a key's name ends with; empty if it has none."""
    return next(
        (
            unit
            for end, unit in sorted(_UNITS.items(), key=lambda item: -len(item[0]))
            if re.search(rf"(^|_){end}$", key)
        ),
        "",
    )


def _describe_bounds(schema: dict[str, Any]) -> str:
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
        "multipleOf": "a multiple of",
    }
    bounds = [f"{text} {schema[name]:.12g}" for name, text in words.items() if name in schema]
    return (" " + ", ".join(bounds)) if bounds else ""


def kind_of(schema: dict[str, Any], defs: dict[str, Any]) -> str:
    """Describe in words what a value has to be."""
    if "$ref" in schema:
        return kind_of(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "const" in schema or "enum" in schema:
        return " or ".join(
            f"`{json.dumps(part)}`" for part in schema.get("enum", [schema.get("const")])
        )
    if "anyOf" in schema:
        return " or ".join(
            kind_of(part, defs) for part in schema["anyOf"] if part.get("type") != "null"
        )
    if "allOf" in schema:
        return " ".join(kind_of(part, defs) for part in schema["allOf"])
    kind = schema.get("type")
    if kind == "array":
        if "prefixItems" in schema:
            return "list of " + " and ".join(kind_of(part, defs) for part in schema["prefixItems"])
        minimum = f" (at least {schema['minItems']})" if schema.get("minItems") else ""
        return f"list of {kind_of(schema.get('items', {}), defs)}{minimum}"
    if kind == "object":
        if "properties" in schema:
            return "table of the keys below"
        return f"table of {kind_of(schema.get('additionalProperties', {}), defs)} by name"
    names = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "`true` or `false`",
    }
    return names.get(str(kind), "anything") + _describe_bounds(schema)
