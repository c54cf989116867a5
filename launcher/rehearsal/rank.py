"""One rank of a drill: the embedded trainer's own process, with hooks that record it and, where asked, a fault.

torchrun starts it in place of `launcher.trainer`, whose options it takes, and `--plant FAULT:STEP:SUPERVISOR_PID` as
often as wanted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, cast, get_args

from launcher import trainer
from launcher.frozen import Decision
from launcher.rehearsal.plants import Fault, Plant, Planted
from launcher.rehearsal.recording import RecordedStore, Recorder
from launcher.training import Trainer
from proxies.data.tokens import TokenStore

MODULE = "launcher.rehearsal.rank"


def builder(plants: Sequence[Plant]) -> Callable[..., Trainer]:
    """What makes the trainer of a drill."""

    def build(decision: Decision, store: TokenStore, run_dir: Path, interrupted: Callable[[], bool]) -> Trainer:
        # The recorder last: it writes down what was left standing by the faults before it.
        hooks = (*map(Planted, plants), Recorder())
        return Trainer(decision, RecordedStore(store), run_dir, interrupted, hooks)

    return build


def arguments(plants: Sequence[Plant]) -> list[str]:
    """The plants as this module's own options."""
    return [word for plant in plants for word in ("--plant", f"{plant.fault}:{plant.step}:{plant.supervisor_pid}")]


def planted(words: list[str]) -> tuple[list[Plant], list[str]]:
    """The plants of a command line, and the words that are the trainer's."""
    plants, others, rest = [], [], iter(words)
    for word in rest:
        if word != "--plant":
            others.append(word)
            continue
        fault, step, pid = next(rest).split(":")
        if fault not in get_args(Fault):
            raise SystemExit(f"--plant {fault}: one of {', '.join(get_args(Fault))} is wanted")
        plants.append(Plant(fault=cast(Fault, fault), step=int(step), supervisor_pid=int(pid)))
    return plants, others


def main() -> NoReturn:
    """One rank's process."""
    plants, sys.argv[1:] = planted(sys.argv[1:])
    trainer.main(builder(plants))


if __name__ == "__main__":
    main()
