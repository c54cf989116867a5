"""The keys of a plan, explained: what each means, what it may be, its unit and default; from the
plan's JSON Schema.

Nothing heavy is loaded before a function is called.
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
"""Keys that are shown whole; more are a line each."""
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
    """No key of a plan has that name."""


def explained_keys(name: str | None, study_dir: Path | None = None) -> tuple[dict[str, Json], str]:
    """Every key of a plan, or those of a name: `search.num_trials`, `num_trials`, `search`,
    `*seed*`.

    Values are those of the plan in `study_dir`, if one can be read there, and the default beside
    them.

    Raises:
        UnknownKeyError: there is none; it names the nearest.
    """
    from launcher.plan.file import PlanError, checked_plan
    from launcher.plan.study import PLAN_FILE
    from launcher.plan.writing import plan_schema, toml_value

    own, file = None, (study_dir or Path()) / PLAN_FILE
    if study_dir is not None and file.is_file():
        # the meaning of a key helps to mend such a plan
        with contextlib.suppress(PlanError, OSError):
            own, _ = checked_plan(file)
    whole, keys = plan_schema(), {}
    for section in whole["properties"]:
        for key, one in whole["$defs"][f"{section.title()}Section"]["properties"].items():
            said = "" if "default" not in one else toml_value(one["default"])
            keys[f"{section}.{key}"] = {
                "key": f"{section}.{key}",
                "what": one["description"],
                "value": kind_of(one, whole["$defs"]),
                "default": said,
                "unit": unit_of(key),
                "study_value": None
                if own is None
                else toml_value(getattr(getattr(own, section), key)),
            }
    found = list(keys.values()) if name is None else [keys[key] for key in _named(name, list(keys))]
    lines = (
        [_block(one, file) for one in found]
        if len(found) <= MOST_BLOCKS
        else [_line(one) for one in found]
    )
    lines += (
        [] if len(found) <= MOST_BLOCKS else ["one key: forerun explain plan search.num_trials"]
    )
    return {"keys": [{**one} for one in found]}, "\n".join(lines)


def _named(name: str, keys: list[str]) -> list[str]:
    for pattern in (name, f"{name}.*", f"*.{name}"):
        if found := [key for key in keys if fnmatch.fnmatchcase(key, pattern)]:
            return found
    ends = {key.partition(".")[2]: key for key in keys}
    near = [ends.get(word, word) for word in difflib.get_close_matches(name, [*keys, *ends], n=2)]
    hint = (
        f"did you mean {' or '.join(dict.fromkeys(near))}?"
        if near
        else "`forerun explain plan` lists them"
    )
    raise UnknownKeyError(f"{name}: no key of a plan has that name; {hint}")


def _line(one: dict[str, Any]) -> str:
    own, default = one["study_value"], one["default"] or "(empty)"
    differs = f" Default: {default}." if own not in (None, one["default"]) else ""
    return f"{one['key']} = {own or default}  # {one['what']}{differs}"


def _block(one: dict[str, Any], file: Path) -> str:
    own, default = one["study_value"], one["default"]
    value = f"{default}  (the default)"
    if own is not None:
        value = (
            f"{own}  (in {file}; the "
            f"default{'' if own == default else ': ' + (default or 'empty')})"
        )
    unit = f", in {one['unit']}" if one["unit"] else ""
    what = textwrap.wrap(one["what"], 100, break_on_hyphens=False)
    kind = one["value"].replace("`", "")
    return "\n".join(
        [f"{one['key']} = {value}", *(f"  {line}" for line in what), f"  must be: {kind}{unit}"]
    )


def unit_of(key: str) -> str:
    """The unit that a key carries in its name, or nothing."""
    return next(
        (
            unit
            for end, unit in sorted(_UNITS.items(), key=lambda item: -len(item[0]))
            if re.search(rf"(^|_){end}$", key)
        ),
        "",
    )


def _bounds(schema: dict[str, Any]) -> str:
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
        "multipleOf": "a multiple of",
    }
    said = [f"{text} {schema[name]:.12g}" for name, text in words.items() if name in schema]
    return (" " + ", ".join(said)) if said else ""


def kind_of(schema: dict[str, Any], defs: dict[str, Any]) -> str:
    """What a value has to be, in words."""
    if "$ref" in schema:
        return kind_of(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "const" in schema or "enum" in schema:
        return " or ".join(
            f"`{json.dumps(one)}`" for one in schema.get("enum", [schema.get("const")])
        )
    if "anyOf" in schema:
        return " or ".join(
            kind_of(one, defs) for one in schema["anyOf"] if one.get("type") != "null"
        )
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
    names = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "`true` or `false`",
    }
    return names.get(str(kind), "anything") + _bounds(schema)
