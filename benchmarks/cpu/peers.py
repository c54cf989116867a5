"""Time and processor cost of forerun's search, Ray Tune, and Optuna for the same trials.

    python benchmarks/cpu/peers.py --json benchmarks/results/peers.json --peer-python PYTHON

1. The same search: same proxy, corpus, ranges, number of trials, and 2 workers of one thread.
   forerun runs `forerun sweep` on the plan that `forerun init` writes, without its repeats of the
   best trial, on Ray (two actors) and in one process. Ray Tune (a process per trial, or reused
   ones) and Optuna (two processes over SQLite) train each trial with `SingleTrialEngine`, which is
   forerun's engine for one trial. Measured are wall and processor seconds of the whole process
   tree, with the start of Python and Ray: for the whole search; until a trial is within 0.01 nats
   of the best trial of all searches; and until a trial is as good as the best of the search that
   ended worst. Each round has its own seed.
2. The cost of orchestration: an objective that trains nothing, measured from the start of the
   workers to the last outcome, and the peak memory of the driver with its libraries. forerun uses
   TPE, the ledger on disk and Ray's actors, as in a study.

In each round all searches run in turns, and ratios are taken within a round. The script prints a
line for each search and writes all rounds and ratios. PYTHON is an interpreter that has forerun and
`ray[tune]`; to make one:

    python -m venv peer && peer/bin/pip install -c constraints.txt torch -e . 'ray[tune]'
    peer/bin/pip uninstall -y torchvision

It takes about 45 minutes of two cores; `--quick` takes 3 minutes.
"""

from __future__ import annotations

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

from process_tree import Cost, measure_command, read_peak_memory_mb
from result_files import describe_machine, make_parser, write_result

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support" / "sweeps"))
NUM_WORKERS, NUM_SLOTS = 2, 4
"""Workers of each search, and trials that a worker of forerun trains at once."""
NEAR_NATS = 0.01
"""Nats above the best trial of all searches up to which a trial is near it."""
FORERUN = "forerun"
NUM_STEPS = {32: 200, 128: 60}
"""Steps of a run by width, so that each search takes one or two minutes of two cores."""
FORERUN_INLINE = {"forerun, inline": ('cluster.backend="inline"', "cluster.num_workers=1")}
"""Plan keys of forerun's search without Ray."""
TUNE_REUSES_ACTORS = {"tune": False, "tune, reused": True}
"""Ray Tune's searches, and whether each reuses actors."""
OPTUNA = "optuna"
SIZES = {100: TUNE_REUSES_ACTORS, 1000: {"tune, reused": True}}
"""Ray Tune's searches by the number of trials that train nothing. A process per trial would take
half an hour for 1,000 trials."""
QUICK_SIZES = {20: TUNE_REUSES_ACTORS}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONDONTWRITEBYTECODE": "",
}


def run_trivial_search(study: Path, num_trials: int, out: Path) -> None:
    """Run forerun's driver on an objective that trains nothing.

    These are the parts of `forerun sweep`, without a plan and a corpus.
    """
    from soak_case import TrivialHost
    from sweep_fakes import make_spec

    from forerun._sweeps.ray.pool import RayPool
    from forerun._sweeps.run.driver import drive
    from forerun._sweeps.search.source import Search, SearchSource
    from forerun._sweeps.search.space import build_search_space
    from forerun._sweeps.store.ledger import Ledger

    with Ledger.open(study, {"seed": 0}, create=True) as ledger:
        source = SearchSource(
            Search(build_search_space(ranges=RANGES), 0, NUM_SLOTS * NUM_WORKERS),
            lambda point: make_spec(log2_lr=math.log2(point["learning_rate"]), num_slots=NUM_SLOTS),
            ledger,
            stage="search",
            num_trials=num_trials,
        )
        pool = RayPool(NUM_WORKERS, TrivialHost)
        ended: list[tuple[float, float]] = []
        ready = time.time()

        def record_outcomes(event: Any) -> None:
            ended.extend((time.time(), run.result.loss_nats or math.inf) for run in event.outcomes)

        try:
            drive(
                source,
                pool,
                ledger,
                study,
                bank_key_for=lambda spec: "one",
                max_attempts=3,
                progress=record_outcomes,
            )
        finally:
            done = time.time()
            pool.close()
    peak = read_peak_memory_mb()
    out.write_text(json.dumps({"ready": ready, "done": done, "ended": ended, "peak_rss_mb": peak}))


def run_peer_search(
    python: Path, folder: Path, name: str, num_trials: int, plan: Path | None
) -> tuple[Cost, dict[str, Any]]:
    """Run one search by Ray Tune or Optuna; return its cost and what it wrote."""
    folder.mkdir()
    request = {
        "plan": None if plan is None else str(plan),
        "study": str(folder / "ray"),
        "num_trials": num_trials,
        "num_workers": NUM_WORKERS,
        "reuse_actors": TUNE_REUSES_ACTORS.get(name),
        "out": str(folder / "out.json"),
    }
    (folder / "request.json").write_text(json.dumps(request))
    script = Path(__file__).with_name("peers_optuna.py" if name == OPTUNA else "peers_tune.py")
    cost = measure_command([python, script, folder / "request.json"], ENVIRONMENT, folder / "log")
    return cost, json.loads((folder / "out.json").read_text())


