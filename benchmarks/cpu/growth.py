"""The driver's cost per trial as a search without training grows to 10,000 trials.

    python benchmarks/cpu/growth.py --json benchmarks/results/growth.json

1. Growth. `sweeps.run.driver` runs with a `SearchSource`, and with the ledger and the curves on
   disk, synced as in a study; each sampler has its own process. For each block of trials the
   results have the driver's processor time and wall time per trial without the objective's own, the
   suggestion's part of it, the peak memory, and the time to read the ledger again and to resume.
   Wall time is mostly the disk's. For comparison, plain Optuna runs in memory with the same
   sampler, without ledger and curves.
2. The bound. TPE sees at most 300 trials (`sweeps.search.samplers.MOST_SHOWN`). Searches with and
   without the bound are compared seed by seed: the regret of the best trial, and the median regret
   of the last hundred, as ratios (geometric mean, 95 % bootstrap interval over seeds). The same is
   done for a GP and `MOST_FITTED`.

The times need a quiet machine and the second part does not (`--only growth`, `--only bounds`). It
takes about 25 minutes of one core; `--quick` stops at 1,000 trials, uses a quarter of the seeds,
and takes 3.
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

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "sweeps"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from process_tree import machine, own_peak_mb
from search import PARALLELISM, SPACE, lost, truth
from sweep_fakes import make_spec

from proxies.core import canon
from proxies.core.spec import Curve, RunResult, RunSpec
from sweeps.run.driver import drive
from sweeps.run.pool import Finished, HostAnswer, HostCall, Report, carry_out
from sweeps.search import samplers
from sweeps.search.source import Search, SearchSource
from sweeps.search.space import Params
from sweeps.store.ledger import Ledger

BLOCKS = ((100, 200), (900, 1_000), (9_800, 10_000))
"""Trials over which costs are taken: the first past every design, the last at the end."""
SIZES = {"tpe": 10_000, "random": 10_000, "gp": 300}
GP_BLOCKS = ((50, 100), (100, 150), (250, 300))
OPTUNA_TRIALS = 3_000
BOUNDS = (
    ("tpe", 1_000, 16, 0.0),
    ("tpe", 1_000, 16, 0.005),
    ("tpe", 2_000, 8, 0.005),
    ("gp", 300, 3, 0.005),
)
"""Sampler, trials, searches and noise in nats of each comparison with an unbounded past."""
UNBOUNDED = {"tpe": "MOST_SHOWN", "gp": "MOST_FITTED"}
BASE = make_spec(num_slots=4)


def run_of(point: Params) -> RunSpec:
    """The run of a point: every value of it counts, as in a study."""
    hparams = dataclasses.replace(
        BASE.hparams, learning_rate=point["learning_rate"], clip_norm=point["clip_norm"]
    )
    schedule = dataclasses.replace(
        BASE.schedule, num_steps=1000, warmup_steps=int(1000 * point["warmup_fraction"])
    )
    return dataclasses.replace(BASE, hparams=hparams, schedule=schedule)


class Trivial:
    """A host whose runs have ended when they are asked for."""

    def advance(self, call: HostCall) -> HostAnswer:
        return HostAnswer(
            finished=tuple(
                self._ended(slot, canon.decode(RunSpec, data)) for slot, data in call.admit
            )
        )

    def _ended(self, slot: int, spec: RunSpec) -> Finished:
        schedule, hparams = spec.schedule, spec.hparams
        point = {
            "learning_rate": hparams.learning_rate,
            "clip_norm": hparams.clip_norm or 1.0,
            "warmup_fraction": schedule.warmup_steps / schedule.num_steps,
        }
        diverged = lost(point)
        curve = Curve(steps=(1, 2), train_loss_nats=(5.0, 3.0), grad_norm=(1.0, 1.0))
        result = RunResult(
            id=spec.id,
            status="diverged" if diverged else "finished",
            loss_nats=None if diverged else truth(point),
            num_steps=1000,
            last_train_loss_nats=3.0,
            curve_id=canon.content_id(curve),
            flops=1.0,
            tokens=spec.num_tokens,
            seconds=0.5,
            environment={},
            reason="above the cliff" if diverged else "",
        )
        return Finished(slot=slot, result=canon.to_json(result), curve=canon.to_json(curve))


class AtOnce:
    """A pool of one worker in this process, whose own time is counted apart: it is no driver's."""

    num_workers, calls_ahead = 1, 0

    def __init__(self) -> None:
        self._calls: list[HostCall] = []
        self.cpu_seconds = self.seconds = 0.0

    def start(self, worker: int, call: HostCall) -> None:
        self._calls.append(call)

    def wait(self, timeout_seconds: float) -> list[Report]:
        cpu, began = time.process_time(), time.monotonic()
        reports = [carry_out(0, call, Trivial) for call in self._calls]
        self._calls.clear()
        self.cpu_seconds += time.process_time() - cpu
        self.seconds += time.monotonic() - began
        return reports

    def restart(self, worker: int) -> None:
        self._calls.clear()

    def close(self) -> None:
        self._calls.clear()


