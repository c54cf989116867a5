"""Quality of the best trial by sampler, and by the settings of a search.

    python benchmarks/cpu/search.py --json benchmarks/results/search.json

The objective is a formula, so nothing trains except in the last table. Its loss is a parabola of
0.02 nats per octave squared in learning rate about 2^-6, with smaller effects of warmup and clip.
Half an octave above the optimum a trial diverges, so the upper 3.5 of the range's 10 octaves are
wasted. `regret` is the loss of the best trial above the optimum, without noise. `wasted` counts the
trials that diverged. The tables are:

- `samplers`: each search has 40 trials, 4 in flight, of which the first 10 are an initial design. A
  variant of `tpe` records a diverged trial as failed, as Optuna does with a NaN.
- `growth`: the optimum is 1.5 octaves beyond the range; 24 trials, then twice 8, with the range
  grown or not.
- `replicates`: six candidates 0.004 nats apart with noise of 0.01, half of it from the seed; how
  often the truly best candidate is chosen.
- `flight`: TPE between the points of the recorded grids in benchmarks/grids, with other numbers of
  trials in flight and in the initial design; mean regret after 16, 24 and 48 trials.

The script prints a line for each row and writes the tables. It takes about 12 minutes of one core,
most of it for the last table; `--quick` uses a fifth of the seeds.
"""

from __future__ import annotations

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from result_files import make_parser, write_result

from forerun._sweeps.search import samplers
from forerun._sweeps.search.growth import find_open_edges, grow_space, make_probes
from forerun._sweeps.search.repeats import allocate_repeats, compare_candidates
from forerun._sweeps.search.source import Search
from forerun._sweeps.search.space import Params, SearchSpace, build_search_space

RANGES = {"learning_rate": (2**-12, 2**-2), "warmup_fraction": (0.0, 0.3), "clip_norm": (0.25, 4.0)}
SPACE = build_search_space(ranges=RANGES)
NUM_TRIALS, PARALLELISM, NUM_STARTUP, BEST_NATS = 40, 4, 10, 2.0
NUM_SEEDS, NUM_GP_SEEDS = 25, 10
NOISES_NATS = (0.0, 0.005)
CLIFF_LOG2_LR = -5.5
"""Log2 of the learning rate above which a trial diverges: half an octave above the optimum."""


def compute_true_loss(point: Params, optimum: float = -6.0) -> float:
    """Return the loss of a point without noise and divergence."""
    basin = (
        0.02 * (math.log2(point["learning_rate"]) - optimum) ** 2
        + 0.1 * (point["warmup_fraction"] - 0.1) ** 2
    )
    return BEST_NATS + basin + 0.005 * math.log2(point["clip_norm"]) ** 2


def is_diverged(point: Params) -> bool:
    """Return whether a trial at this point diverges."""
    return math.log2(point["learning_rate"]) > CLIFF_LOG2_LR


def run_search(
    ask: Callable[[int, dict[int, float | None], list[Params]], Params],
    noise_nats: float,
    seed: int,
) -> tuple[float, int]:
    """Run one search and return its regret and its number of wasted trials."""
    noise = np.random.default_rng(seed).normal(0, noise_nats, NUM_TRIALS)
    points: list[Params] = []
    losses: dict[int, float | None] = {}
    for index in range(NUM_TRIALS):
        points.append(ask(index, losses, points))
        losses[index] = (
            None if is_diverged(points[-1]) else compute_true_loss(points[-1]) + float(noise[index])
        )
    finished = [(loss, index) for index, loss in losses.items() if loss is not None]
    regret = compute_true_loss(points[min(finished)[1]]) - BEST_NATS if finished else math.inf
    return regret, NUM_TRIALS - len(finished)


def make_sampler(sampler: str, seed: int) -> Callable[..., Params]:
    """Return a function that asks forerun's sampler for the next point."""
    search = Search(SPACE, seed, PARALLELISM, sampler=sampler, num_startup=NUM_STARTUP)

    def ask(index: int, losses: dict[int, float | None], points: list[Params]) -> Params:
        for point in points[len(search.points) :]:
            search.add_point(point)
        return search.suggest(losses)

    return ask


