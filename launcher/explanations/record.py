"""Provenance as data: a record for each field of a frozen config, in attestation `provenance.json`.

Fields of a decision have dotted names; `find` finds them by the names that people type.
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

# ---- Fields of a decision ----

SHORT = {
    alias: hyperparameter.name
    for hyperparameter in HYPERPARAMETERS.values()
    for alias in hyperparameter.aliases
}
"""Full names of hyperparameters by their short names, such as `lr`."""
NAMED = ("groups", "transfer")
"""Lists whose records have names of their own."""


class UnknownFieldError(InputError):
    """No field of the config has the given name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """One field of a decision, with its value."""

    path: str
    """Name as shown: `groups.embedding.learning_rate`. If several groups have one kind, they are
    numbered: `groups.hidden.2.learning_rate`."""
    key: str
    """Name without the group or rule: `groups.learning_rate`."""
    value: Json
    of: object
    """Record that has the field."""


def fields_of(decision: Decision) -> tuple[Field, ...]:
    """Return every field, in the order of the record.

    A table of numbers (samples, curve, shares) is one field.
    """
    return tuple(_list_fields(decision, "", ""))


def _list_fields(record: Any, path: str, key: str) -> Iterator[Field]:
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
            yield from _list_fields(value, f"{path}{name}.", f"{key}{name}.")
        elif f"{path}{name}" in NAMED:
            for item, record_name in zip(value, _name_records(value), strict=True):
                yield from _list_fields(item, f"{path}{name}.{record_name}.", f"{key}{name}.")
        else:
            yield Field(
                path=f"{path}{name}", key=f"{key}{name}", value=canon.to_json(value), of=record
            )


def _name_records(records: Sequence[Any]) -> list[str]:
    """Return the name of each record: kind of parameter, or hyperparameter and axis.

    Records that share a name are numbered from 1.
    """
    base_names = [
        record.kind
        if isinstance(record, ParameterGroup)
        else f"{record.hyperparameter}.{record.axis}"
        for record in records
    ]
    return [
        f"{name}.{base_names[: index + 1].count(name)}" if base_names.count(name) > 1 else name
        for index, name in enumerate(base_names)
    ]


def find(fields: Sequence[Field], name: str) -> tuple[Field, ...]:
    """Return the fields that a name stands for.

    The name may be whole, a prefix, a pattern with `*`, or the end of a name (`warmup_steps`). The
    name of a hyperparameter stands for its values in every group, before fields that begin with it
    (`learning_rate.schedule`).

    Raises:
        UnknownFieldError: No field has the name; the message has the nearest names.
    """
    wanted = ".".join(SHORT.get(part, part) for part in name.split("."))
    placeholder = HYPERPARAMETERS[wanted].told_as if wanted in HYPERPARAMETERS else name
    in_groups = ((f"groups.*.{wanted}",),) if wanted in HYPERPARAMETERS else ()
    # A user's own trainer receives hyperparameters under placeholders, such as `lr`.
    for patterns in (
        (name, f"own.values.{placeholder}"),
        *in_groups,
        (wanted, f"{wanted}.*"),
        (f"*.{wanted}",),
        (f"*.{wanted}.*",),
        (f"*.{placeholder}",),
    ):
        matches = tuple(
            field
            for field in fields
            if any(
                fnmatch.fnmatchcase(path, pattern)
                for path in (field.path, _strip_numbers(field))
                for pattern in patterns
            )
        )
        if matches and wanted:
            return matches
    by_end = {field.path.rpartition(".")[2]: field.path for field in fields}
    suggestions = difflib.get_close_matches(wanted, [field.path for field in fields], n=1)
    suggestions += [
        by_end[end] for end in difflib.get_close_matches(wanted.rpartition(".")[2], by_end, n=1)
    ]
    hint = (
        f"did you mean {' or '.join(dict.fromkeys(suggestions))}?"
        if suggestions
        else "`forerun explain FROZEN` lists them"
    )
    raise UnknownFieldError(f"{name}: no field of this config has that name; {hint}")


def _strip_numbers(field: Field) -> str:
    return ".".join(part for part in field.path.split(".") if not part.isdigit())


# ---- Records of the attestation ----

