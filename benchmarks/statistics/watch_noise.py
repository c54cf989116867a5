"""False alarms and delays of the watch under correlated noise, compared with an oracle: a watch
that knows the noise.

    OMP_NUM_THREADS=1 python benchmarks/statistics/watch_noise.py \\
        --json benchmarks/results/watch_noise.json

Losses are a planted curve (`tests/support/launcher/planted_watch.py`) plus AR(1) noise of each
autocorrelation in `PHIS` and each standard deviation in `SDS`.

1. False alarms: healthy runs are judged repeatedly while they grow. The result has the share with
   an alarm at any time.
2. Delays: faults are planted at half the steps. The result has the step at which `rising`,
   `spike_lasts` or `departed` is first raised, and two comparisons: the rule that forerun used
   earlier, on blocks with independent noise; and `rising` that is given phi and sd (the oracle),
   with the limit that 1 % of 100 healthy runs of that noise reach.
3. Constant losses: healthy logs that are rounded to few digits, and logs that become constant.

The script prints the tables as Markdown and writes all figures. It takes about ten minutes of one
core; `--quick` takes one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from scipy.signal import lfilter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support" / "launcher"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planted_watch import compute_expected_losses, make_columns, make_watched_decision
from result_files import describe_machine, write_result
from watch import compute_share, format_share

from forerun._launcher.main_run.frozen.run_policies import MAD_TO_SIGMA
from forerun._launcher.main_run.watch import loss_rises
from forerun._launcher.main_run.watch.alerts import WatchedRun
from forerun._launcher.main_run.watch.course import compare_with_band
from forerun._launcher.main_run.watch.follower import judge
from forerun._launcher.main_run.watch.loss_alerts import find_constant_loss
from forerun._launcher.main_run.watch.loss_rises import (
    RISE_NATS,
    compute_limit_sds,
    compute_sensitivity,
    find_spikes,
    measure_rise,
)
from forerun._launcher.main_run.watch.noise import LossNoise

PHIS, SDS = (0.0, 0.5, 0.9, 0.97, 0.99), (0.02, 0.05, 0.1)
"""Autocorrelations, and standard deviations in nats."""
NUM_STEPS, WARMUP = 4000, 80
ONSET = NUM_STEPS // 2
NUM_LOOKS, NUM_CALIBRATED = 6, 100
"""Judgements of a healthy run, and healthy runs for the oracle's limit."""
STEPS = np.arange(1.0, NUM_STEPS + 1)
SINCE = np.maximum(0.0, STEPS - ONSET)
"""Steps since the fault began."""
FAULTS = {
    "+1 nat for 20 steps": lambda losses: losses + ((SINCE > 0) & (SINCE <= 20)),
    "+12 %": lambda losses: losses * np.where(SINCE > 0, 1.12, 1.0),
    "+5 %": lambda losses: losses * np.where(SINCE > 0, 1.05, 1.0),
    "+2 %": lambda losses: losses * np.where(SINCE > 0, 1.02, 1.0),
    "+6 % over 1,000 steps": lambda losses: losses * (1 + 0.06 * np.minimum(SINCE / 1000, 1)),
}
"""Functions that plant a fault into losses."""
ROUNDED = {
    "1 digit": 0.1,
    "2 digits": 0.01,
    "3 digits": 0.001,
    "4 digits": 1e-4,
    "bfloat16": 2.0**-7,
    "float64": 0.0,
}
"""Step to which losses are rounded; 0 for none."""
DECISION = make_watched_decision(NUM_STEPS, warmup_steps=WARMUP)

Floats = np.ndarray


def draw_noise(rng: np.random.Generator, phi: float, sd: float) -> Floats:
    """Draw AR(1) noise that is stationary from its first value."""
    draws = sd * np.sqrt(1 - phi**2) * rng.standard_normal(NUM_STEPS)
    draws[0] = sd * rng.standard_normal()
    return lfilter([1.0], [1.0, -phi], draws)


def make_healthy_run(seed: int, phi: float, sd: float) -> Floats:
    """Return the losses of a healthy run."""
    return compute_expected_losses(STEPS, NUM_STEPS) + draw_noise(
        np.random.default_rng(seed), phi, sd
    )


