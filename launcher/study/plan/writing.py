"""Writing of plans: every key with its value and its sentence, and the JSON Schema through which
editors know the keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from forerun._launcher.study.plan.plan import Plan
from forerun._proxies.core.hyperparameters import SET_BY

SCHEMA_LINE = "#:schema ./plan.schema.json"
"""First line of a plan, which tells editors (taplo, Even Better TOML) the name of its schema
file.
"""


SHOWN_KEYS = frozenset(
    {
        "data.path",
        "model.num_layers",
        "model.seq_len",
        "proxy.parametrization",
        "proxy.optimizer",
        "proxy.base_width",
        "proxy.batch_tokens",
        "proxy.num_steps",
        "proxy.schedule",
        "search.num_trials",
        *(f"search.{hyperparameter.name}" for hyperparameter in SET_BY["search"]),
        "transfer.widths",
        "transfer.durations",
        "transfer.margin_nats",
        "ladder.widths",
        "ladder.num_steps",
        "target.budget_flops",
        "target.batch_tokens",
        "cluster.num_workers",
        "launch.data_parallel_shard",
    }
)
"""Keys that people often change. `forerun init` always writes them, also with their defaults."""


def format_plan(
    values: Mapping[str, Mapping[str, object]], head: Sequence[str] = (), *, every: bool = False
) -> str:
    """Return the text of a plan file: the keys of `SHOWN_KEYS`, and those that differ from their
    defaults, each with its description.

    Args:
        values: Values that replace defaults, by section and key.
        head: Lines of comment after the first ones.
        every: Whether to write all keys.
    """
    lines = [
        SCHEMA_LINE,
        (
            "# A forerun plan. A key that is not shown has its default: `forerun explain plan` "
            "lists all of them,"
        ),
        "# `forerun explain plan KEY` says what one means.",
        *[f"# {line}".rstrip() for line in head],
        "",
    ]
    for name, field in Plan.model_fields.items():
        section = field.annotation
        assert isinstance(section, type) and issubclass(section, BaseModel)
        lines += [f"[{name}]  # {(section.__doc__ or '').strip()}"]
        for key, inner in section.model_fields.items():
            value = values.get(name, {}).get(key, inner.default)
            if not (every or f"{name}.{key}" in SHOWN_KEYS or value != inner.default):
                continue
            sentence = " ".join((inner.description or "").split())
            lines.append(f"# {sentence}{_list_choices(inner.annotation)}")
            lines.append(f"{key} = {format_toml(value)}")
        lines.append("")
    return "\n".join(lines)


def _list_choices(annotation: Any) -> str:
    options = get_args(annotation) if not isinstance(annotation, type) else ()
    return (
        f" One of: {', '.join(options)}."
        if options and all(isinstance(o, str) for o in options)
        else ""
    )


def format_toml(value: object) -> str:
    """Format a value as TOML on one line."""
    if isinstance(value, BaseModel):
        value = value.model_dump(exclude_none=True)
    if isinstance(value, dict):
        pairs = [
            f"{json.dumps(key)} = {format_toml(item)}"
            for key, item in value.items()
            if item is not None
        ]
        return "{ " + ", ".join(pairs) + " }" if pairs else "{}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(format_toml(item) for item in value) + "]"
    if isinstance(value, float):
        short = f"{value:g}".replace("e+", "e")
        return short if "e" in short and float(short) == value else repr(value)
    # TOML does not allow surrogate pairs.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def build_plan_schema() -> dict[str, Any]:
    """Return the JSON Schema of a plan, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Plan.model_json_schema()}
