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

ALIASES = {
    "batch": "batch_tokens",
    "layers": "shape.num_layers",
    "loss": "predicted.loss_nats",
    "lr": "groups.*.learning_rate",
    "predicted_loss": "predicted.loss_nats",
    "schedule": "learning_rate.schedule",
    "steps": "learning_rate.schedule.num_steps",
    "tokens": "num_tokens",
    "warmup": "learning_rate.schedule.warmup_steps",
}
"""Short names of whole fields."""
PARTS = {"init": "init_std", **{alias: one.name for one in HYPERPARAMETERS.values() for alias in one.aliases}}
"""Short names of a part of a name."""
NAMED = ("groups", "transfer")
"""Lists of records that have names of their own."""
NUM_NEAR = 3


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
    written: bool
    """Whether `launch.json` has it, or leaves it out at its default."""
    place: tuple[str | int, ...]
    """Where it is in the JSON of the decision."""
    of: object
    """The record that it is a field of."""


def fields_of(decision: Decision) -> tuple[Field, ...]:
    """Every field, in the order of the record; tables of numbers (samples, curve, shares) are one field each."""
    return tuple(_walk(decision, canon.to_json(decision), "", "", ()))


def _walk(record: Any, plain: Any, path: str, key: str, place: tuple[str | int, ...]) -> Iterator[Field]:
    for field in dataclasses.fields(record):
        name, value = field.name, getattr(record, field.name)
        below = plain.get(name) if isinstance(plain, dict) else None
        written = isinstance(plain, dict) and name in plain
        if dataclasses.is_dataclass(value):
            yield from _walk(value, below, f"{path}{name}.", f"{key}{name}.", (*place, name))
        elif f"{path}{name}" in NAMED:
            for index, (item, called) in enumerate(zip(value, _names(value), strict=True)):
                inner = None if below is None else below[index]
                yield from _walk(item, inner, f"{path}{name}.{called}.", f"{key}{name}.", (*place, name, index))
        else:
            yield Field(
                path=f"{path}{name}", key=f"{key}{name}", value=canon.to_json(value), written=written,
                place=(*place, name), of=record,
            )  # fmt: skip


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
    wanted = ".".join(PARTS.get(part, part) for part in ALIASES.get(name, name).split("."))
    for patterns in ((wanted, f"{wanted}.*"), (f"*.{wanted}",), (f"*.{wanted}.*",)):  # the strictest that anything fits
        found = tuple(
            field
            for field in fields
            if any(fnmatch.fnmatchcase(spelled, pattern) for spelled in _spellings(field) for pattern in patterns)
        )
        if found and wanted:
            return found
    raise UnknownFieldError(f"{name}: no field of this config has that name; {_near(fields, name)}")


def _spellings(field: Field) -> tuple[str, str, str]:
    """Its name; the same without numbers; its place in the JSON."""
    parts = field.path.split(".")
    return field.path, ".".join(part for part in parts if not part.isdigit()), ".".join(map(str, field.place))


def _near(fields: Sequence[Field], name: str) -> str:
    """The nearest names, whole ones and last parts of them; else what there is at the top."""
    by_end: dict[str, str] = {**ALIASES}
    for field in fields:
        by_end.setdefault(field.path.rpartition(".")[2], field.path)
    ends = difflib.get_close_matches(name.rpartition(".")[2], by_end, n=NUM_NEAR)
    near = [*difflib.get_close_matches(name, [field.path for field in fields], n=NUM_NEAR), *(by_end[e] for e in ends)]
    if near:
        return f"did you mean {' or '.join(list(dict.fromkeys(near))[:NUM_NEAR])}?"
    return f"there are {', '.join(dict.fromkeys(field.path.partition('.')[0] for field in fields))}"