def compute_median_noise(phi: float, sd: float, num_lines: int) -> tuple[float, float]:
    """Return phi and the innovation's standard deviation of medians of AR(1) noise.

    Each median is over `num_lines` lines of a log. The medians of correlated lines are treated as
    means.
    """
    lag = np.arange(1 - num_lines, num_lines)
    weights = (num_lines - np.abs(lag)) / num_lines**2
    variance = sd**2 * float(weights @ phi ** np.abs(lag))
    correlation = float(weights @ phi ** (lag + num_lines)) * sd**2 / variance
    if phi == 0 and num_lines > 2:
        variance *= np.pi / 2
    return correlation, float(np.sqrt(variance * (1 - correlation**2)))


@contextlib.contextmanager
def replace_noise(phi: float, sd: float) -> Iterator[None]:
    """Give the watch the true noise at every scale instead of the noise that it would learn."""

    def learn(steps: Floats, values: Floats) -> LossNoise:
        numbers = compute_median_noise(phi, sd, round(steps[1] - steps[0]))
        arrays = (np.array([number]) for number in numbers)
        return LossNoise(ends=np.array([0]), phi=next(arrays), innovation_nats=next(arrays))

    with mock.patch.object(loss_rises, "learn_noise", learn):
        yield


def find_rise_by_former_rule(losses: Floats) -> int | None:
    """Return the step at which forerun's former rule found a rise, or None.

    The rule compares medians of blocks and takes the noise as independent between lines. All
    numbers are copied from the former rule.
    """
    steps, loss = STEPS[WARMUP:], losses[WARMUP:]
    # Blocks of a sixteenth of a doubling of the steps, and of at least eight lines
    edges = [0]
    while edges[-1] < len(steps):
        next_edge = int(np.searchsorted(steps, steps[edges[-1]] * 2 ** (1 / 16)))
        edges.append(max(next_edge, edges[-1] + 8))
    blocks = [loss[begin:end] for begin, end in itertools.pairwise(edges) if end < len(steps)]
    medians = np.array([np.median(block) for block in blocks])
    noise = [
        MAD_TO_SIGMA
        * np.median(np.abs(np.diff(block)))
        / np.sqrt(2)
        * np.sqrt(np.pi / 2 / len(block))
        for block in blocks
    ]
    # Two blocks in a row must be above the lowest one by 0.02 nats and six standard deviations.
    lowest, num_risen = 0, 0
    for i in range(1, len(blocks)):
        rise, sd = medians[i] - medians[lowest], np.hypot(noise[i], noise[lowest])
        num_risen = num_risen + 1 if rise > max(0.02, 6.0 * sd) else 0
        if num_risen == 2:
            return int(steps[edges[i + 1]])
        lowest = i if medians[i] < medians[lowest] else lowest
    return None


def is_constant(losses: Floats) -> bool:
    """Return whether the alert for a constant loss is raised."""
    run = WatchedRun(decision=DECISION, columns=make_columns(losses))
    return next(find_constant_loss(run), None) is not None


def compute_oracle_limit(phi: float, sd: float, num: int) -> float:
    """Return the rise that 1 % of healthy runs reach, in standard deviations of known noise."""
    largest = []
    for seed in range(num):
        losses = make_healthy_run(10_000 + seed, phi, sd)[WARMUP:]
        with replace_noise(phi, sd):
            scales = [*loss_rises.generate_scales(STEPS[WARMUP:], losses)]
        largest.append(max(float((scale.rises / scale.sds).max()) for scale in scales))
    return float(np.quantile(largest, 0.99))


def find_first_alarms(losses: Floats) -> dict[str, int]:
    """Return the step at which each alarm is first raised, from the losses before that step."""
    first_steps = {}
    if (rise := measure_rise(STEPS, losses, WARMUP, NUM_STEPS)) is not None:
        first_steps["rising"] = rise.seen_step
    lasting = [
        spike
        for spike in find_spikes(STEPS, losses, DECISION.spikes)
        if spike.lasted and not spike.within_noise
    ]
    if lasting:
        first_steps["spike_lasts"] = lasting[0].first_step + DECISION.spikes.patience_steps - 1
    departure = compare_with_band(DECISION.predicted, NUM_STEPS, STEPS, losses, WARMUP)
    if departure is not None and departure.departed is not None:
        first_steps["departed"] = int(departure.seen_at[departure.departed])
    return first_steps