def make_failing_tpe(seed: int) -> Callable[..., Params]:
    """Return forerun's TPE with diverged trials recorded as failed.

    Optuna's `study.tell` records a trial with a NaN as failed.
    """
    make_trial, tpe = samplers._make_trial, make_sampler("tpe", seed)

    def make_failed_trial(axes: Any, params: Any, loss: float | None, index: int) -> Any:
        if loss == math.inf:
            return optuna.trial.create_trial(
                state=optuna.trial.TrialState.FAIL,
                params=dict(params),
                distributions={name: axes[name] for name in params},
            )
        return make_trial(axes, params, loss, index)

    def ask(index: int, losses: dict[int, float | None], points: list[Params]) -> Params:
        with mock.patch.object(samplers, "_make_trial", make_failed_trial):
            return tpe(index, losses, points)

    return ask


def compare_samplers(share: float) -> list[dict[str, Any]]:
    """Return a row for each sampler and noise."""
    samplers_by_name: dict[str, Callable[[int], Callable[..., Params]]] = {
        name: lambda seed, name=name: make_sampler(name, seed)  # type: ignore[misc]
        for name in samplers.SAMPLERS
    }
    samplers_by_name["tpe, told as failure"] = make_failing_tpe
    rows = []
    for noise in NOISES_NATS:
        for name, make_ask in samplers_by_name.items():
            number = max(2, round(share * (NUM_GP_SEEDS if name == "gp" else NUM_SEEDS)))
            began = time.process_time()
            searches = [run_search(make_ask(seed), noise, seed) for seed in range(number)]
            seconds = (time.process_time() - began) / number
            row = {
                "sampler": name,
                "noise_nats": noise,
                "num_searches": number,
                "median_regret_nats": statistics.median(regret for regret, _ in searches),
                "worst_regret_nats": max(regret for regret, _ in searches),
                "mean_wasted": statistics.mean(wasted for _, wasted in searches),
                "cpu_seconds_per_suggestion": seconds / NUM_TRIALS,
            }
            rows.append(row)
            print(
                f"{name:22} noise {noise:5.3f}  regret {row['median_regret_nats']:.4f} (worst "
                f"{row['worst_regret_nats']:.4f})  wasted {row['mean_wasted']:4.1f} of "
                f"{NUM_TRIALS}  "
                f"{1000 * row['cpu_seconds_per_suggestion']:6.1f} ms per suggestion",
                flush=True,
            )
    return rows


def compare_growth(share: float) -> list[dict[str, Any]]:
    """Return the regrets with and without growing the range."""
    rows = []
    for grows in (False, True):
        regrets = [
            _run_search_beyond_range(seed, grows)
            for seed in range(max(2, round(share * NUM_SEEDS)))
        ]
        rows.append(
            {
                "grows": grows,
                "num_searches": len(regrets),
                "median_regret_nats": statistics.median(regrets),
            }
        )
        print(
            f"optimum beyond the range, {'grown' if grows else 'not grown'}: regret "
            f"{statistics.median(regrets):.4f}"
        )
    return rows


def _run_search_beyond_range(seed: int, grows: bool) -> float:
    """Return the regret of one search whose optimum is beyond the range."""
    space: SearchSpace = build_search_space(ranges={**RANGES, "learning_rate": (2**-12, 2**-7.5)})
    points: list[Params] = []
    losses: list[float | None] = []
    for round_index, number in enumerate((24, 8, 8)):
        edges = find_open_edges(space, points, losses) if round_index and grows else ()
        probes: Sequence[Params] = ()
        if edges:
            best = min((loss, index) for index, loss in enumerate(losses) if loss is not None)[1]
            probes = make_probes(space, edges, points[best])[:number]
            space = grow_space(space, edges)
        search = Search(space, seed, PARALLELISM, num_known=len(points))
        for point in points:
            search.add_point(point)
        for index in range(number):
            points.append(
                probes[index] if index < len(probes) else search.suggest(dict(enumerate(losses)))
            )
            search.add_point(points[-1])
            losses.append(None if is_diverged(points[-1]) else compute_true_loss(points[-1]))
    return min(loss for loss in losses if loss is not None) - BEST_NATS


