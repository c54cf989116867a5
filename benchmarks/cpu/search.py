"""How good each sampler's best trial is and how many trials it wastes; what growth and repeats are
worth.

    python benchmarks/cpu/search.py --json benchmarks/results/search.json

The toy: a parabola of 0.02 nats per octave squared in learning rate about 2^-6, less in warmup and
clip, and a cliff half an octave above the optimum, beyond which a trial diverges: the upper 3.5 of
the range's 10 octaves are a waste. `regret` is what the best trial loses to the optimum, without
noise; `wasted` counts trials that diverged. Every search has 40 trials, 4 in flight, 10 of a
design. `tpe, told as failure` is what Optuna does with a NaN.

Growth: the optimum lies 1.5 octaves beyond the range; 24 trials, then 2 x 8 in a grown range, or in
the old one.
Repeats: six candidates 0.004 nats apart, noise 0.01 (half of it the seed's); how often the truly
best is chosen.
Flight: TPE between the points of the full grids of trained runs (benchmarks/grids), with other
numbers of trials in flight and of the design; mean regret after 16, 24 and 48 trials. It takes some
12 minutes of one core, most of it the last table; `--quick` takes a fifth of the seeds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import optuna
import pruning

from sweeps.search import samplers
from sweeps.search.growth import grown, open_edges, probes
from sweeps.search.replicates import compare, replicates
from sweeps.search.source import Search
from sweeps.search.space import Params, SearchSpace, search_space

RANGES = {"learning_rate": (2**-12, 2**-2), "warmup_fraction": (0.0, 0.3), "clip_norm": (0.25, 4.0)}
SPACE = search_space(ranges=RANGES)
NUM_TRIALS, PARALLELISM, NUM_STARTUP, BEST_NATS = 40, 4, 10, 2.0
NUM_SEEDS, NUM_GP_SEEDS = 25, 10
NOISES_NATS = (0.0, 0.005)


def truth(point: Params, optimum: float = -6.0) -> float:
    """Loss without noise and without the cliff."""
    valley = (
        0.02 * (math.log2(point["learning_rate"]) - optimum) ** 2
        + 0.1 * (point["warmup_fraction"] - 0.1) ** 2
    )
    return BEST_NATS + valley + 0.005 * math.log2(point["clip_norm"]) ** 2


def lost(point: Params) -> bool:
    return math.log2(point["learning_rate"]) > -5.5


def searched(
    ask: Callable[[int, dict[int, float | None], list[Params]], Params],
    noise_nats: float,
    seed: int,
) -> tuple[float, int]:
    """Regret and wasted trials of one search."""
    noise = np.random.default_rng(seed).normal(0, noise_nats, NUM_TRIALS)
    points: list[Params] = []
    told: dict[int, float | None] = {}
    for index in range(NUM_TRIALS):
        points.append(ask(index, told, points))
        told[index] = None if lost(points[-1]) else truth(points[-1]) + float(noise[index])
    finished = [(loss, index) for index, loss in told.items() if loss is not None]
    regret = truth(points[min(finished)[1]]) - BEST_NATS if finished else math.inf
    return regret, NUM_TRIALS - len(finished)


def ours(sampler: str, seed: int) -> Callable[..., Params]:
    search = Search(SPACE, seed, PARALLELISM, sampler=sampler, num_startup=NUM_STARTUP)

    def ask(index: int, told: dict[int, float | None], points: list[Params]) -> Params:
        for point in points[len(search.points) :]:
            search.add(point)
        return search.suggest(told)

    return ask


def told_as_failure(seed: int) -> Callable[..., Params]:
    """Our TPE, but that a diverged trial has failed: what `study.tell(nan)` makes of it."""
    plain, tpe = samplers._make_trial, ours("tpe", seed)

    def trial(axes: Any, told: Any, loss: float | None, index: int) -> Any:
        if loss == math.inf:
            return optuna.trial.create_trial(
                state=optuna.trial.TrialState.FAIL,
                params=dict(told),
                distributions={name: axes[name] for name in told},
            )
        return plain(axes, told, loss, index)

    def ask(index: int, told: dict[int, float | None], points: list[Params]) -> Params:
        with mock.patch.object(samplers, "_make_trial", trial):
            return tpe(index, told, points)

    return ask


def sampler_table(share: float) -> list[dict[str, Any]]:
    makers: dict[str, Callable[[int], Callable[..., Params]]] = {
        name: lambda seed, name=name: ours(name, seed)  # type: ignore[misc]
        for name in samplers.SAMPLERS
    }
    makers["tpe, told as failure"] = told_as_failure
    rows = []
    for noise in NOISES_NATS:
        for name, maker in makers.items():
            number = max(2, round(share * (NUM_GP_SEEDS if name == "gp" else NUM_SEEDS)))
            began = time.process_time()
            found = [searched(maker(seed), noise, seed) for seed in range(number)]
            seconds = (time.process_time() - began) / number
            row = {
                "sampler": name,
                "noise_nats": noise,
                "num_searches": number,
                "median_regret_nats": statistics.median(regret for regret, _ in found),
                "worst_regret_nats": max(regret for regret, _ in found),
                "mean_wasted": statistics.mean(wasted for _, wasted in found),
                "cpu_seconds_per_suggestion": seconds / NUM_TRIALS,
            }
            rows.append(row)
            print(
                f"{name:22} noise {noise:5.3f}  regret {row['median_regret_nats']:.4f} (worst "
                f"{row['worst_regret_nats']:.4f})  wasted {row['mean_wasted']:4.1f} of "
                f"{NUM_TRIALS}  "
                f"{1000 * row['cpu_seconds_per_suggestion']:6.1f} ms a suggestion",
                flush=True,
            )
    return rows


def growth_table(share: float) -> list[dict[str, Any]]:
    rows = []
    for grows in (False, True):
        found = [_grown_search(seed, grows) for seed in range(max(2, round(share * NUM_SEEDS)))]
        rows.append(
            {
                "grows": grows,
                "num_searches": len(found),
                "median_regret_nats": statistics.median(found),
            }
        )
        print(
            f"optimum beyond the range, {'grown' if grows else 'not grown'}: regret "
            f"{statistics.median(found):.4f}"
        )
    return rows


def _grown_search(seed: int, grows: bool) -> float:
    space: SearchSpace = search_space(ranges={**RANGES, "learning_rate": (2**-12, 2**-7.5)})
    points: list[Params] = []
    losses: list[float | None] = []
    for leg, number in enumerate((24, 8, 8)):
        edges = open_edges(space, points, losses) if leg and grows else ()
        given: Sequence[Params] = ()
        if edges:
            best = min((loss, index) for index, loss in enumerate(losses) if loss is not None)[1]
            given = probes(space, edges, points[best])[:number]
            space = grown(space, edges)
        search = Search(space, seed, PARALLELISM, num_known=len(points))
        for point in points:
            search.add(point)
        for index in range(number):
            points.append(
                given[index] if index < len(given) else search.suggest(dict(enumerate(losses)))
            )
            search.add(points[-1])
            losses.append(None if lost(points[-1]) else truth(points[-1]))
    return min(loss for loss in losses if loss is not None) - BEST_NATS


def repeat_table(share: float) -> list[dict[str, Any]]:
    """One loss each, as a search alone has it; equal shares; and as we give them out."""
    means, number = [2 + 0.004 * c for c in range(6)], max(20, round(400 * share))
    rows = []
    for runs in (0, 12, 24, 48):
        rng, right = np.random.default_rng(0), {"equal": 0, "ocba": 0}
        for _ in range(number):
            of_seed = rng.normal(0, 0.01 / math.sqrt(2), 60)
            losses = {
                (c, k): mean + of_seed[k] + float(rng.normal(0, 0.01 / math.sqrt(2)))
                for c, mean in enumerate(means)
                for k in range(60)
            }
            if not runs:  # one seed for all of them
                alone = min((losses[c, 0], c) for c in range(6))[1] == 0
                right = {how: count + alone for how, count in right.items()}
                continue
            right["equal"] += compare([runs // 6] * 6, losses).standings[0].candidate == 0
            right["ocba"] += compare(_spent(losses, runs), losses).standings[0].candidate == 0
        row = {
            "num_replicates": runs,
            "num_worlds": number,
            **{how: count / number for how, count in right.items()},
        }
        rows.append(row)
        print(
            f"{runs:3} repeats: the best is chosen {row['equal']:.0%} by equal shares, "
            f"{row['ocba']:.0%} by OCBA"
        )
    return rows


def _spent(losses: dict[tuple[int, int], float], runs: int) -> list[int]:
    known: dict[tuple[int, int], float | None] = {}
    while True:
        counts = replicates(6, runs, PARALLELISM, known)
        asked = {(c, k) for c, count in enumerate(counts) for k in range(count)}
        if asked <= known.keys():
            return counts
        known |= {one: losses[one] for one in asked}


def flight_table(share: float) -> list[dict[str, Any]]:
    """What it costs that a suggestion has not heard of the trials in flight, and that a design
    comes first.
    """
    rows, number = [], max(3, round(30 * share))
    for name in ("cosine-0", "cosine-1", "wsd-0", "constant-0"):
        grid = pruning.loaded(name)
        between, best = (
            pruning.interpolated(grid),
            min(trial.loss_nats or math.inf for trial in grid),
        )
        for num_startup, parallelism in ((6, 2), (6, 4), (8, 8), (12, 2), (12, 4), (12, 8)):
            regrets: dict[int, list[float]] = {16: [], 24: [], 48: []}
            for seed in range(number):
                search, losses = (
                    Search(pruning.space_of(grid), seed, parallelism, num_startup=num_startup),
                    [],
                )
                for _ in range(48):
                    search.add(search.suggest(dict(enumerate(losses))))
                    losses.append(
                        float(np.ravel(between(pruning.coordinates(search.points[-1])))[-1])
                    )
                for after, found in regrets.items():
                    found.append(min(losses[:after]) - best)
            row = {
                "grid": name,
                "num_startup": num_startup,
                "parallelism": parallelism,
                "num_searches": number,
            }
            row |= {
                f"regret_nats_{after}": statistics.mean(found) for after, found in regrets.items()
            }
            row |= {
                f"se_nats_{after}": statistics.stdev(found) / math.sqrt(number)
                for after, found in regrets.items()
            }
            rows.append(row)
            told = ", ".join(
                f"{after}: {row[f'regret_nats_{after}']:.4f} +- {row[f'se_nats_{after}']:.4f}"
                for after in regrets
            )
            print(
                f"{name:10} design of {num_startup:2}, {parallelism} in flight: {told}", flush=True
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="Where the numbers go.")
    parser.add_argument("--quick", action="store_true", help="A fifth of the seeds.")
    options = parser.parse_args()
    share, began = 0.2 if options.quick else 1.0, time.monotonic()
    body = {
        "samplers": sampler_table(share),
        "growth": growth_table(share),
        "replicates": repeat_table(share),
        "flight": flight_table(share),
        "num_trials": NUM_TRIALS,
        "parallelism": PARALLELISM,
        "optuna": optuna.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "seconds": time.monotonic() - began,
    }
    print(f"{body['seconds']:.0f} s", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
