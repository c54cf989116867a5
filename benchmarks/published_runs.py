"""GPU-hours of published runs, each predicted by all the others: the table of docs/estimates.md.

    python benchmarks/published_runs.py

Nothing is timed and nothing written: the runs are `launcher/estimates/published.py`. The last lines say how many lie
inside their intervals, each run left out, and each team with all of its runs.
"""

from __future__ import annotations

import math

from launcher.estimates.published import PUBLISHED_RUNS, PublishedRun
from launcher.estimates.spans import Span
from launcher.estimates.utilization import left_out


def row(run: PublishedRun, share: Span) -> str:
    """A run as the table has it."""
    hours = [_figure(run.gpu_hours * run.utilization / end) for end in (share.value, share.high, share.low)]
    return (
        f"| {run.name} | {run.gpu} | {_figure(run.gpu_hours)} | {hours[0]} [{hours[1]}, {hours[2]}] | "
        f"{'yes' if inside(run, share) else '**no**'} |"
    )


def inside(run: PublishedRun, share: Span) -> bool:
    """Whether its hours lie in the interval."""
    return share.low <= run.utilization <= share.high


def team(run: PublishedRun) -> str:
    """Runs whose errors are alike: of one series."""
    return run.name.rpartition("-")[0].rstrip("-.123")


def _figure(value: float) -> str:
    digits = 2 - math.floor(math.log10(value))
    return f"{round(value, digits):,.0f}"


def main() -> None:
    """Print the table and what it comes to."""
    print("| run | on | hours published | predicted by the others [90 %] | inside |\n|---|---|---|---|---|")
    alone = {run.name: left_out((run,), run) for run in PUBLISHED_RUNS}
    print("\n".join(row(run, alone[run.name]) for run in PUBLISHED_RUNS))
    teams = {team(run): tuple(other for other in PUBLISHED_RUNS if team(other) == team(run)) for run in PUBLISHED_RUNS}
    apart = [inside(run, left_out(teams[team(run)], run)) for run in PUBLISHED_RUNS]
    held = sum(inside(run, alone[run.name]) for run in PUBLISHED_RUNS)
    print(
        f"{held} of {len(PUBLISHED_RUNS)} inside; with their whole series left out {sum(apart)}, of {len(teams)} series"
    )


if __name__ == "__main__":
    main()
