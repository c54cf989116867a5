"""How exact and how fast the fits of scaling laws are, against slow references and packages from PyPI.

    OMP_NUM_THREADS=1 python benchmarks/fits.py --json benchmarks/results/fits.json --peers PYTHON

1. Exactness: planted truths come back; objectives of public sets are the published ones; and every form's objective on
   public and planted runs is within 1e-8 of a reference by scipy that shares no code with the solver.
2. Speed on one core at 240 runs, in CPU time, least of several; memory of refits by tracemalloc.
3. The peers `chinchilla` and `simple-scaling-laws`, where PYTHON is an interpreter that has them: same runs.

Public sets are read from the folder `shared/data` beside the checkout, and left out where it is absent. It takes about
5 minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fits_reference
import numpy as np
import scipy

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "scaling_fits"))

from planted_ladders import CHINCHILLA, COUPLED, TRUTHS, ladder

from scaling_fits.laws import law, search
from scaling_fits.laws.forms import SHAPES, Form
from scaling_fits.laws.solver import Floats
from scaling_fits.laws.table import RunTable, read_runs

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
PUBLISHED = {  # sums over runs, as printed by the authors' repository (arXiv 2502.06857)
    "cool_end": 0.0019640864, "hot": 0.0019816128, "slim_chinchilla": 0.0001204360, "hot_100b_plus": 0.0065925342,
    "lr_ablation_hot": 0.0019728624, "cool_begin": 0.0019515325, "hot_120b_plus_only": 0.0038623980,
}  # fmt: skip
DEGENERATE = "hot_100b_plus_512x"
NUM_RUNS = (11, 17, 30, 60, 240)
NOISE_NATS = 0.01


def planted(truth: dict[str, float], num_runs: int, seed: int, noise: float = NOISE_NATS) -> RunTable:
    """Runs of a grid over three decades of sizes and of tokens."""
    per_axis = (15, 16) if num_runs > 64 else (8, 8)
    sizes, tokens = np.geomspace(1e6, 1e9, per_axis[0]), np.geomspace(1e7, 1e10, per_axis[1])
    return ladder(truth, np.random.default_rng(seed), noise, num_runs, sizes, tokens)


def public(name: str) -> RunTable | None:
    """One public set, None where it is absent."""
    path = DATA / f"{name}.csv"
    return read_runs(path) if path.exists() else None


def cpu(action: Callable[[], Any], times: int) -> float:
    """Least CPU seconds of several tries."""
    best = np.inf
    for _ in range(times):
        started = time.process_time()
        action()
        best = min(best, time.process_time() - started)
    return float(best)


def exactness() -> dict[str, Any]:
    """Truths, published objectives and the reference by scipy."""
    result: dict[str, Any] = {"planted": {}, "published": {}, "against_scipy": []}
    for form, truth in TRUTHS.items():
        found = law.fit_law(planted(truth, 64, 0, noise=0.0), form).parameters
        result["planted"][form] = max(abs(found[name] / value - 1) for name, value in truth.items())
    print("planted truths, largest relative error: ", {k: f"{v:.1e}" for k, v in result["planted"].items()})
    tables = {f"chinchilla, {num} runs": planted(CHINCHILLA, num, num) for num in NUM_RUNS}
    tables |= {f"coupled, {num} runs": planted(COUPLED, num, num) for num in NUM_RUNS}
    for name in (*PUBLISHED, DEGENERATE):
        table = public(f"gemstones/{name}")
        if table is not None:
            fit = law.fit_law(table, "chinchilla")
            error = None if name == DEGENERATE else fit.objective / PUBLISHED[name] - 1
            result["published"][name] = {"objective": fit.objective, "relative_error": error, "status": fit.status}
            print(f"  {name:<22}{fit.objective:.10f}  {fit.status}  {'' if error is None else f'{error:+.1e}'}")
            tables[f"gemstones/{name}"] = table
    gadre = public("gadre_redpajama/runs")
    if gadre is not None:
        tables["gadre_redpajama"] = gadre
    for name, table in tables.items():
        for form in SHAPES:
            result["against_scipy"].append(against_scipy(name, table, form))
    worst = max(row["over_reference"] for row in result["against_scipy"])
    behind = sum(row["over_reference"] < -1e-8 for row in result["against_scipy"])
    print(
        f"against scipy: {len(result['against_scipy'])} fits, ours at most {worst:.1e} above, lower by > 1e-8: {behind}"
    )
    return result


def against_scipy(name: str, table: RunTable, form: Form) -> dict[str, Any]:
    """Our objective over the reference's, less one."""
    points, _ = law.centred_points(table)
    fit = law.fit_law(table, form)
    objective, _ = fits_reference.optimum(
        form, points.n, points.d, points.y, table.weight, 40, np.random.default_rng(0)
    )
    ours = float("inf") if fit.objective is None else fit.objective
    if ours / objective - 1 > 1e-8:
        print(f"  above the reference: {name}, {form}: {ours / objective - 1:+.1e} ({fit.status})")
    return {"runs": name, "form": form, "status": fit.status, "over_reference": ours / objective - 1}


