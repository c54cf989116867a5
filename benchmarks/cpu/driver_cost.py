"""Cost of the driver per trial while a search grows to 10,000 trials that cost nothing to train.

    python benchmarks/cpu/driver_cost.py --json benchmarks/results/driver_cost.json

1. Growth. `forerun._sweeps.run.driver` runs with a `SearchSource`, and with the ledger and the
   curves on disk, synced as in a study; each sampler has its own process. For each block of trials
   the results have the driver's processor time and wall time per trial without the objective's own,
   the suggestion's part of it, the peak memory, and the time to read the ledger again and to
   resume. Wall time is mostly the disk's. For comparison, plain Optuna runs in memory with the same
   sampler, without ledger and curves.
2. The bound. TPE sees at most 300 trials (`forerun._sweeps.search.samplers.MAX_TRIALS_SHOWN`).
   Searches with and without the bound are compared seed by seed: the regret of the best trial, and
   the median regret of the last hundred, as ratios (geometric mean, 95 % bootstrap interval over
   seeds). The same is done for a GP and `MAX_TRIALS_FITTED`.

The script prints a few lines for each search and writes both tables. The first part needs a quiet
machine and the second does not (`--only growth`, `--only bounds`). It takes about 25 minutes of one
core; `--quick` stops at 1,000 trials, uses a quarter of the seeds, and takes 3 minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support" / "sweeps"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from process_tree import read_peak_memory_mb
from result_files import describe_machine, make_parser, write_result
from search import BEST_NATS, PARALLELISM, SPACE, compute_true_loss, is_diverged
from sweep_fakes import make_spec

from forerun._proxies.core import canon
from forerun._proxies.core.spec import Curve, EndedRun, RunResult, RunSpec
from forerun._sweeps.run.driver import drive
from forerun._sweeps.run.pool import HostCall, Report, execute_call
from forerun._sweeps.search import samplers
from forerun._sweeps.search.source import Search, SearchSource
from forerun._sweeps.search.space import Params
from forerun._sweeps.store.ledger import Ledger

BLOCKS = ((100, 200), (900, 1_000), (9_800, 10_000))
"""Ranges of trials over which costs are averaged; the first begins after every sampler's initial
design.
"""
SIZES = {"tpe": 10_000, "random": 10_000, "gp": 300}
"""Number of trials by sampler."""
GP_BLOCKS = ((50, 100), (100, 150), (250, 300))
OPTUNA_TRIALS = 3_000
OPTUNA_BLOCKS = (*BLOCKS[:2], (1_900, 2_000), (2_900, OPTUNA_TRIALS))
"""Trials and blocks of plain Optuna, whose cost per trial grows with their number."""
Reading = tuple[int, float, float, float]
"""Outcomes so far, and the wall time, the driver's processor time and the processor time of the
suggestions until then, in seconds."""
BOUNDS = (
    ("tpe", 1_000, 16, 0.0),
    ("tpe", 1_000, 16, 0.005),
    ("tpe", 2_000, 8, 0.005),
    ("gp", 300, 3, 0.005),
)
"""Sampler, trials, searches, and noise in nats of each comparison with a sampler that sees all
trials.
"""
BOUND_NAMES = {"tpe": "MAX_TRIALS_SHOWN", "gp": "MAX_TRIALS_FITTED"}
"""Name of the constant of `samplers` that bounds the trials that a sampler sees."""
BASE = make_spec(num_slots=4)


def make_run(point: Params) -> RunSpec:
    """Return the run of a point; each of its values is part of the spec, as in a study."""
    hparams = dataclasses.replace(
        BASE.hparams, learning_rate=point["learning_rate"], clip_norm=point["clip_norm"]
    )
    schedule = dataclasses.replace(
        BASE.schedule, num_steps=1000, warmup_steps=int(1000 * point["warmup_fraction"])
    )
    return dataclasses.replace(BASE, hparams=hparams, schedule=schedule)


class TrivialHost:
    """A worker host whose runs have ended as soon as they are admitted."""

    def advance(self, call: HostCall) -> Report:
        """Return an outcome for each admitted run."""
        return Report(
            finished=tuple(
                self._make_outcome(slot, canon.decode(RunSpec, data)) for slot, data in call.admit
            )
        )

    def _make_outcome(self, slot: int, spec: RunSpec) -> EndedRun:
        """Return the outcome of a run, computed from its hyperparameters."""
        schedule, hparams = spec.schedule, spec.hparams
        point = {
            "learning_rate": hparams.learning_rate,
            "clip_norm": hparams.clip_norm or 1.0,
            "warmup_fraction": schedule.warmup_steps / schedule.num_steps,
        }
        diverged = is_diverged(point)
        curve = Curve(steps=(1, 2), train_loss_nats=(5.0, 3.0), grad_norm=(1.0, 1.0))
        result = RunResult(
            id=spec.id,
            status="diverged" if diverged else "finished",
            loss_nats=None if diverged else compute_true_loss(point),
            num_steps=1000,
            last_train_loss_nats=3.0,
            curve_id=canon.compute_content_id(curve),
            flops=1.0,
            tokens=spec.num_tokens,
            seconds=0.5,
            environment={},
            reason="above the cliff" if diverged else "",
        )
        return EndedRun(slot, result, curve)


class InstantPool:
    """A pool of one worker in this process that keeps its own time apart from the driver's."""

    num_workers, calls_ahead = 1, 0

    def __init__(self) -> None:
        self._calls: list[HostCall] = []
        self.cpu_seconds = self.seconds = 0.0

    def start(self, worker: int, call: HostCall) -> None:
        """Keep a call until the next `wait`."""
        self._calls.append(call)

    def wait(self, timeout_seconds: float) -> list[Report]:
        """Execute the calls and return their reports."""
        cpu, began = time.process_time(), time.monotonic()
        reports = [execute_call(0, call, TrivialHost) for call in self._calls]
        self._calls.clear()
        self.cpu_seconds += time.process_time() - cpu
        self.seconds += time.monotonic() - began
        return reports

    def restart(self, worker: int) -> None:
        """Forget the calls of the worker."""
        self._calls.clear()

    def close(self) -> None:
        """Forget all calls."""
        self._calls.clear()


