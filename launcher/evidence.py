"""Everything a study found so far, gathered once: what the report, `freeze` and the verbs' answers are made of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher import decide
from launcher.decide import Choice, Searched, StageMissingError, Transferred
from launcher.gates import Gate, gates
from launcher.own import OwnProgramError, is_own
from launcher.study import NoFinishedTrialError, Study
from proxies.canon import Json
from proxies.spec import RunSpec
from sweeps.ledger import Ledger

if TYPE_CHECKING:
    from launcher.frozen import Decision
    from scaling_fits.table import RunTable
    from scaling_fits.uncertainty import FittedRuns
    from transfer.verdict import Verdict


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Findings:
    """Stage by stage; None where a stage has not ended."""

    coordinates: dict[str, Json]
    searched: Searched | None = None
    transferred: Transferred | None = None
    ladder: tuple[RunSpec, ...] = ()
    table: RunTable | None = None
    fit: FittedRuns | None = None
    choice: Choice | None = None
    verdict: Verdict | None = None
    """For the chosen shape, or, before the choice, for the width the budget suggests."""
    gates: tuple[Gate, ...] = ()
    """All of them, once there is a choice."""


def gather(study: Study, ledger: Ledger) -> Findings:
    """What the ledger's records say, up to the first stage that has not ended."""
    coordinates = {record.key: record.body for record in ledger.records("coordinates")}
    found = Findings(coordinates=coordinates)
    try:
        searched = decide.searched(study, ledger)
        found = Findings(coordinates=coordinates, searched=searched)
        moved = decide.transferred(study, ledger)
        verdict = decide.verdict_at(study, ledger, moved, study.target_width_guess)
        found = Findings(coordinates=coordinates, searched=searched, transferred=moved, verdict=verdict)
        specs = decide.ladder_specs(study, ledger)
        table = decide.ladder_table(specs, ledger.results())
    except (StageMissingError, NoFinishedTrialError):
        return found
    fit = decide.fitted(study, ledger, table)
    fitted = Findings(
        coordinates=coordinates, searched=searched, transferred=moved, verdict=verdict,
        ladder=tuple(specs), table=table, fit=fit,
    )  # fmt: skip
    return _chosen(study, ledger, fitted, moved, fit)


def _chosen(study: Study, ledger: Ledger, found: Findings, moved: Transferred, fit: FittedRuns) -> Findings:
    """The same with choice, verdict at the chosen width, and gates; as it is where the fit identifies nothing."""
    from scaling_fits.law import CannotTellError

    try:
        choice = decide.choose(study, fit)
    except CannotTellError:
        return found
    verdict = decide.verdict_at(study, ledger, moved, choice.shape.width)
    outcomes = [ledger.results()[spec.id] for spec in found.ladder]
    lost = [outcome for outcome in outcomes if outcome.loss_nats is None]
    closed = gates(study, found.coordinates, verdict, fit, choice, lost)
    return dataclasses.replace(found, transferred=moved, fit=fit, choice=choice, verdict=verdict, gates=closed)


def decision_of(study: Study, found: Findings) -> Decision:
    """The decision that the findings make.

    Raises:
        StageMissingError: something is still to run.
        OwnProgramError: it is not one of our models that trains.
        CannotTellError: all has run, and the ladder fits no law.
    """
    if found.fit is not None and found.choice is None:
        from scaling_fits.law import CannotTellError

        raise CannotTellError(found.fit.warnings)
    if found.searched is None or found.transferred is None or found.choice is None:
        raise StageMissingError("the study has not ended: `forerun run PLAN` continues it")
    if is_own(study):
        raise OwnProgramError(study)
    return decide.decision(study, found.searched.best, found.transferred.learning_rate, found.choice)
