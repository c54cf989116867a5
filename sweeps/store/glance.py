"""A glance at a ledger: what ended and what it took, with no run built and the chain checked at its end alone.

`Ledger.read` hashes every record and builds every run. Whoever only counts, as `status --brief`, or only adds to a
logbook, need not wait for that: the last records are verified up to the head, those before are counted as they stand,
and whoever shows it says so.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

from proxies.core.spec import Status
from sweeps.store import chain
from sweeps.store.chain import Record
from sweeps.store.errors import LedgerCorrupt
from sweeps.store.ledger import DRIVEN, IMPORTED, OUTCOMES, Ledger, reading, refuse_unplanned

STATUSES: tuple[str, ...] = get_args(Status)
MOST_CHECKED = 1000
"""Records at the chain's end: 0.02 s of CPU (measured, one core of a cloud machine)."""
_LOST = "lost"
_PATHS = (
    "$.result.status", "$.spec.shape.width", "$.spec.shape.num_layers", "$.result.num_steps",
    "$.spec.hparams.learning_rate", "$.result.flops", "$.result.loss_nats",
)  # fmt: skip


class Outcome(NamedTuple):
    """What a glance takes of an outcome's record; a tuple, as there may be tens of thousands."""

    run_id: str
    imported: bool
    status: str
    width: int
    num_layers: int
    num_steps: int
    learning_rate: float
    flops: float
    loss_nats: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """How much of a chain was verified."""

    num_records: int
    num_checked: int
    """At the chain's end, up to its head."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Glance:
    """A study's outcomes and costs as recorded."""

    checked: Checked
    outcomes: tuple[Outcome, ...]
    """In the order of commitment; a pruned run may be there twice."""
    num_lost: int
    """Executions."""
    driven: tuple[Record, ...]
    """Those of how long drivers worked."""

    @classmethod
    def of(cls, ledger: Ledger) -> Glance:
        """The same of a ledger that was read, and so verified, whole."""
        records = ledger.records()
        kinds = (record.kind for record in records if record.kind in OUTCOMES)
        return cls(
            checked=Checked(num_records=len(records), num_checked=len(records)),
            outcomes=tuple(
                Outcome(
                    run.spec.id, kind == IMPORTED, run.result.status, run.spec.shape.width, run.spec.shape.num_layers,
                    run.result.num_steps, run.spec.hparams.learning_rate, run.result.flops, run.result.loss_nats,
                )
                for kind, run in zip(kinds, ledger.runs(), strict=True)
            ),
            num_lost=len(ledger.records(_LOST)),
            driven=ledger.records(DRIVEN),
        )  # fmt: skip

    @classmethod
    def at(cls, study_dir: Path) -> Glance:
        """The study's ledger as it is now; raises as `Ledger.read`, of what is looked at."""
        with reading(study_dir) as connection, chain.looking(connection, MOST_CHECKED) as (num, num_checked):
            refuse_unplanned(study_dir, num)
            rows = chain.picked(connection, (*OUTCOMES, DRIVEN, _LOST), _PATHS)
            return cls(
                checked=Checked(num_records=num, num_checked=num_checked),
                outcomes=tuple(_outcome(*row) for row in rows if row[1] in OUTCOMES),
                num_lost=sum(kind == _LOST for _, kind, _, _ in rows),
                driven=tuple(chain.proven(connection, seq) for seq, kind, _, _ in rows if kind == DRIVEN),
            )


def check_end(study_dir: Path) -> Checked:
    """Verify the end of a study's chain, and take in nothing. Raises as `Ledger.read`."""
    with reading(study_dir) as connection, chain.looking(connection, MOST_CHECKED) as (num, num_checked):
        return Checked(num_records=num, num_checked=num_checked)


def _outcome(seq: int, kind: str, key: str, text: str) -> Outcome:
    """An outcome from what a record has at `_PATHS`, if these are of their types: its hash was not looked at."""
    status, width, num_layers, num_steps, learning_rate, flops, loss_nats = json.loads(text)
    numbers = (learning_rate, flops, 0.0 if loss_nats is None else loss_nats)
    fits = type(key) is str and status in STATUSES and type(width) is type(num_layers) is type(num_steps) is int
    if not fits or not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        raise LedgerCorrupt(f"record {seq} is no result of a run ({text[:200]})")
    return Outcome(key, kind == IMPORTED, status, width, num_layers, num_steps, learning_rate, flops, loss_nats)