def weights(num: int, num_runs: int, seed: int) -> Floats:
    """Rows of bootstrap weights that add up to the number of runs."""
    return np.random.default_rng(seed).dirichlet(np.ones(num_runs), size=num) * num_runs


def speed() -> dict[str, Any]:
    """CPU time at 240 runs, and the memory of refits."""
    table, result = planted(CHINCHILLA, 240, 0), {}
    for form in SHAPES:
        fit = law.fit_law(table, form)
        weight = weights(4000, 240, 0)
        result[form] = {
            "fit_seconds": cpu(lambda form=form: law.fit_law(table, form), 7),
            "refits_4000_seconds": cpu(lambda fit=fit, weight=weight: law.refits(table, fit, np.split(weight, 8)), 2),
        }
        print(f"{form:<14}one fit {1e3 * result[form]['fit_seconds']:.1f} ms, "
              f"4,000 refits {result[form]['refits_4000_seconds']:.2f} s")  # fmt: skip
    fit = law.fit_law(table, "chinchilla")
    for num in (1000, 16000):
        blocks = (weights(search.BLOCK, 240, seed) for seed in range(-(-num // search.BLOCK)))
        tracemalloc.start()
        law.refits(table, fit, blocks)
        result[f"peak_megabytes_{num}_refits"] = tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
        print(f"peak memory of {num} refits: {result[f'peak_megabytes_{num}_refits']:.1f} MB")
    return result


def peers(python: Path | None) -> dict[str, Any]:
    """The same 240 runs given to the peers."""
    if python is None:
        print("peers: not compared (--peers PYTHON: an interpreter that has chinchilla and simple-scaling-laws)")
        return {"not_compared": "no --peers"}
    table = planted(CHINCHILLA, 240, 0)
    runs = {name: getattr(table, name).tolist() for name in ("params", "tokens", "loss")}
    script = Path(__file__).with_name("fits_peers.py")
    told = subprocess.run([python, script], input=json.dumps(runs), capture_output=True, text=True, check=False)
    if told.returncode != 0:
        return {"not_compared": told.stderr[-500:]}
    result: dict[str, Any] = json.loads(told.stdout)
    ours, best = cpu(lambda: law.fit_law(table, "chinchilla"), 5), law.fit_law(table, "chinchilla").objective
    result["forerun"] = {"cpu_seconds": ours, "objective": best}
    points = np.log(table.params), np.log(table.tokens), np.log(table.loss)
    for name, row in result.items():
        if "theta" in row:
            x = np.array(row["theta"])[:5]
            row["objective"], _ = fits_reference.value_and_slope(x, "chinchilla", *points, table.weight)
            print(f"{name:<22}{row['cpu_seconds']:.3f} s, {row['cpu_seconds'] / ours:.1f} times ours; "
                  f"objective {row['objective'] / best - 1:+.1e} relative to ours")  # fmt: skip
        elif "not_compared" in row:
            print(f"{name}: not compared ({row['not_compared']})")
    return result


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description="Exactness and speed of the fits of scaling laws.")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "fits.json")
    parser.add_argument("--peers", type=Path, help="Interpreter that has the packages to compare with.")
    options = parser.parse_args()
    started = time.process_time()
    result = {
        "command": "python benchmarks/fits.py",
        "machine": {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "scipy": scipy.__version__},
        "threads": os.environ.get("OMP_NUM_THREADS"), "public_sets": DATA.exists(),
        "exactness": exactness(), "speed": speed(), "peers": peers(options.peers),
    }  # fmt: skip
    result["cpu_seconds"] = round(time.process_time() - started)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwrote {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