def compare_repeats(share: float) -> list[dict[str, Any]]:
    """Return how often the best of six candidates is chosen, by number of repeats.

    The repeats are divided in equal shares, or by forerun's allocation, which is OCBA (optimal
    computing budget allocation). Half of the noise's variance comes from the seed, which the
    candidates share.
    """
    num_candidates, max_seeds = 6, 60
    noise_sd = 0.01 / math.sqrt(2)  # of each half
    means = [2 + 0.004 * candidate for candidate in range(num_candidates)]
    number = max(20, round(400 * share))
    rows = []
    for num_repeats in (0, 12, 24, 48):
        rng, num_right = np.random.default_rng(0), {"equal": 0, "ocba": 0}
        for _ in range(number):
            seed_noise = rng.normal(0, noise_sd, max_seeds)
            losses = {
                (c, k): mean + seed_noise[k] + float(rng.normal(0, noise_sd))
                for c, mean in enumerate(means)
                for k in range(max_seeds)
            }
            if not num_repeats:  # one run of each candidate, with the same seed
                is_right = min((losses[c, 0], c) for c in range(num_candidates))[1] == 0
                num_right = {name: count + is_right for name, count in num_right.items()}
                continue
            counts_by_name = {
                "equal": [num_repeats // num_candidates] * num_candidates,
                "ocba": _allocate_all(losses, num_candidates, num_repeats),
            }
            for name, counts in counts_by_name.items():
                best = compare_candidates(counts, losses).standings[0]
                num_right[name] += best.candidate == 0
        row = {
            "num_replicates": num_repeats,
            "num_worlds": number,
            **{name: count / number for name, count in num_right.items()},
        }
        rows.append(row)
        print(
            f"{num_repeats:3} repeats: the best is chosen {row['equal']:.0%} by equal shares, "
            f"{row['ocba']:.0%} by OCBA"
        )
    return rows


def _allocate_all(
    losses: dict[tuple[int, int], float], num_candidates: int, num_repeats: int
) -> list[int]:
    """Return the repeats of each candidate after forerun has allocated all of them.

    `losses` has a loss for each (candidate, repeat) that may be requested.
    """
    outcomes: dict[tuple[int, int], float | None] = {}
    while True:
        counts = allocate_repeats(num_candidates, num_repeats, PARALLELISM, outcomes)
        requested = {(c, k) for c, count in enumerate(counts) for k in range(count)}
        if requested <= outcomes.keys():
            return counts
        outcomes |= {repeat: losses[repeat] for repeat in requested}


def compare_parallelism(share: float) -> list[dict[str, Any]]:
    """Return the regrets by number of trials in flight and by size of the initial design.

    A suggestion does not know the losses of the trials in flight.
    """
    rows, number = [], max(3, round(30 * share))
    for name in ("cosine-0", "cosine-1", "wsd-0", "constant-0"):
        grid = pruning.load_grid(name)
        interpolator, best = (
            pruning.interpolate_losses(grid),
            min(trial.loss_nats or math.inf for trial in grid),
        )
        for num_startup, parallelism in ((6, 2), (6, 4), (8, 8), (12, 2), (12, 4), (12, 8)):
            regrets: dict[int, list[float]] = {16: [], 24: [], 48: []}
            for seed in range(number):
                search, losses = (
                    Search(pruning.make_space(grid), seed, parallelism, num_startup=num_startup),
                    [],
                )
                for _ in range(48):
                    search.add_point(search.suggest(dict(enumerate(losses))))
                    losses.append(
                        float(np.ravel(interpolator(pruning.to_coordinates(search.points[-1])))[-1])
                    )
                for num_trials, seed_regrets in regrets.items():
                    seed_regrets.append(min(losses[:num_trials]) - best)
            row = {
                "grid": name,
                "num_startup": num_startup,
                "parallelism": parallelism,
                "num_searches": number,
            }
            row |= {
                f"regret_nats_{num_trials}": statistics.mean(seed_regrets)
                for num_trials, seed_regrets in regrets.items()
            }
            row |= {
                f"se_nats_{num_trials}": statistics.stdev(seed_regrets) / math.sqrt(number)
                for num_trials, seed_regrets in regrets.items()
            }
            rows.append(row)
            text = ", ".join(
                f"{num}: {row[f'regret_nats_{num}']:.4f} +- {row[f'se_nats_{num}']:.4f}"
                for num in regrets
            )
            print(
                f"{name:10} design of {num_startup:2}, {parallelism} in flight: {text}", flush=True
            )
    return rows


def main() -> None:
    """Measure the four tables, print them, and write the result."""
    parser = make_parser(__doc__, quick="Use a fifth of the seeds.")
    options = parser.parse_args()
    share, began = 0.2 if options.quick else 1.0, time.monotonic()
    result = {
        "samplers": compare_samplers(share),
        "growth": compare_growth(share),
        "replicates": compare_repeats(share),
        "flight": compare_parallelism(share),
        "num_trials": NUM_TRIALS,
        "parallelism": PARALLELISM,
        "optuna": optuna.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "seconds": time.monotonic() - began,
    }
    print(f"{result['seconds']:.0f} s", file=sys.stderr)
    write_result(options.json, result)


if __name__ == "__main__":
    main()
