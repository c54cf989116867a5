"""Explanations of the plan's keys: meaning, possible values, unit, and default.

The explanations come from the plan's JSON Schema. Importing this module loads no heavy library.
"""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun._proxies.core.canon import Json
from forerun._proxies.core.errors import InputError

MAX_KEYS_IN_FULL = 3
"""Maximum number of keys that are shown in full; more are shown one per line."""
_LINE_CHARACTERS = 102
"""Maximum number of characters of a line of a key's description, its indent included."""
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
"""Units in words, by the last words of a key's name."""


class UnknownKeyError(InputError):
    """No key of a plan has the given name."""


def explain_keys(name: str | None, study_dir: Path | None = None) -> tuple[dict[str, Json], str]:
    """Explain the keys of a plan that a name stands for, as data and as text.

    Args:
        name: A key (`search.num_trials` or `num_trials`), a section (`search`), or a pattern
            (`*seed*`); None for all keys.
        study_dir: Study whose values are shown next to the defaults, if its plan can be read.

    Raises:
        UnknownKeyError: No key has the name; the message has the nearest names.
    """
    from forerun._launcher.study.plan.file import PlanError, check_plan
    from forerun._launcher.study.plan.study import PLAN_FILE
    from forerun._launcher.study.plan.writing import build_plan_schema, format_toml

    plan, file = None, (study_dir or Path()) / PLAN_FILE
    if study_dir is not None and file.is_file():
        # The keys of an unreadable plan are explained too: that helps to mend the plan.
        with contextlib.suppress(PlanError, OSError):
            plan, _ = check_plan(file)
    schema, keys = build_plan_schema(), {}
    for section in schema["properties"]:
        for key, key_schema in schema["$defs"][f"{section.title()}Section"]["properties"].items():
            value = getattr(getattr(plan, section), key) if plan else None
            keys[f"{section}.{key}"] = {
                "key": f"{section}.{key}",
                "what": key_schema["description"],
                "value": describe_type(key_schema, schema["$defs"]),
                "default": format_toml(key_schema["default"]) if "default" in key_schema else "",
                "unit": find_unit(key),
                "study_value": format_toml(value) if plan else None,
            }
    explanations = [keys[key] for key in (keys if name is None else _match_keys(name, list(keys)))]
    if len(explanations) <= MAX_KEYS_IN_FULL:
        text = "\n".join(_format_block(explanation, file) for explanation in explanations)
    else:
        lines = "\n".join(map(_format_line, explanations))
        text = f"{lines}\none key: forerun explain plan search.num_trials"
    return {"keys": list(explanations)}, text


def _match_keys(name: str, keys: list[str]) -> list[str]:
    """Return the keys that a name stands for.

    Raises:
        UnknownKeyError: No key has the name.
    """
    for pattern in (name, f"{name}.*", f"*.{name}"):
        if matches := [key for key in keys if fnmatch.fnmatchcase(key, pattern)]:
            return matches
    hint = suggest_names(name, keys, "forerun explain plan")
    raise UnknownKeyError(f"{name}: no key of a plan has that name; {hint}")


def suggest_names(name: str, paths: Sequence[str], command: str) -> str:
    """Return advice on an unknown name: the most similar dotted paths, or a command that lists all.

    Args:
        name: The unknown name.
        paths: All dotted paths; a name may also be similar to the last part of a path.
        command: Command that lists the paths.
    """
    paths_by_name = {path.rpartition(".")[2]: path for path in paths} | {
        path: path for path in paths
    }
    similar_names = difflib.get_close_matches(name, paths_by_name, n=2)
    suggestions = dict.fromkeys(paths_by_name[similar] for similar in similar_names)
    return f"did you mean {' or '.join(suggestions)}?" if suggestions else f"`{command}` lists them"


def _format_line(explanation: dict[str, Any]) -> str:
    study_value, default = explanation["study_value"], explanation["default"] or "(empty)"
    differs = f" Default: {default}." if study_value not in (None, explanation["default"]) else ""
    return f"{explanation['key']} = {study_value or default}  # {explanation['what']}{differs}"


def _format_block(explanation: dict[str, Any], file: Path) -> str:
    study_value, default = explanation["study_value"], explanation["default"]
    if study_value is None:
        value = f"{default}  (the default)"
    elif study_value == default:
        value = f"{study_value}  (in {file}; the default)"
    else:
        value = f"{study_value}  (in {file}; the default: {default or 'empty'})"
    unit = f", in {explanation['unit']}" if explanation["unit"] else ""
    description = textwrap.fill(
        explanation["what"],
        _LINE_CHARACTERS,
        initial_indent="  ",
        subsequent_indent="  ",
        break_on_hyphens=False,
    )
    kind = explanation["value"].replace("`", "")
    return f"{explanation['key']} = {value}\n{description}\n  must be: {kind}{unit}"


def find_unit(key: str) -> str:
    """Return the unit that a key's name ends with; empty if it ends with none."""
    # The longest ending counts: `usd_per_device_hour` is not a number of hours.
    endings = sorted(_UNITS, key=len, reverse=True)
    return next((_UNITS[end] for end in endings if f"_{key}".endswith(f"_{end}")), "")


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


def describe_type(schema: dict[str, Any], defs: dict[str, Any]) -> str:
    """Describe in words what a value has to be."""
    if "$ref" in schema:
        return describe_type(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "const" in schema or "enum" in schema:
        return " or ".join(
            f"`{json.dumps(part)}`" for part in schema.get("enum", [schema.get("const")])
        )
    if "anyOf" in schema:
        return " or ".join(
            describe_type(part, defs) for part in schema["anyOf"] if part.get("type") != "null"
        )
    if "allOf" in schema:
        return " ".join(describe_type(part, defs) for part in schema["allOf"])
    kind = schema.get("type")
    if kind == "array":
        if "prefixItems" in schema:
            return "list of " + " and ".join(
                describe_type(part, defs) for part in schema["prefixItems"]
            )
        minimum = f" (at least {schema['minItems']})" if schema.get("minItems") else ""
        return f"list of {describe_type(schema.get('items', {}), defs)}{minimum}"
    if kind == "object":
        if "properties" in schema:
            return "table of the keys below"
        return f"table of {describe_type(schema.get('additionalProperties', {}), defs)} by name"
    names = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "`true` or `false`",
    }
    return names.get(str(kind), "anything") + _describe_bounds(schema)