def list_alarms(losses: Floats) -> set[str]:
    """Return the alarms that a run raises at any of its lengths."""
    lengths = np.unique(np.round(NUM_STEPS * np.geomspace(0.05, 1.0, NUM_LOOKS))).astype(int)
    return {
        alert.name
        for length in lengths.tolist()
        for alert in judge(DECISION, make_columns(losses[:length])).alerts
        if alert.severity == "alarm"
    }


def summarize_delays(steps: list[int | None]) -> dict[str, Any]:
    """Return how many faults were found after the onset, with the median and the longest delay."""
    after = [step - ONSET for step in steps if step is not None and step > ONSET]
    return {
        "found": len(after),
        "of": len(steps),
        "median": float(np.median(after)) if after else None,
        "longest": max(after, default=None),
    }


def measure_cell(
    phi: float, sd: float, num_healthy: int, num_faulty: int, num_calibrated: int
) -> dict[str, Any]:
    """Return false alarms and delays for one kind of noise."""
    raised: Counter[str] = Counter()
    for seed in range(num_healthy):
        names = list_alarms(make_healthy_run(seed, phi, sd))
        raised.update({*names, *(["any"] if names else [])})
    former = sum(
        find_rise_by_former_rule(make_healthy_run(seed, phi, sd)) is not None
        for seed in range(num_healthy)
    )
    limit = compute_oracle_limit(phi, sd, num_calibrated)
    sensitivity = compute_sensitivity(
        STEPS[:ONSET], make_healthy_run(0, phi, sd)[:ONSET], WARMUP, NUM_STEPS, 0.05 * NUM_STEPS
    )
    row: dict[str, Any] = {
        "phi": phi,
        "sd": sd,
        "num_runs": num_healthy,
        "any_alarm": compute_share(raised["any"], num_healthy),
        "raised": dict(raised),
        "former_rising": compute_share(former, num_healthy),
        "oracle_limit_sds": limit,
        "smallest_jump_nats": sensitivity.jump_nats,
        "smallest_climb_nats": sensitivity.climb_nats,
        "in_time_lines": sensitivity.num_lines,
        "faults": {},
    }
    for name, plant_fault in FAULTS.items():
        runs = [plant_fault(make_healthy_run(seed, phi, sd)) for seed in range(num_faulty)]
        watch_steps = [min(find_first_alarms(losses).values(), default=None) for losses in runs]
        with (
            replace_noise(phi, sd),
            mock.patch.object(loss_rises, "compute_limit_sds", lambda num: limit),
        ):
            oracle = [measure_rise(STEPS, losses, WARMUP, NUM_STEPS) for losses in runs]
        row["faults"][name] = {
            "watch": summarize_delays(watch_steps),
            "oracle": summarize_delays(
                [None if rise is None else rise.seen_step for rise in oracle]
            ),
            "former": summarize_delays([find_rise_by_former_rule(losses) for losses in runs]),
        }
    return row


def measure_rounded(phi: float, sd: float, name: str, num: int) -> dict[str, Any]:
    """Return how often healthy rounded logs are called constant.

    The row also has the number of equal lines after which a log that becomes constant is found.
    """
    step, num_wrong, lines_needed = ROUNDED[name], 0, []
    for seed in range(num):
        losses = make_healthy_run(seed, phi, sd)
        losses = np.round(np.round(losses / step) * step, 10) if step else losses
        # A stretch of equal lines is longest at its end
        stretches = np.flatnonzero(np.diff(losses) != 0) + 1
        lengths = np.diff(stretches, prepend=0)
        ends = stretches[np.argsort(lengths)[-5:]].tolist()
        num_wrong += any(is_constant(losses[:end]) for end in ends)
        losses[ONSET:] = losses[ONSET]
        counts = (n for n in range(2, 513) if is_constant(losses[: ONSET + n]))
        lines_needed += [*itertools.islice(counts, 1)]
    return {
        "phi": phi,
        "sd": sd,
        "rounded": name,
        "called_frozen": compute_share(num_wrong, num),
        "frozen_found": f"{len(lines_needed)} of {num}",
        "equal_lines": float(np.median(lines_needed)) if lines_needed else None,
    }


