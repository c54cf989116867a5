"""launch.schema.json: the JSON Schema of `launch.json`, from the same dataclasses and texts as
records.md.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from pydantic import TypeAdapter

from launcher.frozen.frozen import SCHEMA_VERSION, Decision
from proxies.core import canon
from proxies.core.optimizers import OPTIMIZERS, OptimizerSpec
from reference_pages.records import below, fields_of

_DIGEST = {
    "type": "string",
    "pattern": "^[0-9a-f]{64}$",
    "description": "Sha256 of the decision's canonical text.",
}


def launch_schema() -> str:
    """The schema, sorted and indented."""
    decision = TypeAdapter(Decision).json_schema(mode="serialization")
    records = {record.__name__: record for record in below(Decision)}
    parts = {name: _strict(schema, records[name]) for name, schema in decision.pop("$defs").items()}
    parts["ParameterGroup"]["oneOf"] = [_settings(spec) for spec in OPTIMIZERS.values()]
    parts["Decision"] = _strict(decision, Decision)
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


def _settings(spec: OptimizerSpec) -> dict[str, Any]:
    """Return the schema of a group that an optimizer steps: it has all of its settings, and no
    others.
    """
    settings = {
        "properties": {name: {"type": "number"} for name in spec.settings},
        "required": [*spec.settings],
        "additionalProperties": False,
    }
    return {"properties": {"optimizer": {"const": spec.name}, "settings": settings}}


def _strict(schema: dict[str, Any], record: type) -> dict[str, Any]:
    """As it is written: every field is there, but for those that are left out at their default, and
    no other.
    """
    absent = {
        one.name
        for one in dataclasses.fields(record)
        if one.metadata.items() >= canon.UNLESS_DEFAULT.items()
    }
    said = {name: text for name, _, _, text in fields_of(record)}
    properties = {}
    for name, one in schema["properties"].items():
        kept = {key: value for key, value in one.items() if key not in ("title", "default")}
        properties[name] = {
            **kept,
            **({"description": " ".join(said[name].split())} if said.get(name) else {}),
        }
    return {
        "type": "object",
        "description": " ".join(str(record.__doc__).split()),
        "properties": properties,
        "required": [name for name in properties if name not in absent],
        "additionalProperties": False,
    }
