"""How often noise that wanders makes the watch cry wolf, and how soon it sees a fault, beside one
that knows the noise.

    OMP_NUM_THREADS=1 python benchmarks/statistics/watch_noise.py \\
        --json benchmarks/results/watch_noise.json

Losses are a planted course (`tests/launcher/planted_watch.py`) and AR(1) noise of `PHIS` and `SDS`,
of the series.

1. False alarms: healthy runs, judged again and again while they grow. Told: the share with an alarm
  at any look.
2. Delays: faults planted at half of the steps, and the step at which `rising`, `spike_lasts` or
   `departed` is first raised. Beside them the rule that forerun had before, of blocks in
   independent noise, and `rising` with phi and sd told to it, whose limit is the one that 1 % of
   100 healthy runs of that very noise pass.
3. Frozen losses: healthy logs rounded to few digits, and logs that freeze.

It takes some ten minutes of one core; `--quick` one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from scipy.signal import lfilter

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "launcher"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planted_watch import columns_of, decision, expected
from process_tree import machine
from watch import binomial, format_share

from launcher.trainer.spikes import MAD_TO_SIGMA
from launcher.watch.course import course
from launcher.watch.follower import judge
from launcher.watch.loss_alerts import frozen_loss
from launcher.watch.loss_rises import RISE_NATS, limit_sds, rise, scales, sight, spikes

PHIS, SDS = (0.0, 0.5, 0.9, 0.97, 0.99), (0.02, 0.05, 0.1)
NUM_STEPS, WARMUP = 4000, 80
ONSET = NUM_STEPS // 2
NUM_LOOKS, NUM_CALIBRATED = 6, 100
STEPS = np.arange(1.0, NUM_STEPS + 1)
SINCE = np.maximum(0.0, STEPS - ONSET)
FAULTS = {
    "+1 nat for 20 steps": lambda losses: losses + ((SINCE > 0) & (SINCE <= 20)),
    "+12 %": lambda losses: losses * np.where(SINCE > 0, 1.12, 1.0),
    "+5 %": lambda losses: losses * np.where(SINCE > 0, 1.05, 1.0),
    "+2 %": lambda losses: losses * np.where(SINCE > 0, 1.02, 1.0),
    "+6 % over 1,000 steps": lambda losses: losses * (1 + 0.06 * np.minimum(SINCE / 1000, 1)),
}
ROUNDED = {
    "1 digit": 0.1,
    "2 digits": 0.01,
    "3 digits": 0.001,
    "4 digits": 1e-4,
    "bfloat16": 2.0**-7,
    "float64": 0.0,
}
DECISION = decision(NUM_STEPS, warmup_steps=WARMUP)

Floats = np.ndarray


def wandering(rng: np.random.Generator, phi: float, sd: float) -> Floats:
    """AR(1) noise, stationary from its first value."""
    draws = sd * np.sqrt(1 - phi**2) * rng.standard_normal(NUM_STEPS)
    draws[0] = sd * rng.standard_normal()
    return lfilter([1.0], [1.0, -phi], draws)


def healthy(seed: int, phi: float, sd: float) -> Floats:
    return expected(STEPS, NUM_STEPS) + wandering(np.random.default_rng(seed), phi, sd)


def known_noise(phi: float, sd: float, num_lines: int) -> tuple[float, float]:
    """Phi and innovation of medians of so many lines of AR(1) noise, as those of means where they
    are correlated.
    """
    lag = np.arange(1 - num_lines, num_lines)
    weights = (num_lines - np.abs(lag)) / num_lines**2
    variance = sd**2 * float(weights @ phi ** np.abs(lag))
    alike = float(weights @ phi ** (lag + num_lines)) * sd**2 / variance
    if phi == 0 and num_lines > 2:
        variance *= np.pi / 2
    return alike, float(np.sqrt(variance * (1 - alike**2)))


def former_rise(losses: Floats) -> int | None:
    """Step at which the rule before saw a rise: medians of blocks, their noise independent from
    line to line.
    """
    at, loss = STEPS[WARMUP:], losses[WARMUP:]
    edges = [0]
    while edges[-1] < len(at):
        edges.append(max(int(np.searchsorted(at, at[edges[-1]] * 2 ** (1 / 16))), edges[-1] + 8))
    blocks = [loss[a:b] for a, b in itertools.pairwise(edges) if b < len(at)]
    medians = np.array([np.median(block) for block in blocks])
    noise = [
        MAD_TO_SIGMA
        * np.median(np.abs(np.diff(block)))
        / np.sqrt(2)
        * np.sqrt(np.pi / 2 / len(block))
        for block in blocks
    ]
    lowest, num_risen = 0, 0
    for i in range(1, len(blocks)):
        by, sd = medians[i] - medians[lowest], np.hypot(noise[i], noise[lowest])
        num_risen = num_risen + 1 if by > max(0.02, 6.0 * sd) else 0
        if num_risen == 2:
            return int(at[edges[i + 1]])
        lowest = i if medians[i] < medians[lowest] else lowest
    return None


def limit_for(phi: float, sd: float, num: int) -> float:
    """The size in standard deviations that 1 % of healthy runs reach, where phi and sd are
    known.
    """
    most = []
    for seed in range(num):
        losses = healthy(10_000 + seed, phi, sd)[WARMUP:]
        found = scales(STEPS[WARMUP:], losses, lambda size: known_noise(phi, sd, size))
        most.append(max(float((scale.rises / scale.sds).max()) for scale in found))
    return float(np.quantile(most, 0.99))


def seen(losses: Floats) -> dict[str, int]:
    """The step at which each alarm first says something, by what lies before that step."""
    found = {}
    if (risen := rise(STEPS, losses, WARMUP, NUM_STEPS)) is not None:
        found["rising"] = risen.seen_step
    lasting = [s for s in spikes(STEPS, losses, DECISION.spikes) if s.lasted and not s.within_noise]
    if lasting:
        found["spike_lasts"] = lasting[0].first_step + DECISION.spikes.patience_steps - 1
    seen_course = course(DECISION.predicted, NUM_STEPS, STEPS, losses, WARMUP)
    if seen_course is not None and seen_course.departed is not None:
        found["departed"] = int(seen_course.seen_at[seen_course.departed])
    return found


def ever_raised(losses: Floats) -> set[str]:
    looks = np.unique(np.round(NUM_STEPS * np.geomspace(0.05, 1.0, NUM_LOOKS))).astype(int)
    return {
        alert.name
        for upto in looks.tolist()
        for alert in judge(DECISION, columns_of(losses[:upto])).alerts
        if alert.severity == "alarm"
    }


def delays(steps: list[int | None]) -> dict[str, Any]:
    """Median and range of what was found after the onset, and how many."""
    after = [step - ONSET for step in steps if step is not None and step > ONSET]
    return {
        "found": len(after),
        "of": len(steps),
        "median": float(np.median(after)) if after else None,
        "longest": max(after, default=None),
    }


def cell(
    phi: float, sd: float, num_healthy: int, num_ill: int, num_calibrated: int
) -> dict[str, Any]:
    raised: Counter[str] = Counter()
    for seed in range(num_healthy):
        names = ever_raised(healthy(seed, phi, sd))
        raised.update({*names, *(["any"] if names else [])})
    former = sum(former_rise(healthy(seed, phi, sd)) is not None for seed in range(num_healthy))
    limit = limit_for(phi, sd, num_calibrated)
    view = sight(STEPS[:ONSET], healthy(0, phi, sd)[:ONSET], WARMUP, NUM_STEPS, 0.05 * NUM_STEPS)
    body: dict[str, Any] = {
        "phi": phi,
        "sd": sd,
        "num_runs": num_healthy,
        "any_alarm": binomial(raised["any"], num_healthy),
        "raised": dict(raised),
        "former_rising": binomial(former, num_healthy),
        "oracle_limit_sds": limit,
        "smallest_jump_nats": view.jump_nats,
        "smallest_climb_nats": view.climb_nats,
        "in_time_lines": view.num_lines,
        "faults": {},
    }
    for name, plant in FAULTS.items():
        runs = [plant(healthy(seed, phi, sd)) for seed in range(num_ill)]
        mine = [min(seen(losses).values(), default=None) for losses in runs]
        oracle = [
            rise(STEPS, losses, WARMUP, NUM_STEPS, lambda size: known_noise(phi, sd, size), limit)
            for losses in runs
        ]
        body["faults"][name] = {
            "watch": delays(mine),
            "oracle": delays([each and each.seen_step for each in oracle]),
            "former": delays([former_rise(losses) for losses in runs]),
        }
    return body


def rounded(phi: float, sd: float, name: str, num: int) -> dict[str, Any]:
    """Healthy logs called frozen at any length, and how many equal lines it takes once one
    freezes.
    """
    step, wrong, needed = ROUNDED[name], 0, []
    for seed in range(num):
        losses = healthy(seed, phi, sd)
        losses = np.round(np.round(losses / step) * step, 10) if step else losses
        # only at the end of a stretch is it longest
        stretches = np.flatnonzero(np.diff(losses) != 0) + 1
        lengths = np.diff(stretches, prepend=0)
        ends = stretches[np.argsort(lengths)[-5:]].tolist()
        wrong += any(
            frozen_loss(columns_of(losses[:end]), WARMUP, NUM_STEPS) is not None for end in ends
        )
        losses[ONSET:] = losses[ONSET]
        numbers = (
            n
            for n in range(2, 513)
            if frozen_loss(columns_of(losses[: ONSET + n]), WARMUP, NUM_STEPS)
        )
        needed += [*itertools.islice(numbers, 1)]
    return {
        "phi": phi,
        "sd": sd,
        "rounded": name,
        "called_frozen": binomial(wrong, num),
        "frozen_found": f"{len(needed)} of {num}",
        "equal_lines": float(np.median(needed)) if needed else None,
    }


def mixed_alarms(num: int) -> int:
    """Healthy runs with an alarm, of noise that wanders slowly below the larger independent noise
    of the batch.
    """
    quick = [wandering(np.random.default_rng(1000 + seed), 0.0, 0.05) for seed in range(num)]
    return sum(
        bool(ever_raised(healthy(seed, 0.99, 0.02) + noise)) for seed, noise in enumerate(quick)
    )


def page(body: dict[str, Any]) -> str:
    """The tables, as Markdown; docs/watch.md sums them up."""
    lines = [
        "| phi | sd | any alarm in a healthy run | `rising` before | smallest jump, climb (nats) |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['phi']:g} | {row['sd']:g} | {format_share(row['any_alarm'])} | "
        f"{row['former_rising'][0]:.0%} | "
        f"{row['smallest_jump_nats']:.2g}, {row['smallest_climb_nats']:.2g} |"
        for row in body["cells"]
    ]
    lines += ["", f"| phi | sd | {' | '.join(FAULTS)} |", f"|---|---|{'---|' * len(FAULTS)}"]
    lines += [f"| {row['phi']:g} | {row['sd']:g} | {_delays(row)} |" for row in body["cells"]]
    lines += [
        "",
        "| rounded to | phi | healthy, called frozen | frozen, found | after equal lines |",
        "|---|---|---|---|---|",
    ]
    for row in body["rounded"]:
        equal = "" if row["equal_lines"] is None else f"{row['equal_lines']:.0f}"
        lines.append(
            f"| {row['rounded']} | {row['phi']:g} | {format_share(row['called_frozen'])} | "
            f"{row['frozen_found']} | {equal} |"
        )
    return "\n".join(lines)


def _delays(row: dict[str, Any]) -> str:
    kinds = ("watch", "oracle", "former") if row["phi"] == 0 else ("watch", "oracle")
    return " | ".join(
        " / ".join(_short(each[kind]) for kind in kinds) for each in row["faults"].values()
    )


def _short(each: dict[str, Any]) -> str:
    if not each["found"]:
        return "-"
    return f"{each['median']:.0f}" + (
        "" if each["found"] == each["of"] else f" ({each['found']} of {each['of']})"
    )


def main(arguments: list[str]) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args(arguments)
    num_healthy, num_ill, num_calibrated, num_rounded = (
        (4, 2, 20, 2) if asked.quick else (40, 8, NUM_CALIBRATED, 10)
    )
    began = time.monotonic()
    body: dict[str, Any] = {"cells": [], "rounded": []}
    with ProcessPoolExecutor(asked.jobs) as pool:
        cells = [
            pool.submit(cell, phi, sd, num_healthy, num_ill, num_calibrated)
            for phi in PHIS
            for sd in SDS
        ]
        mixed = pool.submit(mixed_alarms, num_healthy)
        logs = [
            pool.submit(rounded, phi, 0.05, name, num_rounded)
            for name in ROUNDED
            for phi in (0.0, 0.9, 0.99)
        ]
        for each in cells:
            body["cells"].append(each.result())
            print(json.dumps(body["cells"][-1]), file=sys.stderr, flush=True)
        body["mixed"] = binomial(mixed.result(), num_healthy)
        body["rounded"] = [each.result() for each in logs]
    num_runs = num_healthy * len(body["cells"])
    alarms = sum(round(row["any_alarm"][0] * num_healthy) for row in body["cells"])
    body |= {
        "all_cells": binomial(alarms, num_runs),
        "num_runs": num_runs,
        "num_steps": NUM_STEPS,
        "onset_step": ONSET,
        "rise_sds": limit_sds(NUM_STEPS),
        "rise_nats": RISE_NATS,
        "machine": machine(),
    }
    body["seconds"] = time.monotonic() - began
    print(page(body))
    print(f"any alarm in all cells: {format_share(body['all_cells'])} of {num_runs} runs")
    print(f"phi 0.99, sd 0.02 below independent noise of sd 0.05: {format_share(body['mixed'])}")
    if asked.json:
        asked.json.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
