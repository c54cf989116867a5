"""Fault injection from outside: hooks that do to a run what machines do and what a wrong trainer would, and record it.

`launcher.trainer.training` knows nothing of them. A fault of machines happens once: where it struck is written into the
run's folder, and the attempt after it runs through. What a rank really trained with is in `consumed-RANK.jsonl`, a line
an update: the `step` (updates made before it), `rows` [place, source, window, sha256 of its ids], and `rates`, each
group's live learning rate.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from launcher.frozen.frozen import Decision
from launcher.rehearsal.registry import FULL_DISK_BYTES
from launcher.trainer.hooks import GoBack, Hook, StepInfo
from launcher.trainer.training import Trainer
from proxies.core import canon
from proxies.core.canon import Json
from proxies.data.tokens import TokenStore

FaultKind = Literal[
    "kill", "hang", "nan", "spike", "disk_full", "sigterm", "other_seed", "drop_moments", "shift_batch", "keep_data",
]  # fmt: skip
SIGNAL_SECONDS = 30.0
SPIKE_NATS, BELOW_CEILING_NATS = 0.75, 0.25
"""What a spike's loss is above a uniform guess's, and at least below the run's own ceiling, which would end it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault, and where it strikes."""

    kind: FaultKind
    step: int = 0
    """Updates made before it strikes; of a wrong resume: the fewest updates made before the resume that goes wrong."""
    supervisor_pid: int = 0
    """Whom `sigterm` tells, as a scheduler would."""


class Injector(Hook):
    """One fault in one rank's run."""

    def __init__(self, fault: Fault) -> None:
        self._fault, self._step, self._armed = fault, 0, False

    def begin(self, run: Trainer, step: int, carried: Json) -> None:
        """Put a wrong resume's fault in; arm the others."""
        self._run, self._step = run, step
        kind, store = self._fault.kind, run.store
        assert isinstance(store, RecordedStore)
        if kind in ("nan", "spike") and not self._armed:  # a run that went back begins again
            run.model.register_forward_hook(self._poisoned if kind == "nan" else self._lifted)
            self._armed = True
        if kind == "keep_data":
            run.rollbacks = tuple(dataclasses.replace(back, skipped_sequences=0) for back in run.rollbacks)
        if not step or step < self._fault.step:
            return
        if kind == "other_seed":
            store.seed_shift = 1
        elif kind == "shift_batch":
            store.sequence_shift = run.decision.batch_tokens // run.decision.shape.seq_len
        elif kind == "drop_moments":
            run.optimizer.state.clear()

    def before_update(self, seen: StepInfo) -> GoBack | None:
        """Strike between the gradients of a step and its update."""
        if seen.step == self._fault.step and self._fault.kind in ("kill", "hang", "sigterm", "disk_full"):
            self._strike()
        return None

    def after_update(self, seen: StepInfo) -> dict[str, Json]:
        """Count."""
        self._step = seen.step + 1
        return {}

    def _strike(self) -> None:
        kind, rank = self._fault.kind, self._run.rank
        if kind == "disk_full":  # a full disk is every rank's of the machine
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, hard))
        elif kind == "sigterm":
            if self._once(rank == 0):
                os.kill(self._fault.supervisor_pid, signal.SIGTERM)
                self._wait_for_signal()
        elif self._once(rank == self._run.num_ranks - 1):
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(1.0)

    def _once(self, mine: bool) -> bool:
        """Whether this rank is to strike, and has not."""
        if not mine:
            return False
        mark = fired(self._run.run_dir, self._fault.kind)
        if mark.exists():
            return False
        mark.write_text(str(os.getpid()))
        return True

    def _wait_for_signal(self) -> None:
        """Some steps of a small model would pass before the supervisor has told its ranks."""
        until = time.monotonic() + SIGNAL_SECONDS
        while not self._run.interrupted() and time.monotonic() < until:
            time.sleep(0.01)

    def _poisoned(self, module: nn.Module, inputs: tuple[object, ...], output: Tensor) -> Tensor:
        return output * torch.nan if torch.is_grad_enabled() and self._step == self._fault.step else output

    def _lifted(self, module: nn.Module, inputs: tuple[object, ...], output: Tensor) -> Tensor:
        """On the spike's data, and nowhere else: a sure guess at one token, as loud as gives the spike's loss."""
        run, schedule = self._run, self._run.decision.learning_rate.schedule
        batch = run.decision.batch_tokens // run.decision.shape.seq_len
        first, after = (
            schedule.sequences(step, batch)[0]
            for step in (self._fault.step, self._fault.step + run.decision.spikes.patience_steps)
        )
        if not (torch.is_grad_enabled() and first <= run.first_sequence(self._step) < after):
            return output
        vocab_size = output.shape[-1]
        others = torch.zeros(vocab_size - 1, device=output.device, dtype=output.dtype)
        return output * 0 + torch.cat((others.new_full((1,), loudness(run.decision)), others))


