"""Provenance as data: a record for each field of a frozen config, kept in the attestation `provenance.json`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from launcher.frozen.attestations import path_of, read_attestation
from launcher.frozen.frozen import TamperedError
from proxies.core import canon
from proxies.core.canon import Json
from transfer.question import Outcome

PROVENANCE = "provenance"
"""Kind of the attestation."""
SourceKind = Literal["plan", "default", "search", "valley", "fit", "verdict", "rule", "corpus", "derived", "fixed"]
"""plan, default: a plan key, set or left alone; search, valley: the best trial, the fitted optimum of the learning
rate; fit: of the ladder; verdict: of a transfer test; rule: of a parametrization; derived: from other fields; fixed: by
this version of forerun."""
_AGAIN = "`forerun freeze STUDY` writes them, under the same digest"
StrengthKind = Literal["measured", "assumed", "chosen", "exact"]
"""measured: runs bear on it, for or against; assumed: none of this study's does, and one could; chosen: a wish, which
no run can show to be wrong; exact: follows from other fields."""


class NoProvenanceError(ValueError):
    """No record lies beside the config of where its fields came from."""

    exit_code = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanKey:
    """A key of the plan that decides the field."""

    key: str
    value: object
    default: object


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Runs that the value, or what is known of it, comes from."""

    what: str
    num_runs: int
    num_seeds: int
    """Different ones."""
    ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a value came from."""

    kind: SourceKind
    text: str
    plan_keys: tuple[PlanKey, ...] = ()
    rules: tuple[str, ...] = ()
    """Rules of a parametrization or a policy, with their sources."""
    runs: tuple[Runs, ...] = ()
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
class Strength:
    """How good the evidence is."""

    kind: StrengthKind
    text: str
    outcome: Outcome | None = None
    gates: tuple[GateOutcome, ...] = ()
    num_runs: int | None = None
    num_seeds: int | None = None
    extrapolation: float | None = None
    """How many times beyond the largest size measured the launch lies, on the axis where that is farthest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where one field came from. The value itself is in `launch.json`."""

    field: str
    source: Source
    strength: Strength
    change: tuple[str, ...]
    """What would change it, or decide it: plan keys, runs, commands, with PLAN, STUDY and FROZEN for the places."""
    warnings: tuple[str, ...] = ()
    """What must be said before the value: its forecast is inconclusive."""


def packed(records: Iterable[Provenance]) -> dict[str, Json]:
    """The body of the attestation; runs, which many fields share, are there once, by what they were made for."""
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
            raise TamperedError(str(path), [f"no records of provenance: {error}; {_AGAIN}"]) from error
    if missing := [field for field in fields if field not in found]:
        raise NoProvenanceError(f"{path}: no record of where {missing[0]} came from; {_AGAIN}")
    return found
