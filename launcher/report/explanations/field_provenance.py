"""The fields of a frozen config and their provenance, as data.

`list_fields` lists the fields of a decision under dotted names, and `find_fields` looks fields up
by the names that people type. Each field has a `Provenance` record in attestation
`provenance.json`; `pack_records` builds the attestation, and `read_provenance` reads it.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from forerun._launcher.main_run.frozen.frozen import Decision, ParameterGroup, TamperedError
from forerun._launcher.main_run.frozen.launch_file import get_attestation_path, read_attestation
from forerun._launcher.report.explanations.plan_keys import suggest_names
from forerun._launcher.study.stages.gates import Gate
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.errors import ExitCode, InputError
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS
from forerun._transfer.question import Outcome

# ---- Fields of a decision ----

NAMES_BY_ALIAS = {
    alias: hyperparameter.name
    for hyperparameter in HYPERPARAMETERS.values()
    for alias in hyperparameter.aliases
}
"""Full names of hyperparameters by their short names, such as `lr`."""
NAMED_LISTS = ("groups", "transfer")
"""Lists of a decision whose records are shown under their names, as `_name_records` gives them. Any
other list is one field."""


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
    record: object
    """Record of the decision that has the field, such as a `ParameterGroup`."""


def list_fields(decision: Decision) -> tuple[Field, ...]:
    """Return every field of a decision, in the order of its records.

    A table of numbers (samples, curve, shares) is one field.
    """
    return tuple(_list_fields(decision, "", ""))


def _list_fields(record: Any, path: str, key: str) -> Iterator[Field]:
    for field in canon.list_written_fields(record):
        name, value = field.name, getattr(record, field.name)
        if isinstance(value, dict):
            # A group's settings are shown as fields of the group itself.
            prefix = "" if isinstance(record, ParameterGroup) else f"{name}."
            for item in value:
                yield Field(
                    path=f"{path}{prefix}{item}",
                    key=f"{key}{prefix}{item}",
                    value=value[item],
                    record=record,
                )
        elif dataclasses.is_dataclass(value):
            yield from _list_fields(value, f"{path}{name}.", f"{key}{name}.")
        elif f"{path}{name}" in NAMED_LISTS:
            for item, record_name in zip(value, _name_records(value), strict=True):
                yield from _list_fields(item, f"{path}{name}.{record_name}.", f"{key}{name}.")
        else:
            yield Field(
                path=f"{path}{name}", key=f"{key}{name}", value=canon.to_json(value), record=record
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


def find_fields(fields: Sequence[Field], name: str) -> tuple[Field, ...]:
    """Return the fields that a name stands for.

    The name may be a whole path, the beginning or the end of paths (`warmup_steps`), or a pattern
    with `*`. The name of a hyperparameter stands for its values in every group. That meaning takes
    precedence over fields whose paths begin with the name (`learning_rate.schedule`).

    Raises:
        UnknownFieldError: No field has the name; the message has the nearest names.
    """
    wanted = ".".join(NAMES_BY_ALIAS.get(part, part) for part in name.split("."))
    is_hyperparameter = wanted in HYPERPARAMETERS
    # A user's own trainer receives hyperparameters under placeholders, such as `lr`.
    placeholder = HYPERPARAMETERS[wanted].placeholder_name if is_hyperparameter else name
    # The first patterns that match a field count.
    for patterns in (
        (name, f"own.values.{placeholder}"),
        (f"groups.*.{wanted}",) if is_hyperparameter else (),
        (wanted, f"{wanted}.*"),
        (f"*.{wanted}",),
        (f"*.{wanted}.*",),
        (f"*.{placeholder}",),
    ):
        matches = tuple(field for field in fields if _matches(field, patterns))
        if matches and wanted:
            return matches
    hint = suggest_names(wanted, [field.path for field in fields], "forerun explain FROZEN")
    raise UnknownFieldError(f"{name}: no field of this config has that name; {hint}")


def _matches(field: Field, patterns: Iterable[str]) -> bool:
    """Return whether a field's name, with or without the numbers of groups, fits a pattern."""
    without_numbers = ".".join(part for part in field.path.split(".") if not part.isdigit())
    return any(
        fnmatch.fnmatchcase(path, pattern)
        for path in (field.path, without_numbers)
        for pattern in patterns
    )


# ---- Records of the attestation ----

PROVENANCE = "provenance"
"""Kind of the attestation."""
SourceKind = Literal[
    "plan", "default", "search", "valley", "fit", "verdict", "rule", "corpus", "derived", "fixed"
]
"""Kind of a value's source. `plan`, `default`: a plan key, set or left alone. `search`: the best
trial. `valley`: the fitted optimum of a loss basin, under an older name that attestations keep.
`fit`: the fit of the ladder. `verdict`: a transfer test. `rule`: a rule of the parametrization.
`corpus`: the corpus. `derived`: other fields. `fixed`: this version of forerun."""
_REMEDY = "`forerun freeze STUDY` writes them again, under the same digest"
StrengthKind = Literal["measured", "assumed", "chosen", "exact"]
"""Kind of evidence. `measured`: runs support the value, or speak against it. `assumed`: no run of
this study tests the value, but a run could. `chosen`: a preference, which no run can show to be
wrong. `exact`: the value follows from other fields."""


class NoProvenanceError(InputError):
    """The config has no provenance record of one of its fields."""

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
    """Purpose of the runs in words: `search`, `ladder`, or the name of a test."""
    num_runs: int
    num_seeds: int
    """Number of different seeds."""
    ids: tuple[str, ...]
    """Ids of the runs."""


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
class GateOutcome(Gate):
    """The outcome of a freezing gate that bears on a field."""

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


def pack_records(records: Iterable[Provenance]) -> dict[str, Json]:
    """Return the body of the attestation.

    Many fields share runs, so runs are stored once, by their purpose.
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
    """Read the provenance records of a config, by field.

    Args:
        folder: Folder of the frozen config.
        digest: Digest of the config.
        fields: Fields that must have a record.

    Raises:
        NoProvenanceError: There are no records, or not for all of these fields.
        TamperedError: The records were edited, or belong to another config.
    """
    path, records = get_attestation_path(folder, PROVENANCE), {}
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
