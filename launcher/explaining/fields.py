"""The fields of a decision by dotted names, and finding them by names as people type them."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.frozen.frozen import Decision, ParameterGroup
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.hyperparameters import HYPERPARAMETERS

SHORT = {alias: one.name for one in HYPERPARAMETERS.values() for alias in one.aliases}
"""Short names of a part of a name: `lr`."""
NAMED = ("groups", "transfer")
"""Lists of records that have names of their own."""


class UnknownFieldError(ValueError):
    """No field of the config has that name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One field of a decision."""

    path: str
    """As shown: `groups.embedding.learning_rate`; of several groups of a kind, `groups.hidden.2.learning_rate`."""
    key: str
    """The field of its record, whichever group or rule it is of: `groups.learning_rate`."""
    value: Json
    of: object
    """The record that it is a field of."""


def fields_of(decision: Decision) -> tuple[Field, ...]:
    """Every field, in the order of the record; tables of numbers (samples, curve, shares) are one field each."""
    return tuple(_walk(decision, "", ""))


def _walk(record: Any, path: str, key: str) -> Iterator[Field]:
    for field in dataclasses.fields(record):
        name, value = field.name, getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            yield from _walk(value, f"{path}{name}.", f"{key}{name}.")
        elif f"{path}{name}" in NAMED:
            for item, called in zip(value, _names(value), strict=True):
                yield from _walk(item, f"{path}{name}.{called}.", f"{key}{name}.")
        else:
            yield Field(path=f"{path}{name}", key=f"{key}{name}", value=canon.to_json(value), of=record)


def _names(records: Sequence[Any]) -> list[str]:
    """By kind of parameter, or by hyperparameter and axis; numbered from 1 where several share a name."""
    plain = [r.kind if isinstance(r, ParameterGroup) else f"{r.hyperparameter}.{r.axis}" for r in records]
    return [
        f"{name}.{plain[: index + 1].count(name)}" if plain.count(name) > 1 else name
        for index, name in enumerate(plain)
    ]


def find(fields: Sequence[Field], name: str) -> tuple[Field, ...]:
    """The fields of a name: whole, a prefix, with `*`, or left short at its front (`warmup_steps`).

    Raises:
        UnknownFieldError: there is none; it names the nearest.
    """
    wanted = ".".join(SHORT.get(part, part) for part in name.split("."))
    for patterns in ((wanted, f"{wanted}.*"), (f"*.{wanted}",), (f"*.{wanted}.*",)):
        found = tuple(
            field
            for field in fields
            if any(fnmatch.fnmatchcase(said, each) for said in (field.path, _unnumbered(field)) for each in patterns)
        )
        if found and wanted:
            return found
    by_end = {field.path.rpartition(".")[2]: field.path for field in fields}
    near = difflib.get_close_matches(wanted, [field.path for field in fields], n=1)
    near += [by_end[end] for end in difflib.get_close_matches(wanted.rpartition(".")[2], by_end, n=1)]
    hint = f"did you mean {' or '.join(dict.fromkeys(near))}?" if near else "`forerun explain FROZEN` lists them"
    raise UnknownFieldError(f"{name}: no field of this config has that name; {hint}")


def _unnumbered(field: Field) -> str:
    return ".".join(part for part in field.path.split(".") if not part.isdigit())
