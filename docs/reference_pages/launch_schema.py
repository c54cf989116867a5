"""Text of docs/reference/launch.schema.json, the JSON Schema of the frozen config `launch.json`.

The schema is derived from the dataclasses of the config. Its descriptions are the docstrings that
records.md shows too.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from pydantic import TypeAdapter

from forerun._launcher.main_run.frozen.frozen import SCHEMA_VERSION, Decision
from forerun._proxies.core import canon
from forerun._proxies.core.optimizers import OPTIMIZERS, OptimizerSpec
from reference_pages.records import describe_fields, list_records_below

_DIGEST = {
    "type": "string",
    "pattern": "^[0-9a-f]{64}$",
    "description": "Sha256 of the decision's canonical text.",
}


def build_launch_schema() -> str:
    """Return the schema as sorted, indented JSON."""
    decision = TypeAdapter(Decision).json_schema(mode="serialization")
    records = {record.__name__: record for record in list_records_below(Decision)}
    parts = {
        name: _make_strict(schema, records[name]) for name, schema in decision.pop("$defs").items()
    }
    parts["ParameterGroup"]["oneOf"] = [
        _build_settings_schema(spec) for spec in OPTIMIZERS.values()
    ]
    parts["Decision"] = _make_strict(decision, Decision)
    parts["Decision"]["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:forerun:launch:{SCHEMA_VERSION}",
        "title": f"forerun's frozen launch config, version {SCHEMA_VERSION}",
        "type": "object",
        "properties": {"decision": {"$ref": "#/$defs/Decision"}, "digest": _DIGEST},
        "required": ["decision", "digest"],
        "additionalProperties": False,
        "$defs": parts,
    }
    return json.dumps(schema, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _build_settings_schema(spec: OptimizerSpec) -> dict[str, Any]:
    """Return the schema of a parameter group that one optimizer updates.

    The group has all settings of that optimizer, and no others.
    """
    settings = {
        "properties": {name: {"type": "number"} for name in spec.settings},
        "required": [*spec.settings],
        "additionalProperties": False,
    }
    return {"properties": {"optimizer": {"const": spec.name}, "settings": settings}}


def _make_strict(schema: dict[str, Any], record: type) -> dict[str, Any]:
    """Return the schema of a record as forerun writes it.

    A field is optional only if it is left out at its default. No other fields are allowed.
    """
    optional = {
        field.name
        for field in dataclasses.fields(record)
        if field.metadata.items() >= canon.UNLESS_DEFAULT.items()
    }
    descriptions = {field.name: field.description for field in describe_fields(record)}
    properties = {}
    for name, property_schema in schema["properties"].items():
        keywords = {
            key: value for key, value in property_schema.items() if key not in ("title", "default")
        }
        properties[name] = keywords
        if descriptions.get(name):
            properties[name]["description"] = " ".join(descriptions[name].split())
    return {
        "type": "object",
        "description": " ".join(str(record.__doc__).split()),
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }
