"""Our search beside what a user would pick: Ray Tune with OptunaSearch, or processes that share
Optuna's study.

    python benchmarks/cpu/peers.py --json benchmarks/results/peers.json --peer-python PYTHON

1. The same search: same proxy, corpus, space, number of trials, 2 workers of one thread. Ours is
   `forerun sweep` on the plan that `forerun init` writes, less its repeats of the best, on Ray (two
   actors) and in one process; theirs trains each trial by `proxies.training.solo.Solo` (our engine
   for one trial): Ray Tune in a process per trial or in reused ones, Optuna in two processes over
   SQLite. Told: wall and processor seconds of the whole process tree, Python's and Ray's start
   included; and, along the trials as they ended, until one is within 0.01 nats of the best of all
   trials of all, and until one is as good as the best of the search that ended worst. A round has
   its own seed.
2. The cost of orchestration: an objective that costs nothing, from the workers' start to the last
   outcome; and the driver's largest memory, its libraries included. Ours has TPE, the ledger on
   disk and Ray's actors, as in a study.

Every round runs ours, then theirs; ratios are taken within a round. PYTHON has forerun and
`ray[tune]`; to make one:

    python -m venv peer && peer/bin/pip install -c constraints.txt torch -e . 'ray[tune]'
    peer/bin/pip uninstall -y torchvision

It takes some 45 minutes of two cores, the most of them theirs; `--quick` takes 3.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from peers_objective import RANGES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from process_tree import Cost, machine, measure_command, own_peak_mb

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "sweeps"))
NUM_WORKERS, NUM_SLOTS, NEAR_NATS = 2, 4, 0.01
OURS = "forerun"
NUM_STEPS = {32: 200, 128: 60}
"""By width: a minute or two of two cores each."""
INLINE = {"forerun, inline": ('cluster.backend="inline"', "cluster.num_workers=1")}
"""Our other arms: keys of the plan."""
THEIRS = {"tune": False, "tune, reused": True}
"""Ray Tune's arms: whether actors are reused."""
OPTUNA = "optuna"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONDONTWRITEBYTECODE": "",
}


def drive_trivial(study: Path, num_trials: int, out: Path) -> None:
    """Our driver on an objective that costs nothing: what `forerun sweep` is made of, without a
    plan and a corpus.
    """
    from soak_case import TrivialHost
    from sweep_fakes import make_spec

    from sweeps.ray.pool import RayPool
    from sweeps.run.driver import drive
    from sweeps.search.source import Search, SearchSource
    from sweeps.search.space import search_space
    from sweeps.store.ledger import Ledger

    with Ledger.open(study, {"seed": 0}, create=True) as ledger:
        source = SearchSource(
            Search(search_space(ranges=RANGES), 0, NUM_SLOTS * NUM_WORKERS),
            lambda point: make_spec(log2_lr=math.log2(point["learning_rate"]), num_slots=NUM_SLOTS),
            ledger,
            stage="search",
            num_trials=num_trials,
        )
        pool = RayPool(NUM_WORKERS, TrivialHost)
        ended: list[tuple[float, float]] = []
        ready = time.time()

        def progress(event: Any) -> None:
            ended.extend((time.time(), outcome.loss_nats or math.inf) for outcome in event.outcomes)

        try:
            drive(
                source,
                pool,
                ledger,
                study,
                num_slots_for=lambda spec: NUM_SLOTS,
                bank_key_for=lambda spec: "one",
                max_attempts=3,
                progress=progress,
            )
        finally:
            done = time.time()
            pool.close()
    peak = own_peak_mb()
    out.write_text(json.dumps({"ready": ready, "done": done, "ended": ended, "peak_rss_mb": peak}))


