"""The report as pydantic models. `report.json` is `Report` as JSON.

The terminal, the page, the figures, and the records for W&B are made from the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from forerun._launcher.report.views.finding import Finding, Number
from forerun._launcher.report.views.fit_findings import (
    Choice,
    Fit,
    FrontierPoint,
    Ladder,
    NoiseScale,
    Wider,
)
from forerun._launcher.report.views.search_findings import Search
from forerun._launcher.report.views.transfer_findings import Transfer
from forerun._launcher.study.experiments.coordinate_record import RecordedCheck
from forerun._launcher.study.stages.gates import Gate


class CurvePoint(Finding):
    """Expected training loss at a step of the main run, with its band."""

    step: int
    loss_nats: Number
    low_nats: Number
    high_nats: Number


class PredictedLoss(Finding):
    """The forecast that a frozen config carries."""

    loss_nats: Number
    low_nats: Number
    high_nats: Number
    curve: list[CurvePoint]

    def locate_loss(self, loss_nats: float) -> str:
        """Return whether a measured loss is `inside` or `outside` the predicted interval."""
        return "inside" if self.low_nats <= loss_nats <= self.high_nats else "outside"


class Decision(Finding):
    """The decision of the frozen config. Its forecast is declared; other keys are kept."""

    predicted: PredictedLoss


class MainRun(Finding):
    """The main run so far."""

    steps: list[int]
    train_loss_nats: list[Number]
    validation_loss_nats: Number | None
    event: str | None
    """Event that ended it; None while it runs."""


class Calibration(Finding):
    """The measured choice of how runs of one size are executed."""

    part: str
    width: int
    num_layers: int = 0
    batch_tokens: int = 0
    mode: str
    """The chosen mode in words."""
    why: str = ""
    """Reason for the choice."""
    trial_steps_per_second: Number | None = None
    planned_seconds: Number | None = None
    """Time that the planned runs would take, in seconds."""
    device: str = ""
    num_workers: int = 0
    numerics: dict[str, Any] | None = None
    """The mode as `forerun._proxies.core.spec.Numerics`, as JSON."""
    measurements: list[dict[str, Any]] = Field(alias="figures")
    """Measurements of every mode (`ModeTiming` of `calibration_records`), as JSON; empty if the
    choice was not measured."""


class Corpus(Finding):
    """The data of the study."""

    data_id: str
    tokenizer: str
    vocab_size: int
    num_documents: int
    num_train_tokens: int
    num_validation_tokens: int


class UserRun(Finding):
    """The command of the main run, if the user's own trainer trains it."""

    kind: str = "command"
    line: str
    """Command line of the trainer."""


class Spend(Finding):
    """The cost of the study's runs."""

    num_runs: int
    num_imported: int
    by_status: dict[str, int]
    """Number of runs by status."""
    flops_causal: Number
    worker_seconds: Number
    share_of_target: Number
    """Share of the main run's FLOPs."""


class Report(Finding):
    """Everything that a study has found. A section is None until its stage has ended."""

    schema_version: int = 1
    question: dict[str, Any]
    """The plan, without the keys that only set where and how fast to run."""
    corpus: Corpus
    progress: dict[str, tuple[int, int] | None]
    """Finished and planned runs by stage."""
    calibration: list[Calibration]
    coordinates: dict[str, RecordedCheck]
    """Coordinate checks by name, as the ledger records them."""
    wider: Wider | None = None
    search: Search | None
    transfer: Transfer | None
    ladder: Ladder | None
    fit: Fit | None
    frontier: list[FrontierPoint] | None
    choice: Choice | None
    noise_scale: NoiseScale | None = None
    gates: list[Gate]
    accepted: dict[str, str]
    """Reasons by the names of accepted gates."""
    decision: Decision | None
    digest: str | None
    user_run: UserRun | None = Field(alias="own_run")
    """Command that the user runs; None with the embedded trainer, or before there is a choice."""
    spend: Spend
    ledger_head: str
    main_run: MainRun | None = None
    """Progress and end of the main run, by whichever trainer; None before its launch."""
    has_logbook: bool = False

    @property
    def open_gates(self) -> list[Gate]:
        """Gates that did not pass and that nobody accepted."""
        return [
            gate
            for gate in self.gates
            if gate.outcome != "passed" and gate.name not in self.accepted
        ]

    @property
    def accepted_failures(self) -> list[str]:
        """Names of gates that failed and were accepted."""
        return [
            gate.name
            for gate in self.gates
            if gate.outcome == "failed" and gate.name in self.accepted
        ]

    @property
    def main_arm(self) -> str:
        """The study's own parametrization, as in the runs of a transfer test."""
        return str(self.question["proxy"]["parametrization"])

    @property
    def measured_loss(self) -> float | None:
        """Final validation loss of the main run; None before it has finished."""
        run = self.main_run
        return run.validation_loss_nats if run is not None and run.event == "finished" else None


AnyReport = Mapping[str, Any] | Report
"""A report as findings, or the content of a `report.json`."""


def to_report(body: AnyReport) -> Report:
    """Return a report as findings.

    Args:
        body: Content of `report.json`, or a report, which is returned as it is.

    Raises:
        ValueError: The content is not that of a report.
    """
    return body if isinstance(body, Report) else Report.model_validate(body)