def driven(sampler: str, num_trials: int, study: Path) -> dict[str, Any]:
    """One search through the real driver, looked at after every outcome."""
    looks, suggesting = [], 0.0
    plain = Search.suggest

    def timed(search: Search, told: dict[int, float | None]) -> Params:
        nonlocal suggesting
        began = time.process_time()
        point = plain(search, told)
        suggesting += time.process_time() - began
        return point

    def look(_: object = None) -> None:
        driver = (
            time.monotonic() - pool.seconds,
            time.process_time() - pool.cpu_seconds,
            suggesting,
        )
        looks.append((len(ledger.results()), *driver))

    pool = AtOnce()
    with (
        Ledger.open(study, {"seed": 7}, create=True) as ledger,
        mock.patch.object(Search, "suggest", timed),
    ):
        search = Search(SPACE, 7, PARALLELISM, sampler=sampler)
        source = SearchSource(search, run_of, ledger, stage="search", num_trials=num_trials)
        drive(
            source,
            pool,
            ledger,
            study,
            num_slots_for=lambda spec: spec.numerics.num_slots,
            bank_key_for=lambda spec: "one",
            progress=look,
        )
    blocks = GP_BLOCKS if sampler == "gp" else BLOCKS
    return {
        "sampler": sampler,
        "num_trials": num_trials,
        "outcomes": looks[-1][0],
        "blocks": [block(looks, *ends) for ends in blocks if ends[1] <= num_trials],
        "peak_rss_mb": own_peak_mb(),
        **reopened(sampler, num_trials, study),
    }


def block(looks: list[tuple[int, float, float, float]], begin: int, end: int) -> dict[str, float]:
    """Return the cost of a trial between two counts of outcomes.

    Two trials may be one run, so there may be fewer outcomes than trials.
    """
    first = next(look for look in looks if look[0] >= min(begin, looks[-1][0] - 1))
    last = next((look for look in looks if look[0] >= end), looks[-1])
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


def reopened(sampler: str, num_trials: int, study: Path) -> dict[str, float]:
    """What a resume costs: reading the ledger, then all that comes before the first new
    suggestion.
    """
    began = time.process_time()
    ledger = Ledger.read(study)
    read_seconds = time.process_time() - began
    points = [record.body for record in ledger.records("suggestion")]
    search = Search(SPACE, 7, PARALLELISM, sampler=sampler)
    results = ledger.results()
    told = {i: results[run_of(point).id].loss_nats for i, point in enumerate(points)}  # type: ignore[arg-type]
    began = time.process_time()
    for point in points[:-1]:
        search.add(point)  # type: ignore[arg-type]
    search.suggest(told)
    return {
        "read_cpu_ms_per_trial": 1e3 * read_seconds / num_trials,
        "resume_cpu_seconds": time.process_time() - began,
    }


def plain_optuna(num_trials: int) -> dict[str, Any]:
    """TPE in memory, ask and tell, with the same settings: what its own bookkeeping costs as a
    study grows.
    """
    import optuna

    axes = samplers._axes(SPACE)
    with samplers.quiet():
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=10, multivariate=True, constant_liar=True, seed=7
        )
        study = optuna.create_study(sampler=sampler)
        looks: list[tuple[int, float, float, float]] = []
        for number in range(num_trials):
            trial = study.ask(axes)
            point = samplers._to_point(SPACE, trial.params)
            study.tell(trial, 3.5 if lost(point) else truth(point))
            looks.append((number + 1, time.monotonic(), time.process_time(), 0.0))
    ends = [
        (begin, end)
        for begin, end in (*BLOCKS[:2], (1_900, 2_000), (2_900, 3_000))
        if end <= num_trials
    ]
    blocks = [block(looks, *each) for each in ends]
    return {"sampler": "optuna's tpe in memory", "num_trials": num_trials, "blocks": blocks}


def growth_table(most: int) -> list[dict[str, Any]]:
    """Every sampler in a process of its own."""
    rows = []
    for name, size in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                __file__,
                "--one",
                name,
                "--trials",
                str(min(size, most)),
                "--study",
                folder,
            ]
            rows.append(
                json.loads(
                    subprocess.run(command, check=True, capture_output=True, text=True).stdout
                )
            )
        say(rows[-1])
    rows.append(plain_optuna(min(OPTUNA_TRIALS, most)))
    say(rows[-1])
    return rows


