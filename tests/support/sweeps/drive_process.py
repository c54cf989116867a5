"""A driver that runs as its own process, so that tests can kill it.

Usage: `python drive_process.py STUDY DIARY STEP_SECONDS`.
"""

import functools
import signal
import sys
from pathlib import Path

from spaces import SPACE
from sweep_fakes import FakeHostFactory, get_bank_key, make_run

from forerun._sweeps.run.driver import drive
from forerun._sweeps.run.pool import InlinePool
from forerun._sweeps.search.source import Search, SearchSource
from forerun._sweeps.store.ledger import Ledger

NUM_TRIALS = 16


def main(study, diary, step_seconds):
    """Drive a search to its end, or until SIGTERM; return the exit code."""
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    with Ledger.open(study, {"seed": 5}, create=True) as ledger:
        source = SearchSource(
            Search(SPACE, 5, 4, num_startup=6),
            functools.partial(make_run, num_steps=6),
            ledger,
            stage="sweep",
            num_trials=NUM_TRIALS,
        )
        drive(
            source,
            InlinePool(FakeHostFactory(str(diary), step_seconds=step_seconds)),
            ledger,
            study,
            bank_key_for=get_bank_key,
            should_stop=lambda: bool(stop),
        )
    return 130 if stop else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])))
