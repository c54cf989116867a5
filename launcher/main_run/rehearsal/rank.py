"""The process of one rank in a drill: the embedded trainer's own, with injected faults.

torchrun starts this module in place of `forerun._launcher.main_run.trainer`, with the same options
and any number of `--fault KIND:STEP:SUPERVISOR_PID`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

if __name__ == "__main__":  # before torch is loaded, which takes seconds
    from forerun._launcher.main_run.process_signals import die_with_job

    die_with_job()

from forerun._launcher.main_run.rehearsal.faults import Fault, FaultInjector
from forerun._launcher.main_run.trainer import rank
from forerun._launcher.main_run.trainer.training import Trainer

MODULE = "forerun._launcher.main_run.rehearsal.rank"


def make_trainer_builder(faults: Sequence[Fault]) -> Callable[..., Trainer]:
    """Return the function that builds the trainer of a drill, with its faults as callbacks."""
    return partial(Trainer, callbacks=[*map(FaultInjector, faults)])


def format_fault_options(faults: Sequence[Fault]) -> list[str]:
    """Return the options of this module for faults."""
    return [word for fault in faults for word in ("--fault", fault.to_text())]


def parse_faults(words: list[str]) -> tuple[list[Fault], list[str]]:
    """Return the faults of a command line, and the words that are the trainer's options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--fault", action="append", default=[], type=Fault.from_text)
    options, trainer_words = parser.parse_known_args(words)
    return options.fault, trainer_words


def main() -> NoReturn:
    """Run this rank's process."""
    faults, sys.argv[1:] = parse_faults(sys.argv[1:])
    rank.main(make_trainer_builder(faults))


if __name__ == "__main__":
    main()