def say(row: dict[str, Any]) -> None:
    """One sampler as text, and its ratios."""
    blocks = row["blocks"]
    row["cpu_ratio_last_to_first"] = blocks[-1]["cpu_ms"] / blocks[0]["cpu_ms"]
    row["wall_ratio_last_to_first"] = blocks[-1]["wall_ms"] / blocks[0]["wall_ms"]
    for each in blocks:
        print(
            f"{row['sampler']:22} to {each['to']:6}: {each['cpu_ms']:6.2f} ms, "
            f"{each['suggestion_cpu_ms']:.2f} of it "
            f"suggesting; wall {each['wall_ms']:.1f} ms",
            flush=True,
        )
    print(
        f"  last/first {row['cpu_ratio_last_to_first']:.2f}, wall "
        f"{row['wall_ratio_last_to_first']:.2f}",
        flush=True,
    )
    if "peak_rss_mb" in row:
        print(
            f"  {row['peak_rss_mb']:.0f} MB; read again in {row['read_cpu_ms_per_trial']:.2f} ms a "
            "trial, first "
            f"suggestion after it {row['resume_cpu_seconds']:.2f} s",
            flush=True,
        )


def searched(sampler: str, num_trials: int, noise_nats: float, seed: int) -> tuple[float, float]:
    """Regret of the best trial, and the median of the last hundred's that finished, in nats."""
    noise = np.random.default_rng(seed).normal(0, noise_nats, num_trials)
    search, told, points = (
        Search(SPACE, seed, PARALLELISM, sampler=sampler),
        dict[int, float | None](),
        [],
    )
    for index in range(num_trials):
        points.append(search.suggest(told))
        search.add(points[-1])
        told[index] = None if lost(points[-1]) else truth(points[-1]) + float(noise[index])
    best = min((loss, index) for index, loss in told.items() if loss is not None)[1]
    last = [truth(point) - 2.0 for point in points[-100:] if not lost(point)]
    return truth(points[best]) - 2.0, statistics.median(last)


def bound_row(sampler: str, num_trials: int, num_seeds: int, noise_nats: float) -> dict[str, Any]:
    """Both ways, seed by seed."""
    pairs = []
    for seed in range(num_seeds):
        bounded = searched(sampler, num_trials, noise_nats, seed)
        with mock.patch.object(samplers, UNBOUNDED[sampler], 10**9):
            pairs.append((bounded, searched(sampler, num_trials, noise_nats, seed)))
    row: dict[str, Any] = {
        "sampler": sampler,
        "num_trials": num_trials,
        "num_searches": num_seeds,
        "noise_nats": noise_nats,
    }
    for which, name in enumerate(("best", "last_hundred")):
        row[name] = ratio([math.log(bounded[which] / free[which]) for bounded, free in pairs])
        row[name]["bounded_median_nats"] = statistics.median(bounded[which] for bounded, _ in pairs)
        row[name]["unbounded_median_nats"] = statistics.median(free[which] for _, free in pairs)
    said = "; ".join(
        f"{name} {row[name]['ratio']:.2f} ({row[name]['low']:.2f} to {row[name]['high']:.2f}), "
        f"{row[name]['bounded_median_nats']:.1e} nats"
        for name in ("best", "last_hundred")
    )
    print(
        f"{sampler}, {num_trials} trials, noise {noise_nats}: regret bounded / unbounded: {said}",
        flush=True,
    )
    return row


def ratio(logs: list[float]) -> dict[str, float]:
    """Geometric mean with its 95 % interval, by bootstrap over seeds."""
    rng = np.random.default_rng(0)
    means = [float(np.mean(rng.choice(logs, len(logs)))) for _ in range(2_000)]
    low, high = np.quantile(means, [0.025, 0.975])
    return {"ratio": math.exp(statistics.mean(logs)), "low": math.exp(low), "high": math.exp(high)}


def bound_table(share: float) -> list[dict[str, Any]]:
    """Measure what the bounds change."""
    return [
        bound_row(sampler, trials, max(2, round(share * seeds)), noise)
        for sampler, trials, seeds, noise in BOUNDS
    ]


def main() -> None:
    """Print both tables and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="Where the numbers go.")
    parser.add_argument(
        "--only", choices=("growth", "bounds"), help="One table; the other one of the file stays."
    )
    parser.add_argument(
        "--quick", action="store_true", help="To 1,000 trials, a quarter of the seeds."
    )
    parser.add_argument("--one", choices=samplers.SAMPLERS, help=argparse.SUPPRESS)
    parser.add_argument("--trials", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--study", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(driven(asked.one, asked.trials, asked.study)))
        return
    kept = (
        json.loads(asked.json.read_text())
        if asked.only and asked.json and asked.json.exists()
        else {}
    )
    if asked.only != "bounds":
        kept["growth"] = {
            "rows": growth_table(1_000 if asked.quick else 10_000),
            "machine": machine(),
        }
    if asked.only != "growth":
        kept["bounds"] = {"rows": bound_table(0.25 if asked.quick else 1.0), "machine": machine()}
    if asked.json:
        asked.json.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
