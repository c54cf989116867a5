"""Provenance as data: a record for each field of a frozen config, kept in the attestation
`provenance.json`.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from launcher.frozen.frozen import Decision, ParameterGroup, TamperedError
from launcher.frozen.launch_file import path_of, read_attestation
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.errors import ExitCode, InputError
from proxies.core.hyperparameters import HYPERPARAMETERS
from transfer.question import Outcome

# The fields of a decision by dotted names, and finding them by names as people type them.

SHORT = {alias: one.name for one in HYPERPARAMETERS.values() for alias in one.aliases}
"""Short names of a part of a name: `lr`."""
NAMED = ("groups", "transfer")
"""Lists of records that have names of their own."""


class UnknownFieldError(InputError):
    """No field of the config has that name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One field of a decision."""

    path: str
    """As shown: `groups.embedding.learning_rate`; of several groups of a kind,
    `groups.hidden.2.learning_rate`."""
    key: str
    """The field of its record, whichever group or rule it is of: `groups.learning_rate`."""
    value: Json
    of: object
    """The record that it is a field of."""


def fields_of(decision: Decision) -> tuple[Field, ...]:
    """Every field, in the order of the record; tables of numbers (samples, curve, shares) are one
    field each.
    """
    return tuple(_walk(decision, "", ""))


def _walk(record: Any, path: str, key: str) -> Iterator[Field]:
    for field in canon.written_fields(record):
        name, value = field.name, getattr(record, field.name)
        # shown as fields of the group
        if isinstance(record, ParameterGroup) and name == "settings":
            for item in value:
                yield Field(path=f"{path}{item}", key=f"{key}{item}", value=value[item], of=record)
        elif isinstance(value, dict):
            for item in value:
                yield Field(
                    path=f"{path}{name}.{item}",
                    key=f"{key}{name}.{item}",
                    value=value[item],
                    of=record,
                )
        elif dataclasses.is_dataclass(value):
            yield from _walk(value, f"{path}{name}.", f"{key}{name}.")
        elif f"{path}{name}" in NAMED:
            for item, called in zip(value, _names(value), strict=True):
                yield from _walk(item, f"{path}{name}.{called}.", f"{key}{name}.")
        else:
            yield Field(
                path=f"{path}{name}", key=f"{key}{name}", value=canon.to_json(value), of=record
            )


def _names(records: Sequence[Any]) -> list[str]:
    """By kind of parameter, or by hyperparameter and axis; numbered from 1 where several share a
    name.
    """
    plain = [
        r.kind if isinstance(r, ParameterGroup) else f"{r.hyperparameter}.{r.axis}" for r in records
    ]
    return [
        f"{name}.{plain[: index + 1].count(name)}" if plain.count(name) > 1 else name
        for index, name in enumerate(plain)
    ]


def find(fields: Sequence[Field], name: str) -> tuple[Field, ...]:
    """The fields of a name: whole, a prefix, with `*`, or left short at its front (`warmup_steps`).

    A hyperparameter's name means its values, in every group, before what else begins so
    (`learning_rate.schedule`).

    Raises:
        UnknownFieldError: there is none; it names the nearest.
    """
    wanted = ".".join(SHORT.get(part, part) for part in name.split("."))
    told = HYPERPARAMETERS[wanted].told_as if wanted in HYPERPARAMETERS else name
    in_groups = ((f"groups.*.{wanted}",),) if wanted in HYPERPARAMETERS else ()
    # A user's own trainer is told by placeholders, `lr` among them.
    for patterns in (
        (name, f"own.values.{told}"),
        *in_groups,
        (wanted, f"{wanted}.*"),
        (f"*.{wanted}",),
        (f"*.{wanted}.*",),
        (f"*.{told}",),
    ):
        found = tuple(
            field
            for field in fields
            if any(
                fnmatch.fnmatchcase(said, each)
                for said in (field.path, _unnumbered(field))
                for each in patterns
            )
        )
        if found and wanted:
            return found
    by_end = {field.path.rpartition(".")[2]: field.path for field in fields}
    near = difflib.get_close_matches(wanted, [field.path for field in fields], n=1)
    near += [
        by_end[end] for end in difflib.get_close_matches(wanted.rpartition(".")[2], by_end, n=1)
    ]
    hint = (
        f"did you mean {' or '.join(dict.fromkeys(near))}?"
        if near
        else "`forerun explain FROZEN` lists them"
    )
    raise UnknownFieldError(f"{name}: no field of this config has that name; {hint}")


def _unnumbered(field: Field) -> str:
    return ".".join(part for part in field.path.split(".") if not part.isdigit())


PROVENANCE = "provenance"
"""Kind of the attestation."""
SourceKind = Literal[
    "plan", "default", "search", "valley", "fit", "verdict", "rule", "corpus", "derived", "fixed"
]
"""plan, default: a plan key, set or left alone; search, valley: the best trial, the fitted optimum
of the learning rate; fit: of the ladder; verdict: of a transfer test; rule: of a parametrization;
derived: from other fields; fixed: by this version of forerun."""
_AGAIN = "`forerun freeze STUDY` writes them again, under the same digest"
StrengthKind = Literal["measured", "assumed", "chosen", "exact"]
"""measured: runs bear on it, for or against; assumed: none of this study's does, and one could;
chosen: a wish, which no run can show to be wrong; exact: follows from other fields."""


class NoProvenanceError(InputError):
    """No record lies beside the config of where its fields came from."""

    exit_code = ExitCode.CANNOT_TELL


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanKey:
    """A key of the plan that decides the field."""

    key: str
    value: object
    default: object


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRuns:
    """Runs that the value, or what is known of it, comes from."""

    what: str
    num_runs: int
    num_seeds: int
    """Different ones."""
    ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueSource:
    """Where a value came from."""

    kind: SourceKind
    text: str
    plan_keys: tuple[PlanKey, ...] = ()
    rules: tuple[str, ...] = ()
    """Rules of a parametrization or a policy, with their sources."""
    runs: tuple[SourceRuns, ...] = ()
    fields: tuple[str, ...] = ()
    """Other fields that it follows from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateOutcome:
    """A gate of freezing that bears on the field."""

    name: str
    outcome: str
    reason: str
    accepted: str | None
    """The reason for which someone froze although it did not pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceStrength:
    """How good the evidence is."""

    kind: StrengthKind
    text: str
    outcome: Outcome | None = None
    gates: tuple[GateOutcome, ...] = ()
    num_runs: int | None = None
    num_seeds: int | None = None
    extrapolation: float | None = None
    """How many times beyond the largest size measured the launch lies, on the axis where that is
    farthest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where one field came from. The value itself is in `launch.json`."""

    field: str
    source: ValueSource
    strength: EvidenceStrength
    change: tuple[str, ...]
    """What would change it, or decide it: plan keys, runs, commands, with PLAN, STUDY and FROZEN
    for the places."""
    warnings: tuple[str, ...] = ()
    """What is shown before the value: its forecast is inconclusive."""


def packed(records: Iterable[Provenance]) -> dict[str, Json]:
    """The body of the attestation; runs, which many fields share, are there once, by what they were
    made for.
    """
    runs: dict[str, Json] = {}
    fields: list[Json] = []
    for record in records:
        runs |= {each.what: canon.to_json(each) for each in record.source.runs}
        plain = cast(dict[str, Any], canon.to_json(record))
        plain["source"]["runs"] = [each.what for each in record.source.runs]
        fields.append(plain)
    return {"runs": runs, "fields": fields}


def read_provenance(folder: Path, digest: str, fields: Iterable[str]) -> dict[str, Provenance]:
    """The records beside a config, by field.

    Raises:
        NoProvenanceError: there are none, or not of all these fields.
        TamperedError: they were edited, or are another config's.
    """
    path, found = path_of(folder, PROVENANCE), {}
    if path.is_file():
        body: Any = read_attestation(path, digest)
        try:
            for one in body["fields"]:
                one["source"]["runs"] = [body["runs"][what] for what in one["source"]["runs"]]
                found[one["field"]] = canon.decode(Provenance, one)
        except (KeyError, TypeError, canon.CanonError) as error:
            raise TamperedError(
                str(path), [f"the provenance records cannot be read: {error}; {_AGAIN}"]
            ) from error
    if missing := [field for field in fields if field not in found]:
        raise NoProvenanceError(f"{path}: no record of where {missing[0]} came from; {_AGAIN}")
    return found
