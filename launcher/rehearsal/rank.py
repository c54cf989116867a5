"""One rank of a drill: the embedded trainer's own process, with a hook for every fault that is asked for.

torchrun starts it in place of `launcher.trainer`, whose options it takes, and as often as wanted
`--fault KIND:STEP:SUPERVISOR_PID` and `--other NAME=FAULT,...`: another run, in the folder NAME beside this one, that
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
from launcher.rehearsal.faults import Fault, FaultKind, Injector
from launcher.trainer import rank as trainer
from launcher.trainer.training import Trainer
from proxies.data.tokens import TokenStore

MODULE = "launcher.rehearsal.rank"
Others = Mapping[str, Sequence[Fault]]
"""Names of runs, and the faults of each."""


def builder(faults: Sequence[Fault], others: Others = MappingProxyType({})) -> Callable[..., Trainer]:
    """What makes the trainer of a drill, once the others are trained."""

    def build(decision: Decision, store: TokenStore, run_dir: Path, interrupted: Callable[[], bool]) -> Trainer:
        for name, its_faults in others.items():
            folder = run_dir.parent / name
            ending = _trainer(its_faults, decision, store, folder, interrupted).train()
            if dist.get_rank() == 0:
                metrics.write_ending(folder, ending)
        return _trainer(faults, decision, store, run_dir, interrupted)

    return build


def _trainer(
    faults: Sequence[Fault], decision: Decision, store: TokenStore, run_dir: Path, interrupted: Callable[[], bool]
) -> Trainer:
    return Trainer(decision, store, run_dir, interrupted, [*map(Injector, faults)])


def arguments(faults: Sequence[Fault], others: Others = MappingProxyType({})) -> list[str]:
    """The faults and the others as this module's own options."""
    words = [word for fault in faults for word in ("--fault", _word(fault))]
    for name, its_faults in others.items():
        words += ["--other", f"{name}={','.join(map(_word, its_faults))}"]
    return words


def parsed(words: list[str]) -> tuple[list[Fault], dict[str, list[Fault]], list[str]]:
    """The faults and the others of a command line, and the words that are the trainer's."""
    faults: list[Fault] = []
    others: dict[str, list[Fault]] = {}
    rest: list[str] = []
    following = iter(words)
    for word in following:
        if word == "--fault":
            faults.append(_fault(next(following)))
        elif word == "--other":
            name, _, its_faults = next(following).partition("=")
            others[name] = [_fault(fault) for fault in its_faults.split(",") if fault]
        else:
            rest.append(word)
    return faults, others, rest


def _word(fault: Fault) -> str:
    return f"{fault.kind}:{fault.step}:{fault.supervisor_pid}"


def _fault(word: str) -> Fault:
    kind, step, pid = word.split(":")
    if kind not in get_args(FaultKind):
        raise SystemExit(f"--fault {kind}: must be one of {', '.join(get_args(FaultKind))}")
    return Fault(kind=cast(FaultKind, kind), step=int(step), supervisor_pid=int(pid))


def main() -> NoReturn:
    """One rank's process."""
    faults, others, sys.argv[1:] = parsed(sys.argv[1:])
    trainer.main(builder(faults, others))


if __name__ == "__main__":
    main()