PROVENANCE = "provenance"
"""Kind of the attestation."""
SourceKind = Literal[
    "plan", "default", "search", "valley", "fit", "verdict", "rule", "corpus", "derived", "fixed"
]
"""Kind of a value's source. `plan`, `default`: a plan key, set or left alone. `search`: the best
trial. `valley`: the fitted optimum of a loss basin. `fit`: the fit of the ladder. `verdict`: a
transfer test. `rule`: a rule of the parametrization. `corpus`: the corpus. `derived`: other fields.
`fixed`: this version of forerun."""
_REMEDY = "`forerun freeze STUDY` writes them again, under the same digest"
StrengthKind = Literal["measured", "assumed", "chosen", "exact"]
"""Kind of evidence. `measured`: runs support the value, or speak against it. `assumed`: no run of
this study does, but one could. `chosen`: a preference, which no run can show to be wrong. `exact`:
the value follows from other fields."""


class NoProvenanceError(InputError):
    """The config has no records of where its fields came from."""

    exit_code = ExitCode.CANNOT_TELL


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanKey:
    """A key of the plan that decides the field."""

    key: str
    value: object
    default: object


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRuns:
    """Runs that a value, or the evidence about it, comes from."""

    what: str
    num_runs: int
    num_seeds: int
    """Number of different seeds."""
    ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueSource:
    """The source of a value."""

    kind: SourceKind
    text: str
    plan_keys: tuple[PlanKey, ...] = ()
    rules: tuple[str, ...] = ()
    """Rules of a parametrization or a policy, with their sources."""
    runs: tuple[SourceRuns, ...] = ()
    fields: tuple[str, ...] = ()
    """Other fields that the value follows from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateOutcome:
    """The outcome of a freezing gate that bears on a field."""

    name: str
    outcome: str
    reason: str
    accepted: str | None
    """Reason given for accepting the gate although it did not pass; None if it was not accepted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvidenceStrength:
    """The strength of the evidence for a value."""

    kind: StrengthKind
    text: str
    outcome: Outcome | None = None
    gates: tuple[GateOutcome, ...] = ()
    num_runs: int | None = None
    num_seeds: int | None = None
    extrapolation: float | None = None
    """Ratio of the launch's size to the largest measured one, on the axis where it is highest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """The provenance of one field. The value itself is in `launch.json`."""

    field: str
    source: ValueSource
    strength: EvidenceStrength
    change: tuple[str, ...]
    """Sentences on what would change or decide the value: plan keys, runs, commands, with PLAN,
    STUDY and FROZEN as placeholders."""
    warnings: tuple[str, ...] = ()
    """Warnings to show before the value, because its forecast is inconclusive."""


def packed(records: Iterable[Provenance]) -> dict[str, Json]:
    """Return the body of the attestation.

    Many fields share runs, so runs are stored once, by the purpose they were made for.
    """
    runs: dict[str, Json] = {}
    fields: list[Json] = []
    for record in records:
        runs |= {runs_record.what: canon.to_json(runs_record) for runs_record in record.source.runs}
        body = cast(dict[str, Any], canon.to_json(record))
        body["source"]["runs"] = [runs_record.what for runs_record in record.source.runs]
        fields.append(body)
    return {"runs": runs, "fields": fields}


def read_provenance(folder: Path, digest: str, fields: Iterable[str]) -> dict[str, Provenance]:
    """Read the records of a config, by field.

    Args:
        folder: Folder of the frozen config.
        digest: Digest of the config.
        fields: Fields that must have a record.

    Raises:
        NoProvenanceError: There are no records, or not for all of these fields.
        TamperedError: The records were edited, or belong to another config.
    """
    path, records = path_of(folder, PROVENANCE), {}
    if path.is_file():
        body: Any = read_attestation(path, digest)
        try:
            for entry in body["fields"]:
                entry["source"]["runs"] = [body["runs"][key] for key in entry["source"]["runs"]]
                records[entry["field"]] = canon.decode(Provenance, entry)
        except (KeyError, TypeError, canon.CanonError) as error:
            raise TamperedError(
                str(path), [f"the provenance records cannot be read: {error}; {_REMEDY}"]
            ) from error
    if missing := [field for field in fields if field not in records]:
        raise NoProvenanceError(f"{path}: no record of where {missing[0]} came from; {_REMEDY}")
    return records
