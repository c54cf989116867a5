"""Machines that a replay has shown to compute wrongly, as the ledger has them: records `quarantined`, key: the host."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from proxies.core.spec import RunSpec
from sweeps.store.errors import SweepError
from sweeps.store.sites import HOST

if TYPE_CHECKING:
    from sweeps.store.ledger import Ledger

QUARANTINED = "quarantined"


class HostQuarantined(SweepError):  # noqa: N818
    """Work would go to a machine that computes wrongly."""

    exit_code = 3


def quarantined(ledger: Ledger) -> tuple[str, ...]:
    """Hosts, in the order in which they were found."""
    return tuple(record.key for record in ledger.records(QUARANTINED))


def suspects(ledger: Ledger) -> dict[str, list[RunSpec]]:
    """By quarantined host, the runs that ended there before it was found: their numbers may be anything.

    What it did after that, it did because somebody trusts it again.
    """
    found: dict[str, list[RunSpec]] = {}
    ended = {record.key: record.seq for kind in ("result", "pruned", "imported") for record in ledger.records(kind)}
    for record in ledger.records(QUARANTINED):
        found[record.key] = [
            run.spec
            for run in ledger.runs()
            if run.result.environment.get(HOST) == record.key and ended[run.spec.id] < record.seq
        ]
    return found


def refuse_quarantined(here: str, ledger: Ledger, trusted: Container[str]) -> None:
    """Raise if the only machine there is is quarantined.

    Args:
        here: its name.
        ledger: the study's.
        trusted: hosts that the plan takes back (`cluster.trusted_hosts`).

    Raises:
        HostQuarantined: it is.
    """
    if here in quarantined(ledger) and here not in trusted:
        raise HostQuarantined(
            f"{here} computes wrongly: a replay found it (`forerun status` says which), and nothing runs there any "
            f"more. Run the study on another machine; once this one is mended, `--set 'cluster.trusted_hosts="
            f'["{here}"]\'` takes it back'
        )
