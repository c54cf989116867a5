"""One rank of a drill: the embedded trainer's own process, with hooks that record it and, where asked, a fault.

torchrun starts it in place of `launcher.trainer`, whose options it takes, and as often as wanted
`--plant FAULT:STEP:SUPERVISOR_PID` and `--other NAME=PLANT,...`: another run, in the folder NAME beside this one, that
is trained to its end first, in the same processes. A start takes longer than such a run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, cast, get_args

import torch.distributed as dist

from launcher.base import metrics
from launcher.frozen.frozen import Decision
from launcher.rehearsal.plants import Fault, Plant, Planted
from launcher.rehearsal.recording import RecordedStore, Recorder
from launcher.trainer import rank as trainer
from launcher.trainer.training import Trainer
from proxies.data.tokens import TokenStore

MODULE = "launcher.rehearsal.rank"
Others = Mapping[str, Sequence[Plant]]
"""Names of runs, and what is planted in each."""


def builder(plants: Sequence[Plant], others: Others = MappingProxyType({})) -> Callable[..., Trainer]:
    """What makes the trainer of a drill, once the others are trained."""

    def build(decision: Decision, store: TokenStore, run_dir: Path, interrupted: Callable[[], bool]) -> Trainer:
        for name, faults in others.items():
            folder = run_dir.parent / name
            ending = _trainer(faults, decision, store, folder, interrupted).train()
            if dist.get_rank() == 0:
                metrics.write_ending(folder, ending)
        return _trainer(plants, decision, store, run_dir, interrupted)

    return build


def _trainer(
    plants: Sequence[Plant], decision: Decision, store: TokenStore, run_dir: Path, interrupted: Callable[[], bool]
) -> Trainer:
    # The recorder last: it writes down what was left standing by the faults before it.
    return Trainer(decision, RecordedStore(store), run_dir, interrupted, (*map(Planted, plants), Recorder()))


def arguments(plants: Sequence[Plant], others: Others = MappingProxyType({})) -> list[str]:
    """The plants and the others as this module's own options."""
    words = [word for plant in plants for word in ("--plant", _word(plant))]
    for name, faults in others.items():
        words += ["--other", f"{name}={','.join(map(_word, faults))}"]
    return words


def planted(words: list[str]) -> tuple[list[Plant], dict[str, list[Plant]], list[str]]:
    """The plants and the others of a command line, and the words that are the trainer's."""
    plants: list[Plant] = []
    others: dict[str, list[Plant]] = {}
    rest: list[str] = []
    following = iter(words)
    for word in following:
        if word == "--plant":
            plants.append(_plant(next(following)))
        elif word == "--other":
            name, _, faults = next(following).partition("=")
            others[name] = [_plant(fault) for fault in faults.split(",") if fault]
        else:
            rest.append(word)
    return plants, others, rest


def _word(plant: Plant) -> str:
    return f"{plant.fault}:{plant.step}:{plant.supervisor_pid}"


def _plant(word: str) -> Plant:
    fault, step, pid = word.split(":")
    if fault not in get_args(Fault):
        raise SystemExit(f"--plant {fault}: one of {', '.join(get_args(Fault))} is wanted")
    return Plant(fault=cast(Fault, fault), step=int(step), supervisor_pid=int(pid))


def main() -> NoReturn:
    """One rank's process."""
    plants, others, sys.argv[1:] = planted(sys.argv[1:])
    trainer.main(builder(plants, others))


if __name__ == "__main__":
    main()