def theirs(
    python: Path, folder: Path, name: str, num_trials: int, plan: Path | None
) -> tuple[Cost, dict[str, Any]]:
    """One search of an arm of theirs: its cost, and what it wrote."""
    folder.mkdir()
    asked = {
        "plan": plan and str(plan),
        "study": str(folder / "ray"),
        "num_trials": num_trials,
        "num_workers": NUM_WORKERS,
        "reuse_actors": THEIRS.get(name),
        "out": str(folder / "out.json"),
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    script = Path(__file__).with_name("peers_optuna.py" if name == OPTUNA else "peers_tune.py")
    cost = measure_command([python, script, folder / "asked.json"], ENVIRONMENT, folder / "log")
    return cost, json.loads((folder / "out.json").read_text())


def sweep(
    folder: Path, plan: Path, keys: tuple[str, ...] = ()
) -> tuple[Cost, list[tuple[float, float]]]:
    """One `forerun sweep`: its cost, and (when, loss) of its trials; a curve is written when its
    run has ended.
    """
    from sweeps.store.ledger import Ledger

    changes = [part for key in keys for part in ("--set", key)]
    command = [sys.executable, "-m", "launcher", "sweep", plan, "--study", folder, *changes]
    cost = measure_command(command, ENVIRONMENT, Path(f"{folder}.log"))
    when = {path.stem: path.stat().st_mtime for path in (folder / "curves").iterdir()}
    results = Ledger.read(folder).results()
    return cost, sorted(
        (when[id_], result.loss_nats or math.inf) for id_, result in results.items()
    )


def row_of(
    cost: Cost, ended: list[tuple[float, float]], best: float, common: float
) -> dict[str, float | None]:
    """What one search took in all; until a trial was near the `best` of all searches, None if none
    was; and until one was as good as the best of the search that ended worst, which all have
    reached.
    """
    row: dict[str, float | None] = {
        "seconds": cost.seconds,
        "cpu_seconds": cost.cpu_seconds,
        "regret_nats": min(loss for _, loss in ended) - best,
        "driver_peak_mb": cost.peak_rss_mb,
    }
    for name, limit in (("near_best", best + NEAR_NATS), ("common", common)):
        when = next((when for when, loss in ended if loss <= limit), None)
        row[f"seconds_to_{name}"] = when and when - cost.began
        row[f"cpu_seconds_to_{name}"] = when and cost.cpu_seconds_at(when)
    return row


def searches(
    python: Path, folder: Path, corpus: Path, width: int, num_trials: int, num_rounds: int
) -> dict[str, Any]:
    """The same search by all, in turns."""
    rounds = []
    for number in range(num_rounds):
        at = folder / f"{width}-{num_trials}-{number}"
        at.mkdir()
        plan = at / "plan.toml"
        plan.write_text(
            f'[data]\npath = "{corpus}"\n[proxy]\nbase_width = {width}\nnum_steps = '
            f"{NUM_STEPS[width]}\n"
            'num_slots = "auto"\ncompiled = "auto"\n[search]\n'
            f"num_trials = {num_trials}\ntie_seeds = 0\nseed = {number}\n[cluster]\nnum_workers = "
            f"{NUM_WORKERS}\n"
        )
        found = {OURS: sweep(at / "ours", plan)}
        found |= {
            name: sweep(at / name.replace(", ", "-"), plan, keys) for name, keys in INLINE.items()
        }
        for name in (*THEIRS, OPTUNA):
            cost, body = theirs(python, at / name.replace(", ", "-"), name, num_trials, plan)
            found[name] = cost, [tuple(pair) for pair in body["ended"]]
        bests = [min(loss for _, loss in ended) for _, ended in found.values()]
        rounds.append(
            {
                name: row_of(cost, ended, min(bests), max(bests))
                for name, (cost, ended) in found.items()
            }
        )
        for name, row in rounds[-1].items():
            print(
                f"width {width}, {num_trials} trials, {name:15} {row['seconds']:6.1f} s, "
                f"{row['cpu_seconds']:6.1f} s "
                f"of processors; near the best after {row['seconds_to_near_best'] or math.nan:.1f} "
                "s, at what "
                f"all reach after {row['seconds_to_common']:.1f}; regret {row['regret_nats']:.4f}",
                flush=True,
            )
    return {
        "width": width,
        "num_trials": num_trials,
        "rounds": rounds,
        "theirs_over_ours": ratios(rounds),
    }


def trivial(
    python: Path, folder: Path, num_trials: int, num_rounds: int, arms: dict[str, bool]
) -> dict[str, Any]:
    """Orchestration alone, in turns."""
    rounds = []
    for number in range(num_rounds):
        at = folder / f"trivial-{num_trials}-{number}"
        at.mkdir()
        found = {}
        command = [
            sys.executable,
            __file__,
            "drive",
            at / "study",
            str(num_trials),
            at / "out.json",
        ]
        cost = measure_command(command, ENVIRONMENT, at / "log")
        found[OURS] = cost, json.loads((at / "out.json").read_text())
        for name in arms:
            found[name] = theirs(python, at / name.replace(", ", "-"), name, num_trials, None)
        rounds.append(
            {
                name: {
                    "ms_per_trial": 1e3 * (body["done"] - body["ready"]) / num_trials,
                    "cpu_ms_per_trial": 1e3
                    * (cost.cpu_seconds_at(body["done"]) - cost.cpu_seconds_at(body["ready"]))
                    / num_trials,
                    "driver_peak_mb": body["peak_rss_mb"],
                }
                for name, (cost, body) in found.items()
            }
        )
        for name, row in rounds[-1].items():
            print(
                f"nothing to train, {num_trials} trials, {name:13} {row['ms_per_trial']:7.1f} ms a "
                "trial, "
                f"{row['cpu_ms_per_trial']:7.1f} of processors; driver {row['driver_peak_mb']:.0f} "
                "MB",
                flush=True,
            )
    return {"num_trials": num_trials, "rounds": rounds, "theirs_over_ours": ratios(rounds)}


def ratios(rounds: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Theirs over ours, [least, median, largest] over the rounds."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in rounds[0]:
        if name == OURS:
            continue
        found[name] = {}
        for what in rounds[0][OURS]:
            if what == "regret_nats":  # it may be zero
                continue
            pairs = [(r[name][what], r[OURS][what]) for r in rounds]
            each = sorted(theirs / ours for theirs, ours in pairs if theirs and ours)
            if len(each) == len(rounds):  # both came near the best in each round
                found[name][what] = [each[0], statistics.median(each), each[-1]]
        said = ", ".join(
            f"{what} {m:.2f} ({low:.2f} to {high:.2f})"
            for what, (low, m, high) in found[name].items()
        )
        print(f"  {name} over ours: {said}", flush=True)
    return found


def main() -> int:
    """Measure, print, write."""
    if sys.argv[1:2] == ["drive"]:
        drive_trivial(Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--peer-python",
        type=Path,
        default=Path(sys.executable),
        help="It has ray[tune]; else ours.",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only",
        choices=("searches", "nothing"),
        help="One part: to train, or with nothing to train.",
    )
    parser.add_argument("--quick", action="store_true", help="One round of the smallest of each.")
    asked = parser.parse_args()
    versions = "import importlib.metadata as m, optuna, proxies; from ray import tune"
    versions += "; print(*(f'{name} {m.version(name)}' for name in ('ray', 'optuna', 'torch')))"
    there = subprocess.run(
        [asked.peer_python, "-c", versions],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if there.returncode:
        print(
            f"{asked.peer_python} lacks ray[tune], optuna or forerun; to make "
            f"one:\n{__doc__.split('make one:')[1]}"
        )
        return 2
    num_rounds, began = 1 if asked.quick else asked.rounds, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus"
        library = Path(sysconfig.get_paths()["stdlib"], "asyncio" if asked.quick else "")
        tokenized = [
            sys.executable,
            "-m",
            "launcher",
            "tokenize",
            library,
            "--out",
            corpus,
            "--suffix",
            ".py",
        ]
        excluded = ["--exclude", "site-packages", "--exclude", "dist-packages"]
        measure_command([*tokenized, *excluded], ENVIRONMENT, folder / "log")
        cases = [(32, 16)] if asked.quick else [(32, 32), (128, 32)]
        cases = [] if asked.only == "nothing" else cases
        same = [searches(asked.peer_python, folder, corpus, *case, num_rounds) for case in cases]
        reused = {"tune, reused": True}  # a process for each of 1,000 would take half an hour
        sizes: dict[int, dict[str, bool]] = (
            {20: THEIRS} if asked.quick else {100: THEIRS, 1000: reused}
        )
        sizes = {} if asked.only == "searches" else sizes
        free = [
            trivial(asked.peer_python, folder, size, num_rounds, arms)
            for size, arms in sizes.items()
        ]
    body = {
        "searches": same,
        "nothing_to_train": free,
        "num_workers": NUM_WORKERS,
        "num_slots": NUM_SLOTS,
        "seconds": round(time.monotonic() - began),
        "machine": machine(),
        "versions": {name: importlib.metadata.version(name) for name in ("ray", "optuna", "torch")},
        "peer_versions": there.stdout.strip(),
    }
    if asked.json:
        asked.json.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
