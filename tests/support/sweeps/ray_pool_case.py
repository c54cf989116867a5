"""A helper that drives runs on a pool and returns their results."""

from sweep_fakes import (
    get_bank_key,
)

from forerun._sweeps.run.driver import drive
from forerun._sweeps.search.source import StaticSource
from forerun._sweeps.store.ledger import Ledger


def run_all(study, pool, specs, **kwargs):
    """Drive runs on a pool; return their results and the driver's progress events."""
    events = []
    with Ledger.open(study, {}, create=True) as ledger:
        drive(
            StaticSource(specs, get_bank_key),
            pool,
            ledger,
            study,
            bank_key_for=get_bank_key,
            progress=events.append,
            **kwargs,
        )
        return dict(ledger.get_results()), events
