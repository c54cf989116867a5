"""What became of a decision in a trainer's files, field by field."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, cast

from proxies.core import canon

if TYPE_CHECKING:
    from launcher.frozen.frozen import Decision

Verdict = Literal["exact", "equivalent", "not_expressible"]
Judgement = tuple[Verdict, str]
"""A verdict with its note; every verdict but `exact` needs one."""
MODULES = {
    "native": "native",
    "torchtitan": "torchtitan",
    "huggingface": "huggingface",
    "megatron-lm": "megatron_lm",
    "olmo-core": "olmo_core",
}
"""Trainers by the name that users type, and the module of `trainers` that writes their files."""


class ExportError(ValueError):
    """A version nobody knows, or a decision the trainer cannot run. `problems` lists all of it."""

    def __init__(self, trainer: str, problems: list[str]) -> None:
        self.problems = problems
        super().__init__(f"{trainer} export: " + "; ".join(problems))


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityEntry:
    """One field of the decision."""

    field: str
    """Its path, such as `learning_rate.schedule.kind`."""
    verdict: Verdict
    """The same number; another form of the same run, under the note's condition; or not in the trainer's language."""
    note: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityReport:
    """What the export of one decision to one trainer carries over."""

    trainer: str
    version: str
    entries: tuple[FidelityEntry, ...]

    @property
    def lost(self) -> tuple[FidelityEntry, ...]:
        """What of the decision the trainer cannot express."""
        return tuple(entry for entry in self.entries if entry.verdict == "not_expressible")


class Exporter(Protocol):
    """What a module of this room offers."""

    VERSIONS: tuple[str, ...]
    """Versions of the trainer that it knows, the one written by default last."""

    def export(self, decision: Decision, out_dir: Path, version: str) -> FidelityReport:
        """Write the trainer's files; returns what became of every leaf field of the decision.

        Raises:
            ExportError: an unknown version, or what the trainer cannot run; every problem at once, nothing written.
            FrozenError: the groups do not fit the shape's parameters.
        """


def exporter(trainer: str) -> Exporter:
    """The module that writes files of `trainer`, a key of `MODULES`."""
    return cast(Exporter, importlib.import_module(f"launcher.exporters.trainers.{MODULES[trainer]}"))


def judged(decision: Decision, judgements: Mapping[str, Judgement]) -> tuple[FidelityEntry, ...]:
    """Each leaf field with the judgement of its nearest named ancestor; a field without one is our bug, a KeyError."""
    entries = []
    for leaf in dict.fromkeys(_leaves(canon.to_json(decision))):
        name = leaf
        while "." in name and name not in judgements:
            name = name.rpartition(".")[0]
        verdict, note = judgements[name]
        entries.append(FidelityEntry(field=leaf, verdict=verdict, note=note))
    return tuple(entries)


def _leaves(value: canon.Json, path: str = "") -> Iterator[str]:
    """Dotted names of the leaf fields; the records of a list share theirs."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for child in value:
            yield from _leaves(child, path)
    else:
        yield path
