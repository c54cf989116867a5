"""Progress of a study as text: one line for the whole study, one per run that has ended, and a
chart of losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from forerun._proxies.core.notation import (
    format_duration,
    format_learning_rate,
    format_loss,
    format_percent,
)
from forerun._proxies.core.spec import Run
from forerun._sweeps.store.live_state import StudyState

BLOCKS = "▁▂▃▄▅▆▇█"
"""Characters of the chart, from the lowest to the highest loss."""
MAX_WIDTHS, MAX_RUNS = 8, 40
"""Maximum number of widths in the chart, and of losses per width."""
CUT_SHARE = 0.8
"""Share of a width's losses, from the lowest, that set the scale of the chart; higher losses are
drawn at the top.
"""


def format_chart(runs: Sequence[Run]) -> str:
    """Return the chart of losses, a line for each of the largest `MAX_WIDTHS` widths; empty before
    any run has finished.

    Each line shows the last `MAX_RUNS` losses of a width from left to right, with higher blocks for
    higher losses.

    Args:
        runs: Runs in the order in which they ended.
    """
    losses: dict[int, list[float]] = {}
    for run in runs:
        if run.result.loss_nats is not None:
            losses.setdefault(run.spec.shape.width, []).append(run.result.loss_nats)
    if not losses:
        return ""
    lines = [f"losses of finished runs, latest on the right, at most {MAX_RUNS} per width:"]
    lines += [
        f"width {width:<6} {_draw_blocks(losses[width]):<{MAX_RUNS}}  best "
        f"{format_loss(min(losses[width]))} nats"
        for width in sorted(losses)[-MAX_WIDTHS:]
    ]
    return "\n".join(lines)


def _draw_blocks(losses: Sequence[float]) -> str:
    ranked = sorted(losses)
    low, high = ranked[0], ranked[round(CUT_SHARE * (len(ranked) - 1))]
    top = len(BLOCKS) - 1
    return "".join(
        BLOCKS[min(top, round(top * (loss - low) / (high - low))) if high > low else 0]
        for loss in losses[-MAX_RUNS:]
    )


def format_progress_line(state: StudyState, num_running: int) -> str:
    """Return the line `study 42 % (transfer 3 of 5)  6 to 10 min left  8 running  best 2.142 nats
    at lr 0.0155`.
    """
    low, high = state.left_low_seconds, state.left_high_seconds
    left = (
        "time left: cannot tell yet"
        if low is None or high is None
        else f"{format_range(low, high)} left"
    )
    done = format_percent(math.floor(100 * state.done) / 100, is_whole=True)
    parts = [f"study {done} ({state.stage} {state.number} of {state.num_stages})", left]
    parts += [f"{num_running} running"] if num_running else []
    if state.best_loss_nats is not None:
        parts.append(
            f"best {format_loss(state.best_loss_nats)} nats at lr "
            f"{format_learning_rate(state.best_learning_rate)}"
        )
    return "  ".join(parts)


def format_range(low: float, high: float) -> str:
    """Format seconds as a range, rounded outwards and never 0: `20 to 45 s`, `6 to 10 min`, `2 to
    3.5 h`.
    """
    unit, name, step = (
        (1.0, "s", 5.0)
        if high <= 60
        else (60.0, "min", 1.0)
        if high <= 7200
        else (3600.0, "h", 0.5)
    )
    first = step * math.floor(low / unit / step)
    last = step * max(1, math.ceil(high / unit / step))
    if first >= last:
        return f"about {last:g} {name}"
    return f"{first:g} to {last:g} {name}" if first else f"at most {last:g} {name}"


def format_run(run: Run) -> str:
    """Format a run that has ended as one line."""
    spec, result = run.spec, run.result
    loss = result.status if result.loss_nats is None else f"{format_loss(result.loss_nats)} nats"
    return (
        f"run {spec.id[:12]}  width {spec.shape.width}  lr "
        f"{format_learning_rate(spec.hparams.learning_rate)}  {loss}  "
        f"{format_duration(result.seconds)}"
    )
