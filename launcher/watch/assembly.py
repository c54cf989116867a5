"""What was gathered from the files of a run, as its columns. Of two files that log one step the later counts."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from launcher.watch.columns import GPU_COLUMNS, LAYER_COLUMNS, SCALARS, Columns, headers
from launcher.watch.gathering import Gathered
from launcher.watch.keys import LOSS, VALIDATION
from launcher.watch.series import Floats, Series, merged


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