def measure_search(sampler: str, num_trials: int, study: Path) -> dict[str, Any]:
    """Run one search through the real driver and return its costs.

    A reading is taken after every outcome.
    """
    readings, suggestion_seconds = list[Reading](), 0.0
    suggest = Search.suggest

    def time_suggest(search: Search, losses: dict[int, float | None]) -> Params:
        nonlocal suggestion_seconds
        began = time.process_time()
        point = suggest(search, losses)
        suggestion_seconds += time.process_time() - began
        return point

    def record_reading(_: object = None) -> None:
        times = (
            time.monotonic() - pool.seconds,
            time.process_time() - pool.cpu_seconds,
            suggestion_seconds,
        )
        readings.append((len(ledger.get_results()), *times))

    pool = InstantPool()
    with (
        Ledger.open(study, {"seed": 7}, create=True) as ledger,
        mock.patch.object(Search, "suggest", time_suggest),
    ):
        search = Search(SPACE, 7, PARALLELISM, sampler=sampler)
        source = SearchSource(search, make_run, ledger, stage="search", num_trials=num_trials)
        drive(source, pool, ledger, study, bank_key_for=lambda spec: "one", progress=record_reading)
    blocks = GP_BLOCKS if sampler == "gp" else BLOCKS
    return {
        "sampler": sampler,
        "num_trials": num_trials,
        "outcomes": readings[-1][0],
        "blocks": [measure_block(readings, *ends) for ends in blocks if ends[1] <= num_trials],
        "peak_rss_mb": read_peak_memory_mb(),
        **measure_resume(sampler, num_trials, study),
    }


def measure_block(readings: list[Reading], begin: int, end: int) -> dict[str, float]:
    """Return the cost of a trial between two counts of outcomes.

    Two trials may be one run, so there may be fewer outcomes than trials.
    """
    first = next(reading for reading in readings if reading[0] >= min(begin, readings[-1][0] - 1))
    last = next((reading for reading in readings if reading[0] >= end), readings[-1])
    wall, cpu, suggestion = (
        1e3 * (last[i] - first[i]) / max(1, last[0] - first[0]) for i in (1, 2, 3)
    )
    return {
        "from": first[0],
        "to": last[0],
        "wall_ms": wall,
        "cpu_ms": cpu,
        "suggestion_cpu_ms": suggestion,
    }