def run_sweep(
    folder: Path, plan: Path, keys: tuple[str, ...] = ()
) -> tuple[Cost, list[tuple[float, float]]]:
    """Run one `forerun sweep`; return its cost, and pairs of end time and loss of its trials.

    A run's curve is written when the run ends, so the time of that file is the end time.
    """
    from forerun._sweeps.store.ledger import Ledger

    changes = [part for key in keys for part in ("--set", key)]
    command = [sys.executable, "-m", "forerun", "sweep", plan, "--study", folder, *changes]
    cost = measure_command(command, ENVIRONMENT, Path(f"{folder}.log"))
    end_times = {path.stem: path.stat().st_mtime for path in (folder / "curves").iterdir()}
    results = Ledger.read(folder).get_results()
    return cost, sorted(
        (end_times[run_id], result.loss_nats or math.inf) for run_id, result in results.items()
    )


def make_row(
    cost: Cost, ended: list[tuple[float, float]], best: float, common: float
) -> dict[str, float | None]:
    """Return the costs of one search.

    Args:
        cost: Cost of the command.
        ended: Pairs of end time and loss of its trials.
        best: Best loss of all searches.
        common: Best loss of the search that ended worst, which all searches reach.
    """
    row: dict[str, float | None] = {
        "seconds": cost.seconds,
        "cpu_seconds": cost.cpu_seconds,
        "regret_nats": min(loss for _, loss in ended) - best,
        "driver_peak_mb": cost.peak_rss_mb,
    }
    for name, limit in (("near_best", best + NEAR_NATS), ("common", common)):
        when = next((when for when, loss in ended if loss <= limit), None)
        row[f"seconds_to_{name}"] = None if when is None else when - cost.began
        row[f"cpu_seconds_to_{name}"] = None if when is None else cost.find_cpu_seconds(when)
    return row


def compare_searches(
    python: Path, folder: Path, corpus: Path, width: int, num_trials: int, num_rounds: int
) -> dict[str, Any]:
    """Run the same search in all ways, round by round, and return the rows."""
    rounds = []
    for number in range(num_rounds):
        round_folder = folder / f"{width}-{num_trials}-{number}"
        round_folder.mkdir()
        plan = round_folder / "plan.toml"
        plan.write_text(
            f'[data]\npath = "{corpus}"\n[proxy]\nbase_width = {width}\nnum_steps = '
            f"{NUM_STEPS[width]}\n"
            'num_slots = "auto"\ncompiled = "auto"\n[search]\n'
            f"num_trials = {num_trials}\ntie_seeds = 0\nseed = {number}\n[cluster]\nnum_workers = "
            f"{NUM_WORKERS}\n"
        )
        outcomes = {FORERUN: run_sweep(round_folder / "ours", plan)}
        outcomes |= {
            name: run_sweep(round_folder / name.replace(", ", "-"), plan, keys)
            for name, keys in FORERUN_INLINE.items()
        }
        for name in (*TUNE_REUSES_ACTORS, OPTUNA):
            cost, output = run_peer_search(
                python, round_folder / name.replace(", ", "-"), name, num_trials, plan
            )
            outcomes[name] = cost, [tuple(pair) for pair in output["ended"]]
        bests = [min(loss for _, loss in ended) for _, ended in outcomes.values()]
        rounds.append(
            {
                name: make_row(cost, ended, min(bests), max(bests))
                for name, (cost, ended) in outcomes.items()
            }
        )
        for name, row in rounds[-1].items():
            print(
                f"width {width}, {num_trials} trials, {name:15} {row['seconds']:6.1f} s wall time, "
                f"{row['cpu_seconds']:6.1f} s processor time; near the best trial after "
                f"{row['seconds_to_near_best'] or math.nan:.1f} s, as good as all searches after "
                f"{row['seconds_to_common']:.1f} s; regret {row['regret_nats']:.4f} nats",
                flush=True,
            )
    return {
        "width": width,
        "num_trials": num_trials,
        "rounds": rounds,
        "theirs_over_ours": compute_ratios(rounds),
    }