def count_mixed_alarms(num: int) -> int:
    """Return how many healthy runs raise an alarm under a sum of two noises.

    One is slow, and the other is larger and independent between lines.
    """
    quick = [
        draw_noise(np.random.default_rng(1000 + seed), phi=0.0, sd=0.05) for seed in range(num)
    ]
    return sum(
        bool(list_alarms(make_healthy_run(seed, phi=0.99, sd=0.02) + noise))
        for seed, noise in enumerate(quick)
    )


def format_tables(result: dict[str, Any]) -> str:
    """Return the tables as Markdown; docs/watch.md summarizes them."""
    lines = [
        "| phi | sd | any alarm in a healthy run | `rising` before | smallest jump, climb (nats) |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['phi']:g} | {row['sd']:g} | {format_share(row['any_alarm'])} | "
        f"{row['former_rising'][0]:.0%} | "
        f"{row['smallest_jump_nats']:.2g}, {row['smallest_climb_nats']:.2g} |"
        for row in result["cells"]
    ]
    lines += ["", f"| phi | sd | {' | '.join(FAULTS)} |", f"|---|---|{'---|' * len(FAULTS)}"]
    lines += [
        f"| {row['phi']:g} | {row['sd']:g} | {_format_delays(row)} |" for row in result["cells"]
    ]
    lines += [
        "",
        "| rounded to | phi | healthy, called frozen | frozen, found | after equal lines |",
        "|---|---|---|---|---|",
    ]
    for row in result["rounded"]:
        equal = "" if row["equal_lines"] is None else f"{row['equal_lines']:.0f}"
        lines.append(
            f"| {row['rounded']} | {row['phi']:g} | {format_share(row['called_frozen'])} | "
            f"{row['frozen_found']} | {equal} |"
        )
    return "\n".join(lines)


def _format_delays(row: dict[str, Any]) -> str:
    """Return the delays of one row's faults."""
    kinds = ("watch", "oracle", "former") if row["phi"] == 0 else ("watch", "oracle")
    return " | ".join(
        " / ".join(_format_delay(delays_of_fault[kind]) for kind in kinds)
        for delays_of_fault in row["faults"].values()
    )


def _format_delay(delays: dict[str, Any]) -> str:
    """Return a median delay, with the share that was found if not all were."""
    if not delays["found"]:
        return "-"
    return f"{delays['median']:.0f}" + (
        "" if delays["found"] == delays["of"] else f" ({delays['found']} of {delays['of']})"
    )


def main(arguments: list[str]) -> int:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="Result file.")
    parser.add_argument("--quick", action="store_true", help="Use few runs.")
    parser.add_argument("--jobs", type=int, default=1, help="Processes to use.")
    options = parser.parse_args(arguments)
    num_healthy, num_faulty, num_calibrated, num_rounded = (
        (4, 2, 20, 2) if options.quick else (40, 8, NUM_CALIBRATED, 10)
    )
    began = time.monotonic()
    result: dict[str, Any] = {"cells": [], "rounded": []}
    with ProcessPoolExecutor(options.jobs) as pool:
        cells = [
            pool.submit(measure_cell, phi, sd, num_healthy, num_faulty, num_calibrated)
            for phi in PHIS
            for sd in SDS
        ]
        mixed = pool.submit(count_mixed_alarms, num_healthy)
        logs = [
            pool.submit(measure_rounded, phi, 0.05, name, num_rounded)
            for name in ROUNDED
            for phi in (0.0, 0.9, 0.99)
        ]
        for job in cells:
            result["cells"].append(job.result())
            print(json.dumps(result["cells"][-1]), file=sys.stderr, flush=True)
        result["mixed"] = compute_share(mixed.result(), num_healthy)
        result["rounded"] = [job.result() for job in logs]
    num_runs = num_healthy * len(result["cells"])
    alarms = sum(round(row["any_alarm"][0] * num_healthy) for row in result["cells"])
    result |= {
        "all_cells": compute_share(alarms, num_runs),
        "num_runs": num_runs,
        "num_steps": NUM_STEPS,
        "onset_step": ONSET,
        "rise_sds": compute_limit_sds(NUM_STEPS),
        "rise_nats": RISE_NATS,
        "machine": describe_machine(),
    }
    result["seconds"] = time.monotonic() - began
    print(format_tables(result))
    print(f"any alarm in all cells: {format_share(result['all_cells'])} of {num_runs} runs")
    print(f"phi 0.99, sd 0.02 below independent noise of sd 0.05: {format_share(result['mixed'])}")
    write_result(options.json, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
