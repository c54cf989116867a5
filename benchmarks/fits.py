"""How exact, how sure and how fast the fits of scaling laws are, against slow references and packages from PyPI.

    OMP_NUM_THREADS=1 python benchmarks/fits.py --json benchmarks/results/fits.json --peers PYTHON

1. Exactness: planted truths come back; objectives of public sets are the published ones; and every form's objective on
   public and planted runs is within 1e-8 of a reference by scipy that shares no code with the solver.
2. Convergence: bootstrap refits within 1e-3 of the best that a far longer search finds, with random starts for each
   (and, on some, scipy), at 11 to 240 runs, under Dirichlet and multinomial weights. A few runs may be met exactly, so
   a refit also counts where it is within 1e-10 squared nats per unit of weight: a residual of 1.4e-5 nats.
3. Speed on one core at 240 runs, in CPU time, least of several; memory of refits by tracemalloc.
4. The peers `chinchilla` and `simple-scaling-laws`, where PYTHON is an interpreter that has them: same runs.

Public sets are read from the folder `shared/data` beside the checkout, and left out where it is absent. It takes about
10 minutes of one core; `--quick` draws fewer refits.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fits_reference
import numpy as np
import scipy

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "scaling_fits"))

from planted_ladders import CHINCHILLA, COUPLED, TRUTHS, ladder

from scaling_fits.laws import law, search
from scaling_fits.laws.forms import SHAPES, Form
from scaling_fits.laws.solver import Floats, Points
from scaling_fits.laws.table import RunTable, read_runs

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
PUBLISHED = {  # sums over runs, as printed by the authors' repository (arXiv 2502.06857)
    "cool_end": 0.0019640864, "hot": 0.0019816128, "slim_chinchilla": 0.0001204360, "hot_100b_plus": 0.0065925342,
    "lr_ablation_hot": 0.0019728624, "cool_begin": 0.0019515325, "hot_120b_plus_only": 0.0038623980,
}  # fmt: skip
DEGENERATE = "hot_100b_plus_512x"
NUM_RUNS = (11, 17, 30, 60, 240)
NEAR, FLOOR = 1e-3, 1e-10
NOISE_NATS = 0.01
NUM_RANDOM = 20  # random starts of the reference, for every refit


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


def weights(kind: str, num: int, num_runs: int, seed: int) -> Floats:
    """Rows of bootstrap weights that add up to the number of runs."""
    rng = np.random.default_rng(seed)
    if kind == "dirichlet":
        return rng.dirichlet(np.ones(num_runs), size=num) * num_runs
    return rng.multinomial(num_runs, np.full(num_runs, 1 / num_runs), size=num).astype(float)


def sources(num_runs: int) -> Iterator[tuple[str, RunTable]]:
    """Ladders to refit: two planted laws, and public runs drawn without putting back."""
    yield "chinchilla", planted(CHINCHILLA, num_runs, num_runs)
    yield "coupled", planted(COUPLED, num_runs, num_runs + 1)
    for name in ("gemstones/hot_100b_plus", "gadre_redpajama/runs"):
        table = public(name)
        if table is not None and table.num_runs >= num_runs:
            keep = np.random.default_rng(num_runs).permutation(table.num_runs)[:num_runs]
            yield name, table.rows(np.sort(keep))


def refits(table: RunTable, form: Form, kind: str, num: int, num_checked: int) -> dict[str, Any] | None:
    """How many refits reached the best known objective; None where the law is unidentified."""
    fit = law.fit_law(table, form)
    if not fit.identified:
        return None
    weight = weights(kind, num, table.num_runs, 1)
    found = law.refit(table, fit, weight)
    best = np.minimum(found.objective, heavy(table, form, weight, found.theta))
    points, _ = law.centred_points(table)
    below = 0
    for index in range(num_checked):
        rng = np.random.default_rng(index)
        objective, _ = fits_reference.optimum(form, points.n, points.d, points.y, weight[index], 20, rng)
        below += objective < best[index] * (1 - NEAR) - FLOOR * table.num_runs
        best[index] = min(best[index], objective)
    strict = found.objective <= best * (1 + NEAR)
    reached = found.objective <= best * (1 + NEAR) + FLOOR * table.num_runs
    return {
        "num_runs": table.num_runs, "form": form, "weights": kind, "num": num, "reached": float(reached.mean()),
        "reached_without_floor": float(strict.mean()), "unsettled": float((~found.converged).mean()),
        "reference_by_scipy_lower": int(below), "worst": float((found.objective / np.maximum(best, 1e-300)).max() - 1),
    }  # fmt: skip


def heavy(table: RunTable, form: Form, weight: Floats, near: Floats) -> Floats:
    """The best of much longer searches: random starts for every problem, more scouts and gifts, all ends shared."""
    points, centre = law.centred_points(table)
    shape, rng = SHAPES[form], np.random.default_rng(9)
    every = np.repeat(weight, NUM_RANDOM, axis=0)
    scattered = search.polish(random_laws(form, points, len(every), rng), points, every, shape)
    grid = search.grid_starts(points, law.shares_of(table.weight), shape, 60)
    before = search._GIFTS, search._FEW_RUNS, search._SCOUTS
    search._GIFTS, search._FEW_RUNS, search._SCOUTS = 16, 10**9, 64
    try:
        pool = search.scouted(grid, points, weights("dirichlet", 64, table.num_runs, 2), shape)
        pool = np.concatenate([law.centred(near, centre), scattered.theta, pool])
        shared = search.refits(pool, points, weight, shape, 12).objective
    finally:
        search._GIFTS, search._FEW_RUNS, search._SCOUTS = before
    return np.minimum(shared, scattered.objective.reshape(-1, NUM_RANDOM).min(axis=1))


def random_laws(form: Form, points: Points, num: int, rng: np.random.Generator) -> Floats:
    """Laws with exponents from flat to steep whose terms are a random share of the loss at a random run."""
    shape, runs = SHAPES[form], rng.integers(points.n.size, size=(2, num))
    k = np.exp(rng.uniform(np.log(max(shape.least_k, 0.02)), np.log(4), num))
    alpha, beta = np.exp(rng.uniform(np.log(0.01), np.log(8), (2, num)))
    e = points.y.min() - rng.exponential(0.7, num)
    a, b = points.y.mean() / k + rng.uniform(-3, 0.3, (2, num))
    theta = np.stack([e, a + alpha * points.n[runs[0]], b + beta * points.d[runs[1]], alpha, beta, k], axis=1)
    free = np.clip(theta[:, shape.space.first], *search.bounds(shape, points))
    return shape.space.theta(free)


def convergence(num: int, num_checked: int) -> list[dict[str, Any]]:
    """All numbers of runs, sources, forms and kinds of weights."""
    rows: list[dict[str, Any]] = []
    print(f"\nrefits within {NEAR} of the best known: worst source (mean), by form\n{'':<22}" + "".join(
        f"{form:>20}" for form in SHAPES))  # fmt: skip
    for num_runs in NUM_RUNS:
        tables = list(sources(num_runs))
        for kind in ("dirichlet", "multinomial"):
            cells = []
            for form in SHAPES:
                found = [(name, refits(table, form, kind, num, num_checked)) for name, table in tables]
                kept = [{"runs": name, **row} for name, row in found if row is not None]
                rows += kept
                shares = [row["reached"] for row in kept]
                cells.append(f"{min(shares):.3f} ({np.mean(shares):.4f})" if shares else "unidentified")
            print(f"{num_runs:>4} {kind:<17}" + "".join(f"{cell:>20}" for cell in cells), flush=True)
    every = np.array([row["reached"] for row in rows])
    unsettled = np.mean([row["unsettled"] for row in rows])
    print(f"all: {every.mean():.4f}; {(every < 0.99).sum()} of {len(every)} under .99; said unsettled {unsettled:.3f}")
    return rows


def speed() -> dict[str, Any]:
    """CPU time at 240 runs, and the memory of refits."""
    table, result = planted(CHINCHILLA, 240, 0), {}
    for form in SHAPES:
        fit = law.fit_law(table, form)
        weight = weights("dirichlet", 4000, 240, 0)
        result[form] = {
            "fit_seconds": cpu(lambda form=form: law.fit_law(table, form), 7),
            "refits_4000_seconds": cpu(lambda fit=fit, weight=weight: law.refit(table, fit, weight), 2),
        }
        print(f"{form:<14}one fit {1e3 * result[form]['fit_seconds']:.1f} ms, "
              f"4,000 refits {result[form]['refits_4000_seconds']:.2f} s")  # fmt: skip
    fit = law.fit_law(table, "chinchilla")
    for num in (1000, 16000):
        blocks = (weights("dirichlet", search.BLOCK, 240, seed) for seed in range(-(-num // search.BLOCK)))
        tracemalloc.start()
        law.refit_blocks(table, fit, blocks)
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
    parser = argparse.ArgumentParser(description="Exactness, convergence and speed of the fits of scaling laws.")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "fits.json")
    parser.add_argument("--num", type=int, default=100, help="Refits for each table, form and kind of weights.")
    parser.add_argument("--checked", type=int, default=2, help="Of those, held against scipy too.")
    parser.add_argument("--quick", action="store_true", help="A quarter of them.")
    parser.add_argument("--peers", type=Path, help="Interpreter that has the packages to compare with.")
    options = parser.parse_args()
    num, started = max(options.num // 4, 8) if options.quick else options.num, time.process_time()
    result = {
        "command": f"python benchmarks/fits.py --num {num}",
        "machine": {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "scipy": scipy.__version__},
        "threads": os.environ.get("OMP_NUM_THREADS"), "public_sets": DATA.exists(),
        "exactness": exactness(), "speed": speed(), "peers": peers(options.peers),
        "convergence": convergence(num, min(options.checked, num)),
    }  # fmt: skip
    result["cpu_seconds"] = round(time.process_time() - started)
    options.json.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwrote {options.json}", file=sys.stderr)


if __name__ == "__main__":
    main()
