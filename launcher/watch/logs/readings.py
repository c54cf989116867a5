"""A main run's metrics from wherever they are: our `metrics.jsonl`, any trainer's JSONL, W&B, TensorBoard.

A run is read on from look to look; what a look says is what a fresh reading would say. What is odd in a log is told
and is no error; a log that names another config is one.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from launcher.base import metrics
from launcher.base.metrics import Ending, Header
from launcher.base.wandb_calls import fetch_history
from launcher.watch.logs.columns import GPU_COLUMNS, LAYER_COLUMNS, SCALARS, Columns, headers
from launcher.watch.logs.gathering import Gathered, counts_from_zero
from launcher.watch.logs.keys import LOSS, PER_DEVICE, STEP, TIME, TOKENS_PER_SECOND, UNASKED_STEP, VALIDATION, Keys
from launcher.watch.logs.log_files import Files, Portion, Source
from launcher.watch.logs.series import Floats, Series, merged
from proxies.core import canon

LEAST_SECONDS = 30.0
"""Each asking starts a process and takes seconds."""


class OnlineRun:
    """See `launcher.watch.logs.log_files.Source`."""

    def __init__(self, run_path: str, wanted: frozenset[str]) -> None:
        """`run_path` is `entity/project/run`."""
        self._run_path, self._wanted = run_path, wanted
        self._names: set[str] = set()
        self._after, self._asked_at = 0, -LEAST_SECONDS

    def portions(self, *, last: bool) -> Iterator[Portion]:
        """See `Source`; what W&B shows of a run never shrinks.

        Raises:
            DashboardError: it does not answer.
        """
        now = time.monotonic()
        if not last and now - self._asked_at < LEAST_SECONDS:
            return
        rows = fetch_history(self._run_path, self._wanted, self._after)
        self._asked_at, begins = now, self._after == 0
        self._names.update(*rows)
        self._after = rows[-1][UNASKED_STEP] + 1 if rows else self._after
        yield Portion(self._run_path, rows, begins)

    def again(self) -> None:
        """See `Source`."""
        self._after, self._asked_at = 0, -LEAST_SECONDS

    def files(self) -> list[str]:
        """See `Source`."""
        return [self._run_path]

    def there(self) -> set[str]:
        """See `Source`."""
        return set(self._names)

    def notes(self) -> list[str]:
        """See `Source`."""
        return [] if self._names else [f"W&B has logged nothing of {self._run_path} under the names looked for"]

    def newest_at(self) -> float | None:
        """See `Source`: the rows themselves say."""
        return None


def columns_of(parts: Sequence[Gathered], newest_at: float | None = None) -> Columns:
    """The run so far.

    Args:
        parts: one a file, in order.
        newest_at: when the last line was written, in seconds since 1970.
    """
    newest = max((part.lines.steps[part.numbers].max(initial=0.0) for part in parts), default=0.0)
    logged = [part.logged(newest) for part in parts]
    steps, losses = merged(
        (part.lines.steps[there], part.lines.column(LOSS)[there]) for part, there in zip(parts, logged, strict=True)
    )
    only = (parts[0], logged[0]) if len(parts) == 1 else None
    scalars = {name: only[0].lines.column(name)[only[1]] if only else _aligned(steps, parts, name) for name in SCALARS}
    validation_steps, validation = merged(_finite(part, VALIDATION) for part in parts)
    events = tuple(event for part in parts for event in part.events)
    begun = headers(events)
    line_steps = np.unique(np.concatenate([np.empty(0), *(part.lines.steps for part in parts)]))
    rank_steps, rank_seconds = _ranks(parts)
    layers = next((part.layers for part in reversed(parts) if len(part.layers)), Series())
    gpus = next((part.gpus for part in reversed(parts) if len(part.gpus)), Series())
    return Columns(
        steps=steps, train_loss_nats=losses, **scalars, line_steps=line_steps, validation_steps=validation_steps,
        validation_loss_nats=validation, rank_steps=rank_steps, rank_seconds=rank_seconds, layer_steps=layers.steps,
        layers=_layers(layers), gpu_steps=gpus.steps, gpus=_gpus(gpus), events=events,
        header=begun[-1] if begun else None, newest_at=newest_at,
    )  # fmt: skip


def _finite(part: Gathered, name: str) -> tuple[Floats, Floats]:
    values = part.lines.column(name)
    there = np.isfinite(values)
    return part.lines.steps[there], values[there]


def _aligned(steps: Floats, parts: Sequence[Gathered], name: str) -> Floats:
    """[S] A column where it has numbers, else NaN."""
    found, values = merged(_finite(part, name) for part in parts)
    column = np.full(len(steps), np.nan)
    if len(found):
        at = np.minimum(np.searchsorted(found, steps), len(found) - 1)
        column = np.where(found[at] == steps, values[at], np.nan)
    return column


def _ranks(parts: Sequence[Gathered]) -> tuple[Floats, Floats | None]:
    """[K] and [K, R], R the longest list; None where there is no list."""
    times = next((part.ranks for part in reversed(parts) if part.ranks), {})
    if not times:
        return np.empty(0), None
    steps = sorted(times)
    table = np.full((len(steps), max(map(len, times.values()))), np.nan)
    for row, step in enumerate(steps):
        table[row, : len(times[step])] = times[step]
    return np.array(steps, dtype=np.float64), table


def _layers(series: Series) -> dict[str, dict[str, Floats]]:
    return {str(name): {column: series.column((name, column)) for column in LAYER_COLUMNS}
            for name in _owners(series)}  # fmt: skip


def _gpus(series: Series) -> dict[str, Floats]:
    ranks = _owners(series)
    if not ranks:
        return {}
    return {column: np.column_stack([series.column((rank, column)) for rank in ranks]) for column in GPU_COLUMNS}


def _owners(series: Series) -> list[Hashable]:
    """Layers, or devices, in the order in which they came."""
    return list(dict.fromkeys(name[0] for name in series.names if isinstance(name, tuple)))


_SENTENCES = {
    "bad step": "{n} lines have a step that is no whole number, as {first}: they are left out",
    "no step": "{n} lines have a loss and no step: they are left out",
    "beyond": "{n} lines are of steps outside 1 to {top}, as {first}, and are left out: does it count something else, "
    "or is it another run?",
    "again": "{n} steps were logged again, the first is {first}: the last value counts",
    "out of order": "{n} steps came out of order, the first is {first}: they are put in order",
    "no number": "{n} training losses are no numbers, the first at step {first}",
}


def not_finite(parts: Sequence[Gathered]) -> list[int]:
    """Steps whose training loss is given as NaN or infinite."""
    found = [part.lines.steps[(part.numbers) & np.isnan(part.lines.column(LOSS))]
             for part in parts]  # fmt: skip
    return sorted({int(step) for steps in found for step in steps})


def odd_notes(parts: Sequence[Gathered], keys: Keys, names: Mapping[str, str], there: Sequence[str], top: int,
              num_ranks: int) -> list[str]:  # fmt: skip
    """What a reader must know of the log, in sentences; `there`: names in it, `top`: the run's last step."""
    odd, first = Counter[str](), dict[str, object]()
    for part in parts:
        odd += part.odd
        first = {**part.first, **first}
    twice = _twice(parts)
    if len(twice):
        odd["again"] += len(twice)
        first.setdefault("again", int(twice[0]))
    said = [text.format(n=odd[what], first=_short(first[what]), top=top) for what, text in _SENTENCES.items()
            if odd[what]]  # fmt: skip
    if missing := not_finite(parts):
        said.append(f"the training loss is no finite number at {len(missing)} steps, the first is {missing[0]}")
    said += [_missing(column, keys, there) for column in (STEP, LOSS) if there and column not in names]
    num_bare = sum(part.num_bare for part in parts)
    if num_bare and LOSS in names:
        said.append(f"{num_bare} steps have no loss: they are left out")
    absent = [column for column in ("grad_norm", TOKENS_PER_SECOND) if column not in names]
    if absent and LOSS in names:
        said.append(f"it has no {' and no '.join(absent)}: what needs that is not judged")
    speed = names.get(TOKENS_PER_SECOND, "")
    if speed in PER_DEVICE and num_ranks > 1:
        said.append(f"its {speed!r} is of one device: taken {num_ranks} times, for the ranks of the frozen config")
    return said