def measure_resume(sampler: str, num_trials: int, study: Path) -> dict[str, float]:
    """Return the cost of resuming a search.

    It has two parts: reading the ledger, and everything else before the first new suggestion.
    """
    began = time.process_time()
    ledger = Ledger.read(study)
    read_seconds = time.process_time() - began
    points = [record.body for record in ledger.read_records("suggestion")]
    search = Search(SPACE, 7, PARALLELISM, sampler=sampler)
    results = ledger.get_results()
    run_ids = [make_run(point).id for point in points]  # type: ignore[arg-type]
    losses = {index: results[run_id].loss_nats for index, run_id in enumerate(run_ids)}
    began = time.process_time()
    for point in points[:-1]:
        search.add_point(point)  # type: ignore[arg-type]
    search.suggest(losses)
    return {
        "read_cpu_ms_per_trial": 1e3 * read_seconds / num_trials,
        "resume_cpu_seconds": time.process_time() - began,
    }


def measure_plain_optuna(num_trials: int) -> dict[str, Any]:
    """Return the cost of Optuna's TPE in memory with the same settings, without files."""
    import optuna

    axes = samplers._make_distributions(SPACE)
    with samplers.silence_optuna():
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=10, multivariate=True, constant_liar=True, seed=7
        )
        study = optuna.create_study(sampler=sampler)
        readings: list[Reading] = []
        for number in range(num_trials):
            trial = study.ask(axes)
            point = samplers._to_point(SPACE, trial.params)
            study.tell(trial, 3.5 if is_diverged(point) else compute_true_loss(point))
            readings.append((number + 1, time.monotonic(), time.process_time(), 0.0))
    blocks = [measure_block(readings, *ends) for ends in OPTUNA_BLOCKS if ends[1] <= num_trials]
    return {"sampler": "optuna's tpe in memory", "num_trials": num_trials, "blocks": blocks}


def measure_growth(max_trials: int) -> list[dict[str, Any]]:
    """Measure each sampler in its own process, and plain Optuna."""
    rows = []
    for name, size in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                __file__,
                "--one",
                name,
                "--trials",
                str(min(size, max_trials)),
                "--study",
                folder,
            ]
            rows.append(
                json.loads(
                    subprocess.run(command, check=True, capture_output=True, text=True).stdout
                )
            )
        print_costs(rows[-1])
    rows.append(measure_plain_optuna(min(OPTUNA_TRIALS, max_trials)))
    print_costs(rows[-1])
    return rows


def print_costs(row: dict[str, Any]) -> None:
    """Print the costs of one sampler, and add the ratios of the last block to the first."""
    blocks = row["blocks"]
    row["cpu_ratio_last_to_first"] = blocks[-1]["cpu_ms"] / blocks[0]["cpu_ms"]
    row["wall_ratio_last_to_first"] = blocks[-1]["wall_ms"] / blocks[0]["wall_ms"]
    for block in blocks:
        print(
            f"{row['sampler']:22} to trial {block['to']:6}: {block['cpu_ms']:6.2f} ms processor "
            f"time per trial ({block['suggestion_cpu_ms']:.2f} ms of it for the suggestion), "
            f"{block['wall_ms']:.1f} ms wall time",
            flush=True,
        )
    print(
        f"  last block over first: {row['cpu_ratio_last_to_first']:.2f}, wall time "
        f"{row['wall_ratio_last_to_first']:.2f}",
        flush=True,
    )
    if "peak_rss_mb" in row:
        print(
            f"  {row['peak_rss_mb']:.0f} MB; reading the ledger takes "
            f"{row['read_cpu_ms_per_trial']:.2f} ms per trial, and the first suggestion after a "
            f"resume {row['resume_cpu_seconds']:.2f} s",
            flush=True,
        )