def spike_nats(decision: Decision) -> float:
    """The training loss of a spike's step."""
    return min(
        math.log(decision.shape.vocab_size) + SPIKE_NATS, decision.abort.train_loss_above_nats - BELOW_CEILING_NATS
    )


def loudness(decision: Decision) -> float:
    """The logit of a token that does not come, all others' being 0, with which the loss is the spike's."""
    return math.log(max(math.exp(spike_nats(decision)) - decision.shape.vocab_size + 1, 1.0))


def fired(run_dir: Path, kind: FaultKind) -> Path:
    """The file that says that a fault was there."""
    return run_dir / f"struck-{kind}"


Drawn = tuple[int, int, str]
"""A source's number, a window's, and the hash of its ids."""


class RecordedStore(TokenStore):
    """A store that remembers what was drawn of it since the last update; and where asked, draws wrongly."""

    def __init__(self, store: TokenStore) -> None:
        self.__dict__.update(store.__dict__)  # the same maps: they were verified when it was opened
        self.drawn: dict[int, Drawn] = {}
        """By place in the run's data."""
        self.seed_shift = self.sequence_shift = 0

    def train_batch(self, *, seed: int, first_sequence: int, num_sequences: int, seq_len: int) -> NDArray[np.int64]:
        """As of any store."""
        seed, first = seed + self.seed_shift, first_sequence + self.sequence_shift
        batch_BT = super().train_batch(seed=seed, first_sequence=first, num_sequences=num_sequences, seq_len=seq_len)
        source_B, index_B = self._mixture.draw(first, num_sequences)
        windows = self._windows("train", seq_len)
        for row, (source, index) in enumerate(zip(source_B.tolist(), index_B.tolist(), strict=True)):
            window = int(windows[source].shuffled(np.array([index]), seed)[0])
            self.drawn[first_sequence + row] = (source, window, sha_of(batch_BT[row]))
        return batch_BT


class Recorder(Hook):
    """Writes a line after every update, each rank its own."""

    def begin(self, run: Trainer, step: int, carried: Json) -> None:
        """Forget what an attempt before this one drew and did not use."""
        assert isinstance(run.store, RecordedStore)
        self._run, self._store = run, run.store
        self._store.drawn.clear()

    def after_update(self, seen: StepInfo) -> dict[str, Json]:
        """The update is made: its windows are used up."""
        rates: list[Json] = [float(group["lr"]) for group in self._run.optimizer.param_groups]
        rows: list[Json] = [[place, *drawn] for place, drawn in sorted(self._store.drawn.items())]
        line = {"step": seen.step, "rows": rows, "rates": rates}
        with consumed_file(self._run.run_dir, self._run.rank).open("a", encoding="utf-8") as file:
            file.write(canon.canonical(line) + "\n")
        self._store.drawn.clear()
        return {}


def sha_of(ids_T: NDArray[np.integer]) -> str:
    """Of a window's ids, whatever integers they are kept in."""
    return hashlib.sha256(ids_T.astype("<i8").tobytes()).hexdigest()


def consumed_file(run_dir: Path, rank: int) -> Path:
    """Where a rank writes it."""
    return run_dir / f"consumed-{rank}.jsonl"


def consumed(run_dir: Path) -> dict[int, dict[int, Drawn]]:
    """Step -> place in the data -> what was drawn there, all ranks and attempts; of a step made anew, the last time."""
    found: dict[int, dict[int, Drawn]] = {}
    for file in sorted(run_dir.glob("consumed-*.jsonl")):
        of_rank = {}
        for line in file.read_bytes().splitlines():
            value = json.loads(line)
            of_rank[int(value["step"])] = value["rows"]
        for step, rows in of_rank.items():
            found.setdefault(step, {}).update({place: (source, window, sha) for place, source, window, sha in rows})
    return found


def live_rates(run_dir: Path) -> dict[int, list[float]]:
    """Step -> each group's learning rate in that update, as rank 0's optimizer held it."""
    lines = map(json.loads, consumed_file(run_dir, 0).read_bytes().splitlines())
    return {int(line["step"]): [float(rate) for rate in line["rates"]] for line in lines}