def _twice(parts: Sequence[Gathered]) -> Floats:
    """Steps whose loss is in more than one file."""
    steps = [part.lines.steps[part.numbers] for part in parts]
    found, counts = np.unique(np.concatenate([np.empty(0), *steps]), return_counts=True)
    return found[counts > 1]


def _missing(column: str, keys: Keys, there: Sequence[str]) -> str:
    option = {STEP: "--step-key", LOSS: "--train-loss-key"}[column]
    held = ", ".join(sorted(there)[:20])
    return f"it has no {column}, looked for as {keys.told(column)}: it holds {held}; name it with {option}"


def _short(value: object) -> str:
    return f"{value!r:.60}"


_EVENT_FIELDS = ("event", "to_step", "skipped_sequences", "wait_seconds", "difference", "noise", "reason", "exit_code")
_OURS = frozenset({*_EVENT_FIELDS, "rank_seconds", "layers", "gpus", *(field.name for field in fields(Header))})
_ONLINE = re.compile(r"(?:https?://[^/]+/)?([\w.-]+)/([\w.-]+)/(?:runs/)?([\w.-]+)/?")
_MOST_PASSES = 8
"""Over one log at one look: its names are chosen anew when it turns out to have better ones."""


class OtherRunError(ValueError):
    """A log that names another config: nothing in it is about this run."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reading:
    """A run so far."""

    columns: Columns
    notes: tuple[str, ...]
    """What is odd about the log, in sentences."""
    not_finite: tuple[int, ...]
    """Steps whose training loss is NaN or infinite."""
    names_digest: bool
    """Whether the log says of which config it is."""
    ending: Ending | None
    """Of the newest attempt, if it came to one that it could write down."""


def source_of(where: str, keys: Keys) -> Source:
    """What a `--metrics` names: a file, a folder, or a run of W&B as `entity/project/run` or by its address.

    Args:
        where: as typed; a path that exists is one, and so is what does not look like a run of W&B.
        keys: the names asked for.
    """
    path, online = Path(where), _ONLINE.fullmatch(where)
    if online and not path.exists() and (where.startswith("http") or not path.parent.is_dir()):
        return OnlineRun("/".join(online.groups()), keys.wanted)
    return Files(path, keys.wanted | _OURS)


class _Part:
    """What is known of one file."""

    def __init__(self) -> None:
        self.gathered: Gathered | None = None
        """None: nothing of it is taken yet."""
        self.there: set[str] = set()
        self.others: list[str] = []
        """Other configs that it names."""
        self.from_zero = False
        self.step: object = None
        """The one last named."""
        self.written_at: float | None = None


class Readings:
    """Follows one run."""

    def __init__(self, source: Source, keys: Keys, digest: str, num_steps: int, num_ranks: int = 1) -> None:
        """`num_steps` and `num_ranks` are those of the frozen config."""
        self._source, self._keys, self._digest = source, keys, digest
        self._num_steps, self._num_ranks = num_steps, num_ranks
        self._parts: dict[str, _Part] = {}
        self._names: dict[str, str] = {}
        self._from_zero = False
        self._hint: tuple[set[str], bool] = (set(), False)
        """What a reading before found: names, and whether steps count from 0."""

    def read(self, *, last: bool = False) -> Reading:
        """The run as it is now; `last`: nobody will read again.

        Raises:
            OtherRunError: a header in the log has another digest.
            OSError: what is there cannot be read.
            DashboardError: W&B was asked online, and did not answer.
        """
        for _ in range(_MOST_PASSES):
            if self._read_on(last=last):
                break
            self._source.again()
        files = self._source.files()
        self._check(files)
        parts = [part.gathered for name in files if (part := self._parts[name]).gathered]
        columns = columns_of(parts, self._newest_at(files))
        names_digest = any(event["event"] == "started" for event in columns.events)
        there = sorted(self._source.there())
        odd = odd_notes(parts, self._keys, self._names, there, self._num_steps, self._num_ranks)
        notes = [*self._source.notes(), *odd]
        if parts and not names_digest:
            notes.append("it does not say of which config it is: it is taken to be of this one")
        return Reading(
            columns=columns, notes=tuple(notes), not_finite=tuple(not_finite(parts)), names_digest=names_digest,
            ending=_ending(columns.events),
        )  # fmt: skip

    def _read_on(self, *, last: bool) -> bool:
        """Take what came; False where all must be taken again, by names that came too late for the rows before."""
        names_before, right = dict(self._names), True
        for portion in self._source.portions(last=last):
            part = self._learned(portion)
            right = right and self._settled()
            if right and portion.rows:
                part.gathered = part.gathered or Gathered(self._keys, self._num_steps, self._num_ranks)
                part.gathered.take(portion.rows, self._names, from_zero=self._from_zero)
        self._parts = {name: self._parts.get(name) or _Part() for name in self._source.files()}
        self._hint, hinted = (set(), False), self._hint
        there = self._there()
        if right and self._settled() and (not hinted[0] or self._keys.chosen(there) == self._keys.chosen(hinted[0])):
            return True
        # Whether steps count from 0 was asked of rows by the names of then.
        zero = self._keys.chosen(there) == names_before and any(part.from_zero for part in self._parts.values())
        self._hint = (there, zero)
        self._parts, self._names, self._from_zero = {}, self._keys.chosen(there), zero
        return False

    def _learned(self, portion: Portion) -> _Part:
        """The file of the portion, with what its rows say of it."""
        if portion.begins or portion.name not in self._parts:
            self._parts[portion.name] = _Part()
        part, rows = self._parts[portion.name], portion.rows
        part.there.update(*rows)
        part.others += [str(row.get("digest")) for row in rows
                        if row.get("event") == "started" and row.get("digest") != self._digest]  # fmt: skip
        zero, part.step = counts_from_zero(rows, self._keys.chosen(self._there()), part.step)
        part.from_zero = part.from_zero or zero
        if rows:
            at = rows[-1].get(TIME)
            part.written_at = at if isinstance(at, int | float) and math.isfinite(at) else None
        return part

    def _there(self) -> set[str]:
        """Names in all files, and those that the reading before found."""
        return {name for part in self._parts.values() for name in part.there} | self._hint[0]

    def _settled(self) -> bool:
        """Choose the names of what is there; False where rows were taken by others.

        A name for a column that had none changes nothing of the rows before: none of them has it.
        """
        names = self._keys.chosen(self._there())
        from_zero = self._hint[1] or any(part.from_zero for part in self._parts.values())
        same = from_zero == self._from_zero and all(
            (names[column], self._factor(column, names)) == (self._names[column], self._factor(column, self._names))
            for column in names.keys() & self._names.keys()
        )
        self._names, self._from_zero = names, from_zero
        return same or not any(part.gathered for part in self._parts.values())

    def _factor(self, column: str, names: Mapping[str, str]) -> float:
        return self._keys.factor(column, names)

    def _newest_at(self, files: Sequence[str]) -> float | None:
        """By the rows' own time where they have one: a file may be a copy."""
        times = [at for name in files if (at := self._parts[name].written_at) is not None]
        return max(times, default=self._source.newest_at())

    def _check(self, files: Sequence[str]) -> None:
        for name in files:
            others = dict.fromkeys(self._parts[name].others)
            if others:
                raise OtherRunError(
                    f"{name} is of the config {', '.join(f'{digest[:16]}...' for digest in others)}, and this one is "
                    f"{self._digest[:16]}...: nothing of it is judged; name this run's own with --metrics"
                )


def _ending(events: Sequence[Mapping[str, Any]]) -> Ending | None:
    """The last event, if it is how an attempt ended."""
    if not events or events[-1]["event"] not in metrics.ENDINGS:
        return None
    names = {field.name for field in fields(Ending)}
    try:
        return canon.decode(Ending, {key: value for key, value in events[-1].items() if key in names})
    except canon.CanonError:
        return None
