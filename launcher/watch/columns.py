"""A run's metrics as arrays over its logged steps: what every statistic of the watch reads, wherever it came from.

What a source does not have is NaN, or None where it never had it. Columns are named as in `launcher.metrics`.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from launcher.metrics import Header
from proxies import canon

Floats = NDArray[np.float64]

SCALARS = ("grad_norm", "lr", "tokens", "tokens_per_second", "seconds", "mfu", "hfu", "clip_norm")
LAYER_COLUMNS = ("weight_rms", "param_norm", "grad_norm", "update_ratio")
GPU_COLUMNS = ("temperature_celsius", "num_ecc_errors", "num_link_errors")


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Columns:
    """One run so far. S logged steps, ascending and each once; R ranks."""

    steps: Floats
    """[S] Steps done, whole numbers."""
    train_loss_nats: Floats
    """[S]"""
    grad_norm: Floats
    """[S] Before clipping."""
    lr: Floats
    tokens: Floats
    """[S] Seen so far."""
    tokens_per_second: Floats
    seconds: Floats
    """[S] Of that step."""
    mfu: Floats
    hfu: Floats
    clip_norm: Floats
    validation_steps: Floats
    """[V]"""
    validation_loss_nats: Floats
    """[V] After the update of that step."""
    rank_seconds: Floats | None = None
    """[S, R] Compute time of each rank, before it waits for the others."""
    layer_steps: Floats = field(default_factory=lambda: np.empty(0))
    """[L] Steps whose lines have `layers`."""
    layers: Mapping[str, Mapping[str, Floats]] = field(default_factory=dict)
    """Layer -> column of `LAYER_COLUMNS` -> [L]."""
    gpu_steps: Floats = field(default_factory=lambda: np.empty(0))
    """[G] Steps whose lines have `gpus`."""
    gpus: Mapping[str, Floats] = field(default_factory=dict)
    """Column of `GPU_COLUMNS` -> [G, R]."""
    events: Sequence[Mapping[str, canon.Json]] = ()
    """The lines that are no steps, in the order they came, as dicts of `launcher.metrics`."""
    header: Header | None = None
    """Of the newest attempt."""
    newest_at: float | None = None
    """When the newest line was written, in seconds since 1970; None where the source does not say."""

    def __len__(self) -> int:
        """Logged steps."""
        return len(self.steps)

    @property
    def step(self) -> int:
        """The newest logged step; 0 before the first."""
        return int(self.steps[-1]) if len(self.steps) else 0


def from_lines(lines: Iterable[Mapping[str, canon.Json]], newest_at: float | None = None) -> Columns:
    """The columns of a run's lines. Of two lines of one step the later counts: a run that went back writes it anew.

    A value that is no number is NaN; a line with neither a whole `step` and a `train_loss_nats` nor an `event` is left
    out. Whoever wants to tell people of such lines looks for them before (`launcher.watch.readings`).
    """
    by_step: dict[int, Mapping[str, canon.Json]] = {}
    events: list[Mapping[str, canon.Json]] = []
    for line in lines:
        step = line.get("step")
        if "event" in line:
            events.append(line)
        elif "train_loss_nats" in line and isinstance(step, int) and not isinstance(step, bool):
            by_step[step] = line
    steps = sorted(by_step)
    rows = [by_step[step] for step in steps]
    at = np.array(steps, dtype=np.float64)
    validation = _column(rows, "validation_loss_nats")
    layered = [
        (step, found) for step, row in zip(steps, rows, strict=True) if isinstance(found := row.get("layers"), dict)
    ]
    with_gpus = [
        (step, found) for step, row in zip(steps, rows, strict=True) if isinstance(found := row.get("gpus"), list)
    ]
    return Columns(
        steps=at,
        train_loss_nats=_column(rows, "train_loss_nats"),
        **{name: _column(rows, name) for name in SCALARS},
        validation_steps=at[np.isfinite(validation)],
        validation_loss_nats=validation[np.isfinite(validation)],
        rank_seconds=_wide([row.get("rank_seconds") for row in rows]),
        layer_steps=np.array([step for step, _ in layered], dtype=np.float64),
        layers=_layers([found for _, found in layered]),
        gpu_steps=np.array([step for step, _ in with_gpus], dtype=np.float64),
        gpus=_gpus([found for _, found in with_gpus]),
        events=tuple(events),
        header=_newest_header(events),
        newest_at=newest_at,
    )


def number(value: canon.Json) -> float:
    """The number, or NaN."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else float("nan")


def headers(events: Iterable[Mapping[str, canon.Json]]) -> list[Header]:
    """One an attempt, in order; one that this version cannot read is left out."""
    found = []
    for event in events:
        if event.get("event") != "started":
            continue
        try:
            header = canon.decode(Header, dict(event))
            datetime.datetime.fromisoformat(header.started_at)
            found.append(header)
        except ValueError:
            continue
    return found


def _newest_header(events: Iterable[Mapping[str, canon.Json]]) -> Header | None:
    found = headers(events)
    return found[-1] if found else None


def _column(rows: Sequence[Mapping[str, canon.Json]], name: str) -> Floats:
    return np.array([number(row.get(name)) for row in rows], dtype=np.float64)


def _wide(lists: Sequence[canon.Json]) -> Floats | None:
    """[S, R], R the longest list; None where there is no list."""
    num_ranks = max((len(row) for row in lists if isinstance(row, list)), default=0)
    if not num_ranks:
        return None
    table = np.full((len(lists), num_ranks), np.nan)
    for i, row in enumerate(lists):
        if isinstance(row, list):
            table[i, : len(row)] = [number(value) for value in row]
    return table


def _layers(found: Sequence[Mapping[str, canon.Json]]) -> dict[str, dict[str, Floats]]:
    names = list(dict.fromkeys(name for row in found for name in row))
    return {
        name: {column: np.array([_within(row.get(name), column) for row in found]) for column in LAYER_COLUMNS}
        for name in names
    }


def _gpus(found: Sequence[Sequence[canon.Json]]) -> dict[str, Floats]:
    tables = {column: _wide([[_within(gpu, column) for gpu in row] for row in found]) for column in GPU_COLUMNS}
    return {column: table for column, table in tables.items() if table is not None}


def _within(value: canon.Json, column: str) -> float:
    return number(value.get(column)) if isinstance(value, dict) else float("nan")
