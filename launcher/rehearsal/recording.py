"""What a rank really trained with: the windows it drew, and the rates its optimizer held, one line an update.

A line of `consumed-RANK.jsonl`: the `step` (updates made before it), `rows` [source, window, sha256 of its ids], and
`rates`, each group's live learning rate.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launcher.trainer.hooks import Hook, Seen
from launcher.trainer.training import Trainer
from proxies.core import canon
from proxies.core.canon import Json
from proxies.data.tokens import TokenStore

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

    def after_update(self, seen: Seen) -> dict[str, Json]:
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