def compare_orchestration(
    python: Path, folder: Path, num_trials: int, num_rounds: int, tune_arms: dict[str, bool]
) -> dict[str, Any]:
    """Run trials that train nothing in all ways, round by round, and return the rows."""
    rounds = []
    for number in range(num_rounds):
        round_folder = folder / f"trivial-{num_trials}-{number}"
        round_folder.mkdir()
        outcomes = {}
        command = [
            sys.executable,
            __file__,
            "drive",
            round_folder / "study",
            str(num_trials),
            round_folder / "out.json",
        ]
        cost = measure_command(command, ENVIRONMENT, round_folder / "log")
        outcomes[FORERUN] = cost, json.loads((round_folder / "out.json").read_text())
        for name in tune_arms:
            outcomes[name] = run_peer_search(
                python, round_folder / name.replace(", ", "-"), name, num_trials, None
            )
        rounds.append(
            {
                name: {
                    "ms_per_trial": 1e3 * (output["done"] - output["ready"]) / num_trials,
                    "cpu_ms_per_trial": 1e3
                    * (
                        cost.find_cpu_seconds(output["done"])
                        - cost.find_cpu_seconds(output["ready"])
                    )
                    / num_trials,
                    "driver_peak_mb": output["peak_rss_mb"],
                }
                for name, (cost, output) in outcomes.items()
            }
        )
        for name, row in rounds[-1].items():
            print(
                f"nothing to train, {num_trials} trials, {name:13} {row['ms_per_trial']:7.1f} ms "
                f"wall time and {row['cpu_ms_per_trial']:7.1f} ms processor time per trial; "
                f"driver {row['driver_peak_mb']:.0f} MB",
                flush=True,
            )
    return {"num_trials": num_trials, "rounds": rounds, "theirs_over_ours": compute_ratios(rounds)}


def compute_ratios(rounds: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Print and return the ratios of the other searches' costs to forerun's.

    Each ratio has its minimum, median and maximum over the rounds.
    """
    ratios: dict[str, dict[str, list[float]]] = {}
    for name in rounds[0]:
        if name == FORERUN:
            continue
        ratios[name] = {}
        for cost_name in rounds[0][FORERUN]:
            if cost_name == "regret_nats":  # it may be zero
                continue
            pairs = [(rows[name][cost_name], rows[FORERUN][cost_name]) for rows in rounds]
            round_ratios = sorted(peer / forerun for peer, forerun in pairs if peer and forerun)
            if len(round_ratios) == len(rounds):  # both came near the best in each round
                ratios[name][cost_name] = [
                    round_ratios[0],
                    statistics.median(round_ratios),
                    round_ratios[-1],
                ]
        text = ", ".join(
            f"{cost_name} {median:.2f} ({low:.2f} to {high:.2f})"
            for cost_name, (low, median, high) in ratios[name].items()
        )
        print(f"  {name} over forerun: {text}", flush=True)
    return ratios


def read_peer_versions(python: Path) -> str | None:
    """Return the versions that an interpreter has; None if it lacks a package."""
    program = "import importlib.metadata as m, optuna, forerun; from ray import tune"
    program += "; print(*(f'{name} {m.version(name)}' for name in ('ray', 'optuna', 'torch')))"
    process = subprocess.run(
        [python, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    return None if process.returncode else process.stdout.strip()


def write_corpus(corpus: Path, package: str) -> None:
    """Tokenize a package of Python's standard library, or all of it if `package` is empty."""
    library = Path(sysconfig.get_paths()["stdlib"], package)
    command = [sys.executable, "-m", "forerun", "tokenize", library, "--out", corpus]
    command += ["--suffix", ".py", "--exclude", "site-packages", "--exclude", "dist-packages"]
    measure_command(command, ENVIRONMENT, corpus.with_name("log"))


def main() -> int:
    """Check the other interpreter, measure both parts, and write the result."""
    if sys.argv[1:2] == ["drive"]:
        run_trivial_search(Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
        return 0
    parser = make_parser(__doc__, quick="Measure one round of the smallest case of each part.")
    parser.add_argument(
        "--peer-python",
        type=Path,
        default=Path(sys.executable),
        help="Interpreter that has ray[tune]; by default this one.",
    )
    parser.add_argument("--rounds", type=int, default=3, help="Rounds per case.")
    parser.add_argument(
        "--only",
        choices=("searches", "nothing"),
        help="Measure one part: the search, or trials that train nothing.",
    )
    options = parser.parse_args()
    peer_versions = read_peer_versions(options.peer_python)
    if peer_versions is None:
        # The end of the module's docstring has the commands that make such an interpreter.
        print(
            f"{options.peer_python} lacks ray[tune], optuna or forerun; to make "
            f"one:\n{__doc__.split('make one:')[1]}"
        )
        return 2
    num_rounds, began = 1 if options.quick else options.rounds, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus"
        write_corpus(corpus, "asyncio" if options.quick else "")
        cases = [(32, 16)] if options.quick else [(32, 32), (128, 32)]
        searches = [
            compare_searches(options.peer_python, folder, corpus, *case, num_rounds)
            for case in cases
            if options.only != "nothing"
        ]
        orchestration = [
            compare_orchestration(options.peer_python, folder, num_trials, num_rounds, tune_arms)
            for num_trials, tune_arms in (QUICK_SIZES if options.quick else SIZES).items()
            if options.only != "searches"
        ]
    result = {
        "searches": searches,
        "nothing_to_train": orchestration,
        "num_workers": NUM_WORKERS,
        "num_slots": NUM_SLOTS,
        "seconds": round(time.monotonic() - began),
        "machine": describe_machine(),
        "versions": {name: importlib.metadata.version(name) for name in ("ray", "optuna", "torch")},
        "peer_versions": peer_versions,
    }
    write_result(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
