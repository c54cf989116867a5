"""One rank of a drill: the embedded trainer's own process, with a hook for every fault that is
asked for.

torchrun starts it in place of `launcher.trainer`, whose options it takes, and as often as wanted
`--fault KIND:STEP:SUPERVISOR_PID`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, cast

if __name__ == "__main__":  # before torch is loaded, which takes seconds
    from launcher.base.signals import die_with_job

    die_with_job()

from launcher.frozen.frozen import Decision
from launcher.rehearsal.faults import Fault, FaultInjector, FaultKind
from launcher.trainer import rank as trainer
from launcher.trainer.training import Trainer
from proxies.data.tokens import TokenStore

MODULE = "launcher.rehearsal.rank"


def builder(faults: Sequence[Fault]) -> Callable[..., Trainer]:
    """What makes the trainer of a drill."""

    def build(
        decision: Decision,
        store: TokenStore,
        run_dir: Path,
        interrupted: Callable[[], bool],
        **places: Path | None,
    ) -> Trainer:
        return Trainer(
            decision, store, run_dir, interrupted, [*map(FaultInjector, faults)], **places
        )

    return build


def arguments(faults: Sequence[Fault]) -> list[str]:
    """The faults as this module's own options."""
    return [
        word
        for each in faults
        for word in ("--fault", f"{each.kind}:{each.step}:{each.supervisor_pid}")
    ]


def parsed(words: list[str]) -> tuple[list[Fault], list[str]]:
    """The faults of a command line, and the words that are the trainer's."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--fault", action="append", default=[])
    found, rest = parser.parse_known_args(words)
    parts = (word.split(":") for word in found.fault)
    return [
        Fault(kind=cast(FaultKind, kind), step=int(step), supervisor_pid=int(pid))
        for kind, step, pid in parts
    ], rest


def main() -> NoReturn:
    """One rank's process."""
    faults, sys.argv[1:] = parsed(sys.argv[1:])
    trainer.main(builder(faults))


if __name__ == "__main__":
    main()
