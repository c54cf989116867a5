"""The fields of a decision by dotted names, and finding them by names as people type them."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.frozen.frozen import CurvePoint, Decision, ParameterGroup
from proxies.core import canon
from proxies.core.canon import Json

ALIASES = {
    "batch": "batch_tokens",
    "clip": "clip_norm",
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
PARTS = {"lr": "learning_rate", "wd": "weight_decay", "init": "init_std"}
"""Short names of a part of a name."""
NAMED = ("groups", "transfer")
"""Lists of records that have names of their own."""
NUM_NEAR = 3


class UnknownFieldError(ValueError):
    """No field of the config has that name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
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


def leaves(decision: Decision) -> tuple[Leaf, ...]:
    """Every field, in the order of the record; tables of numbers (samples, curve, shares) are one field each."""
    return tuple(_walk(decision, canon.to_json(decision), "", "", ()))


def _walk(record: Any, plain: Any, path: str, key: str, place: tuple[str | int, ...]) -> Iterator[Leaf]:
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
            yield Leaf(
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


def keys_of(record: type = Decision, before: str = "") -> tuple[str, ...]:
    """Every `Leaf.key` that a decision can have, by its types."""
    found: list[str] = []
    hints = typing.get_type_hints(record)
    for field in dataclasses.fields(record):
        kinds = [hints[field.name], *typing.get_args(hints[field.name])]
        inner = [kind for kind in kinds if dataclasses.is_dataclass(kind) and kind is not CurvePoint]
        name = f"{before}{field.name}"
        found += keys_of(typing.cast(type, inner[0]), f"{name}.") if inner else [name]
    return tuple(found)


def find(fields: Sequence[Leaf], name: str) -> tuple[Leaf, ...]:
    """The fields of a name: whole, a prefix, with `*`, or left short at its front (`warmup_steps`).

    Raises:
        UnknownFieldError: there is none; it names the nearest.
    """
    wanted = [PARTS.get(part, part) for part in ALIASES.get(name, name).split(".")]
    spelled = {leaf.path: _spellings(leaf) for leaf in fields}
    for fits in (_begins, _ends, _has):  # the strictest that anything fits
        found = tuple(leaf for leaf in fields if any(fits(parts, wanted) for parts in spelled[leaf.path]))
        if found and all(wanted):
            return found
    raise UnknownFieldError(f"{name}: no field of this config has that name; {_near(fields, name)}")


def _spellings(leaf: Leaf) -> list[list[str]]:
    """Its name; the same without numbers; its place in the JSON."""
    parts = leaf.path.split(".")
    return [parts, [part for part in parts if not part.isdigit()], [str(part) for part in leaf.place]]


def _begins(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    same = zip(parts, wanted, strict=False)
    return len(wanted) <= len(parts) and all(fnmatch.fnmatchcase(part, want) for part, want in same)


def _ends(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    return len(wanted) <= len(parts) and _begins(parts[len(parts) - len(wanted) :], wanted)


def _has(parts: Sequence[str], wanted: Sequence[str]) -> bool:
    return any(_begins(parts[start:], wanted) for start in range(len(parts)))


def _near(fields: Sequence[Leaf], name: str) -> str:
    """The nearest names, whole ones and last parts of them; else what there is at the top."""
    by_end: dict[str, str] = {**ALIASES}
    for leaf in fields:
        by_end.setdefault(leaf.path.rpartition(".")[2], leaf.path)
    ends = difflib.get_close_matches(name.rpartition(".")[2], by_end, n=NUM_NEAR)
    near = [*difflib.get_close_matches(name, [leaf.path for leaf in fields], n=NUM_NEAR), *(by_end[e] for e in ends)]
    if near:
        return f"did you mean {' or '.join(list(dict.fromkeys(near))[:NUM_NEAR])}?"
    return f"there are {', '.join(dict.fromkeys(leaf.path.partition('.')[0] for leaf in fields))}"