def run_search(sampler: str, num_trials: int, noise_nats: float, seed: int) -> tuple[float, float]:
    """Run one search and return two regrets in nats: that of its best trial, and the median over
    its last hundred trials without those that diverged.
    """
    noise = np.random.default_rng(seed).normal(0, noise_nats, num_trials)
    search, losses, points = (
        Search(SPACE, seed, PARALLELISM, sampler=sampler),
        dict[int, float | None](),
        [],
    )
    for index in range(num_trials):
        points.append(search.suggest(losses))
        search.add_point(points[-1])
        losses[index] = (
            None if is_diverged(points[-1]) else compute_true_loss(points[-1]) + float(noise[index])
        )
    best_index = min((loss, index) for index, loss in losses.items() if loss is not None)[1]
    last_regrets = [
        compute_true_loss(point) - BEST_NATS for point in points[-100:] if not is_diverged(point)
    ]
    return compute_true_loss(points[best_index]) - BEST_NATS, statistics.median(last_regrets)


def compare_bound(
    sampler: str, num_trials: int, num_seeds: int, noise_nats: float
) -> dict[str, Any]:
    """Compare searches with and without the bound, seed by seed, and print and return the row."""
    pairs = []
    for seed in range(num_seeds):
        bounded = run_search(sampler, num_trials, noise_nats, seed)
        no_bound = 10**9
        with mock.patch.object(samplers, BOUND_NAMES[sampler], no_bound):
            pairs.append((bounded, run_search(sampler, num_trials, noise_nats, seed)))
    row: dict[str, Any] = {
        "sampler": sampler,
        "num_trials": num_trials,
        "num_searches": num_seeds,
        "noise_nats": noise_nats,
    }
    for part, name in enumerate(("best", "last_hundred")):
        row[name] = summarize_ratio(
            [math.log(bounded[part] / unbounded[part]) for bounded, unbounded in pairs]
        )
        row[name]["bounded_median_nats"] = statistics.median(bounded[part] for bounded, _ in pairs)
        row[name]["unbounded_median_nats"] = statistics.median(
            unbounded[part] for _, unbounded in pairs
        )
    text = "; ".join(
        f"{name} {row[name]['ratio']:.2f} ({row[name]['low']:.2f} to {row[name]['high']:.2f}), "
        f"{row[name]['bounded_median_nats']:.1e} nats"
        for name in ("best", "last_hundred")
    )
    print(
        f"{sampler}, {num_trials} trials, noise {noise_nats}: regret bounded / unbounded: {text}",
        flush=True,
    )
    return row


def summarize_ratio(logs: list[float]) -> dict[str, float]:
    """Return the geometric mean of ratios with its 95 % interval, by bootstrap over seeds."""
    rng = np.random.default_rng(0)
    means = [float(np.mean(rng.choice(logs, len(logs)))) for _ in range(2_000)]
    low, high = np.quantile(means, [0.025, 0.975])
    return {"ratio": math.exp(statistics.mean(logs)), "low": math.exp(low), "high": math.exp(high)}


def compare_bounds(share: float) -> list[dict[str, Any]]:
    """Return a row for each comparison of `BOUNDS`."""
    return [
        compare_bound(sampler, trials, max(2, round(share * seeds)), noise)
        for sampler, trials, seeds, noise in BOUNDS
    ]


def main() -> None:
    """Measure both parts, print them, and write the result."""
    parser = make_parser(__doc__, quick="Stop at 1,000 trials and use a quarter of the seeds.")
    parser.add_argument(
        "--only",
        choices=("growth", "bounds"),
        help="Measure one part, and keep the other part of the file.",
    )
    parser.add_argument("--one", choices=samplers.SAMPLERS, help=argparse.SUPPRESS)
    parser.add_argument("--trials", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--study", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure_search(options.one, options.trials, options.study)))
        return
    result = (
        json.loads(options.json.read_text())
        if options.only and options.json and options.json.exists()
        else {}
    )
    if options.only != "bounds":
        result["growth"] = {
            "rows": measure_growth(1_000 if options.quick else 10_000),
            "machine": describe_machine(),
        }
    if options.only != "growth":
        result["bounds"] = {
            "rows": compare_bounds(0.25 if options.quick else 1.0),
            "machine": describe_machine(),
        }
    write_result(options.json, result)


if __name__ == "__main__":
    main()
