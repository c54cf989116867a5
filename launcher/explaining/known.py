"""What is known of a frozen config where it lies: its records, read and checked. No torch, no numpy."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.explaining.provenance import plan_record
from launcher.explaining.record import GateSaid, PlanKey
from launcher.frozen.attestations import path_of, read_attestation
from launcher.frozen.frozen import Decision
from launcher.frozen.launch_file import read_launch
from launcher.plan.file import PlanError, load_plan
from launcher.plan.plan import Plan
from launcher.plan.sections import RuleChoices
from launcher.plan.study import PLAN_FILE
from proxies.core.canon import Json
from sweeps.store.ledger import LEDGER_NAME, Ledger

Body = Mapping[str, Any]
_FREEZE = "`forerun freeze STUDY` writes it again, under the same digest"


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A decision and all that lies beside it."""

    decision: Decision
    evidence: Body
    """The attestation's body; empty where there is none."""
    layout: Body
    """The same, of the dry run of its degrees."""
    rehearsed: str
    """Whether the drills were held, in a sentence."""
    plan: Body | None
    study: str | None
    """Path of the study around the config's folder; None where it lies alone."""
    folder: str
    notes: tuple[str, ...]
    """What these records cannot say, and how they stand to the study's."""

    @property
    def provenance(self) -> Body:
        """The part of the evidence that is kept for explaining; empty where an older version froze."""
        found: Body = self.evidence.get("provenance") or {}
        return found

    @property
    def transfer(self) -> Body:
        """The report's part on transfer; empty where there is none."""
        found: Body = self.evidence.get("transfer") or {}
        return found

    @property
    def fit(self) -> Body:
        """The report's part on the fit; empty where there is none."""
        found: Body = self.evidence.get("fit") or {}
        return found

    def gate(self, name: str) -> tuple[GateSaid, ...]:
        """One of the gates as it was when the config was frozen; none where the evidence does not say."""
        given = self.evidence.get("accepted") or {}
        return tuple(
            GateSaid(name=name, outcome=gate["outcome"], reason=gate["reason"], accepted=given.get(name))
            for gate in self.evidence.get("gates", ())
            if gate["name"] == name
        )

    def asked(self, key: str) -> PlanKey:
        """A key of the plan: what it says, and what it would say by default."""
        section, _, name = key.partition(".")
        default = at(defaults(), key)
        value = None if self.plan is None else at(self.plan, key)
        fields = type(getattr(Plan(), section)).model_fields
        if name.startswith("rules."):
            fields, name = RuleChoices.model_fields, name.removeprefix("rules.")
        field = fields[name.partition(".")[0]]
        return PlanKey(
            key=key, value=value, default=default, text=field.description or "",
            is_set=None if self.plan is None else value != default,
        )  # fmt: skip

    def value_of(self, key: str) -> Any:
        """What the plan says; None where it is not here."""
        return None if self.plan is None else at(self.plan, key)

    @property
    def plan_words(self) -> str:
        """How a command names the plan."""
        return "PLAN" if self.study is None else f"{self.study}/{PLAN_FILE}"

    @property
    def study_words(self) -> str:
        """How a command names the study."""
        return self.study or "STUDY"


@functools.cache
def defaults() -> dict[str, Json]:
    """A plan's keys where a plan says nothing."""
    return plan_record(Plan())


@functools.cache
def _question() -> dict[str, Json]:
    return Plan().question()


def at(plan: Body, key: str) -> Any:
    """The value of a dotted key; None where a record lacks it."""
    found: Any = plan
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def asks_anew(key: str) -> bool:
    """Whether a study that has begun cannot change the key: another value is another question."""
    section, _, name = key.partition(".")
    if section == "data":  # not the folder, but what is in it is a part of the question
        return True
    found = _question().get(section)
    return isinstance(found, dict) and name.partition(".")[0] in found


def known_of(frozen: Path, folder: Path) -> Known:
    """Everything beside a config.

    Args:
        frozen: as it was given.
        folder: where it lies.

    Raises:
        FrozenError: there is no launch config.
        TamperedError: it, or an attestation that is read, was edited.
        LedgerCorrupt: the study around it is not sound.
    """
    from launcher.rehearsal.standing import rehearsal_of

    decision = read_launch(frozen)
    found = {
        kind: read_attestation(path, decision.digest)
        for kind in ("evidence", "layout")
        if (path := path_of(folder, kind)).is_file()
    }
    evidence = found.get("evidence", {})
    study = study_around(folder)
    plan, notes = _plan(evidence, study)
    if not evidence:
        notes.insert(
            0, f"no evidence lies beside this config: verdicts, fit, gates and run ids are not known; {_FREEZE}"
        )
    return Known(
        decision=decision, evidence=evidence, layout=found.get("layout", {}), plan=plan,
        rehearsed=rehearsal_of(folder, decision.digest).sentence, study=None if study is None else str(study),
        folder=str(folder), notes=(*notes, *_standing(evidence, study)),
    )  # fmt: skip


def study_around(folder: Path) -> Path | None:
    """The study whose `frozen/` a config's folder lies in; None where there is no ledger."""
    frozen_dir = folder.absolute().parent
    study = folder.parent.parent if folder.parent.name == "frozen" else frozen_dir.parent
    return study if frozen_dir.name == "frozen" and (study / LEDGER_NAME).is_file() else None


def _plan(evidence: Body, study: Path | None) -> tuple[Body | None, list[str]]:
    """The plan that was frozen; the study's as it is now where the evidence keeps none."""
    if "provenance" in evidence:
        return evidence["provenance"]["plan"], []
    if evidence:
        told = f"its evidence keeps neither the plan nor the runs by stage, as older versions' did not; {_FREEZE}"
    else:
        told = "the plan it was frozen by is not kept beside it"
    if study is None:
        return None, [told]
    try:
        plan = plan_record(load_plan(study / PLAN_FILE))
    except PlanError as error:
        return None, [told, f"the study's plan cannot be read: {error}"]
    return plan, [f"{told}; the plan shown is the study's as it is now"]


def since_frozen(evidence: Body, ledger: Ledger) -> tuple[int | None, set[str]]:
    """Records since the one that a config was frozen at (None: it is not in this ledger); runs of its that are not."""
    hashes = [record.hash for record in ledger.records()]
    head = evidence["ledger_head"]
    since = len(hashes) - 1 - hashes.index(head) if head in hashes else None
    return since, set(evidence["run_ids"]) - set(ledger.results())


def _standing(evidence: Body, study: Path | None) -> list[str]:
    """How the evidence stands to the ledger that it was drawn from."""
    if study is None:
        return ["no study lies around this config: its runs are named by id, and cannot be looked up here"]
    if not evidence:
        return []
    ledger = Ledger.read(study)
    since, lost = since_frozen(evidence, ledger)
    if since is None:
        return ["the ledger of the study around it does not hold the record that it was frozen at: another study's"]
    said = [f"{len(lost)} runs of its evidence are not in the ledger around it"] if lost else []
    if since:
        said.append(
            f"the study has {since} records more than when this was frozen: `forerun report {study}` says of what"
        )
    return said
