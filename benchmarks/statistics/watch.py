"""Delay until the watch sees planted faults, and its rate of false alarms on healthy runs.

    OMP_NUM_THREADS=1 python benchmarks/statistics/watch.py --json benchmarks/results/watch.json

The runs are recorded (`watch_curves.py`): a ladder of 32 rungs, and 24 healthy runs twice as long
as its longest. The watch compares a run with a band, the interval of its predicted loss curve. The
band is the one that `freeze` would have predicted for these runs, from four ladders, each with one
rung of each size left out.

1. False alarms. Each recorded run, and healthy runs resampled from them (the slow departure of one
   run from the mean curve, with the quick noise of other runs in blocks), are judged repeatedly
   while they grow. The results have the share of runs that ever raised an alert, by name, with its
   binomial interval.
2. Faults. One fault is planted into resampled runs at half the steps. The results have the share
   that is found by the end, and the delay.

Data about a run's machine is simulated: step times scatter by 5 %, an occasional step takes 20
times as long, and a quarter of the runs restarts once. The script prints the tables as Markdown and
writes all figures. It takes some minutes of one core; `--quick` takes one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from scipy.stats import beta

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support" / "launcher"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planted_watch import make_attempt_start, make_columns, make_watched_decision
from result_files import describe_machine, write_result
from watch_curves import BATCH_TOKENS, LADDER, MAIN, make_schedule

from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._launcher.main_run.watch.follower import judge
from forerun._launcher.main_run.watch.logs.columns import LogColumns
from forerun._launcher.study.stages.main_run_choice import predict_loss_curve
from forerun._proxies.core.flops import count_params
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Curve
from forerun._scaling_fits.forecast.loss_curves import FinishedRun
from forerun._scaling_fits.forecast.uncertainty import fit_runs, predict
from forerun._scaling_fits.laws.table import from_columns

CURVES = Path(__file__).parents[1] / "grids" / "watch.safetensors"
WIDTH, NUM_STEPS, NUM_RUNS, _ = MAIN
ONSET, EVERY, BLOCK, SLOW = NUM_STEPS // 2, 32, 40, 48
"""Step at which a fault begins, and numbers of steps: between two judgements, in a block of noise,
and in the shortest running mean."""
NUM_RANKS, STEP_SECONDS, SCATTER = 8, 0.5, 0.05
"""Ranks of the simulated machine, their seconds per step, and the scatter of the log of these."""
LEVEL, BOOTSTRAP = 0.9, 100
"""Level of the band, and refits for it."""
NUM_LADDERS = min(num_runs for _, _, num_runs, _ in LADDER)
"""Ladders, each of which leaves out another run of every size."""
STEPS = np.arange(1.0, NUM_STEPS + 1)

Floats = np.ndarray
RunColumns = dict[str, Floats]
"""Columns of a run, into which faults are planted, by name."""


def count_model_params(width: int) -> int:
    """Return the number of parameters of the model of a width."""
    base = Shape(
        num_layers=2,
        width=16,
        num_heads=1,
        num_kv_heads=1,
        ffn_width=32,
        vocab_size=256,
        seq_len=64,
    )
    return count_params(base.at_width(width)).total


def load_ladder(tables: dict[str, Floats], left_out: int) -> list[FinishedRun]:
    """Return the ladder's runs, without one run of each size."""
    runs = []
    for width, num_steps, num_runs, _ in LADDER:
        size = f"{width}/{num_steps}"
        for i in (i for i in range(num_runs) if i != left_out):
            losses = tuple(tables[f"loss/{size}"][i].astype(float).tolist())
            runs.append(
                FinishedRun(
                    params=count_model_params(width),
                    tokens=num_steps * BATCH_TOKENS,
                    schedule=make_schedule(num_steps),
                    final_loss_nats=float(tables[f"final/{size}"][i]),
                    curve=Curve(
                        steps=tuple(range(1, num_steps + 1)), train_loss_nats=losses, grad_norm=()
                    ),
                )
            )
    return runs


def make_decision(ladder: list[FinishedRun]) -> Decision:
    """Return the decision that `freeze` would have recorded."""
    table = from_columns(
        params=[run.params for run in ladder],
        tokens=[run.tokens for run in ladder],
        loss=[run.final_loss_nats for run in ladder],
    )
    fit = fit_runs(table, bootstrap=BOOTSTRAP, level=LEVEL)
    end = predict(fit, count_model_params(WIDTH), NUM_STEPS * BATCH_TOKENS)
    forecast = predict_loss_curve(end, make_schedule(NUM_STEPS), ladder)
    return make_watched_decision(NUM_STEPS, forecast, warmup_steps=NUM_STEPS // 20)


def smooth_rows(rows: Floats) -> Floats:
    """Return the slow part of each row, which is a running mean.

    At step i the mean is over i / 10 steps around it, but at least over `SLOW` steps.
    """
    out = np.empty_like(rows)
    for i in range(rows.shape[1]):
        half = max(SLOW // 2, int(0.05 * i))
        out[:, i] = rows[:, max(0, i - half) : i + half + 1].mean(axis=1)
    return out


def resample_run(tables: dict[str, Floats], rng: np.random.Generator) -> RunColumns:
    """Return a healthy run that is put together from recorded runs.

    It has the mean curve, the slow departure of one run from it, and the quick noise of other runs
    in blocks.
    """
    size = f"{WIDTH}/{NUM_STEPS}"
    columns = {}
    donor = int(rng.integers(NUM_RUNS))
    blocks = rng.integers(NUM_RUNS, size=math.ceil(NUM_STEPS / BLOCK))
    for name, column in (("loss", "train_loss_nats"), ("grad", "grad_norm")):
        logs = np.log(tables[f"{name}/{size}"].astype(float))
        mean = logs.mean(axis=0)
        slow = smooth_rows(logs - mean)
        quick = logs - mean - slow
        rows = np.repeat(blocks, BLOCK)[:NUM_STEPS]
        columns[column] = np.exp(mean + slow[donor] + quick[rows, np.arange(NUM_STEPS)])
    return columns | draw_step_times(rng)


def load_run(tables: dict[str, Floats], number: int, rng: np.random.Generator) -> RunColumns:
    """Return one recorded run, with simulated step times."""
    size = f"{WIDTH}/{NUM_STEPS}"
    losses, norms = (tables[f"{name}/{size}"][number].astype(float) for name in ("loss", "grad"))
    return {"train_loss_nats": losses, "grad_norm": norms} | draw_step_times(rng)


def draw_step_times(rng: np.random.Generator) -> RunColumns:
    """Draw step times of a healthy machine."""
    ranks = STEP_SECONDS * np.exp(SCATTER * rng.standard_normal((NUM_STEPS, NUM_RANKS)))
    seconds = ranks.max(axis=1) * np.where(rng.random(NUM_STEPS) < 0.01, 20.0, 1.0)
    restart = int(rng.integers(NUM_STEPS)) if rng.random() < 0.25 else NUM_STEPS
    seconds[restart : restart + 3] *= 10
    return {"rank_seconds": ranks, "seconds": seconds, "restart": np.array([restart])}


def make_log_columns(run: RunColumns, num_steps: int) -> LogColumns:
    """Return a log of the first steps of a run."""
    restart = int(run["restart"][0])
    events = [
        make_attempt_start(),
        *([make_attempt_start(step=restart)] if restart < num_steps else []),
    ]
    seconds = run["seconds"][:num_steps]
    return make_columns(
        run["train_loss_nats"][:num_steps],
        grad_norm=run["grad_norm"][:num_steps],
        seconds=seconds,
        tokens_per_second=BATCH_TOKENS / seconds,
        rank_seconds=run["rank_seconds"][:num_steps],
        events=tuple(events),
    )


def list_alerts(run: RunColumns, decision: Decision, since: int, every: int) -> dict[str, int]:
    """Return the step at which each alert is first raised, by name; names of alarms end with `!`.

    Args:
        run: The whole run.
        decision: The launch config with the band.
        since: Number of steps at the first judgement.
        every: Steps between two judgements.
    """
    first_steps: dict[str, int] = {}
    for num_steps in range(since, NUM_STEPS + 1, every):
        for alert in judge(decision, make_log_columns(run, num_steps)).alerts:
            first_steps.setdefault(alert.name + "!" * (alert.severity == "alarm"), num_steps)
    return first_steps


def compute_share(count: int, num: int) -> list[float]:
    """Return a share and its 95 % interval (Clopper and Pearson)."""
    low = float(beta.ppf(0.025, count, num - count + 1)) if count else 0.0
    high = float(beta.ppf(0.975, count + 1, num - count)) if count < num else 1.0
    return [count / num, low, high]


def plant_fault(run: RunColumns, fault: str, size: float) -> RunColumns:
    """Return a copy of a run with a fault that begins at `ONSET`; `size` has the fault's unit
    (`FAULTS`).
    """
    faulty = {name: column.copy() for name, column in run.items()}
    steps_since = np.maximum(0.0, STEPS - ONSET)
    loss, is_after = faulty["train_loss_nats"], STEPS > ONSET
    if fault == "spike of 4 steps":
        loss[ONSET : ONSET + 4] += size
    elif fault in ("spike that lasts", "jump"):
        loss[is_after] += size
    elif fault == "drift":
        faulty["train_loss_nats"] = loss + size * steps_since / (0.1 * NUM_STEPS)
    elif fault == "gradients":
        faulty["grad_norm"] = faulty["grad_norm"] * size ** (steps_since / (0.1 * NUM_STEPS))
    elif fault == "slow":
        faulty["seconds"] = faulty["seconds"] / np.where(is_after, 1 - size, 1.0)
    else:
        slow_rank = 3
        faulty["rank_seconds"][is_after, slow_rank] *= 1 + size
    return faulty


LOSS_ALARMS = ("departed!", "rising!", "spike_lasts!", "diverged!")
FAULTS: list[tuple[str, str, tuple[float, ...], tuple[str, ...]]] = [
    ("spike of 4 steps", "nats", (0.3, 0.5, 1.0, 2.0), ("spikes",)),
    ("spike that lasts", "nats", (0.3, 0.5, 1.0, 2.0), ("spike_lasts!",)),
    ("jump", "nats", (0.1, 0.2, 0.4, 0.8), LOSS_ALARMS),
    ("drift", "nats a tenth of the run", (0.02, 0.05, 0.1, 0.2), LOSS_ALARMS),
    ("gradients", "times a tenth of the run", (1.2, 1.5, 2.0, 4.0), ("gradients_grow",)),
    ("slow", "of throughput lost", (0.05, 0.15, 0.3, 0.5), ("slow", "slow!")),
    ("straggler", "longer than the others", (0.05, 0.15, 0.3, 0.5), ("straggler", "straggler!")),
]
"""Fault, unit of its size, sizes, and the alerts that count as finding it."""


def measure_false_alarms(runs: list[tuple[RunColumns, Decision]]) -> dict[str, Any]:
    """Return the share of healthy runs that ever raise each alert."""
    raised: Counter[str] = Counter()
    for run, decision in runs:
        names = list_alerts(run, decision, EVERY, EVERY)
        raised.update(
            {*names, *(["any alarm"] if any(name.endswith("!") for name in names) else [])}
        )
    raised.setdefault("any alarm", 0)
    return {
        "num_runs": len(runs),
        "raised": {name: compute_share(n, len(runs)) for name, n in sorted(raised.items())},
    }


def measure_detections(
    fault: str, size: float, names: tuple[str, ...], runs: list[tuple[RunColumns, Decision]]
) -> dict[str, Any]:
    """Return the share of runs in which a fault is found, and the delays."""
    delays, num_first = [], Counter()
    for run, decision in runs:
        before = list_alerts_at(run, decision, names, ONSET)
        first_steps = list_alerts(plant_fault(run, fault, size), decision, ONSET + EVERY, EVERY)
        new_alerts = {
            name: step for name, step in first_steps.items() if name in names and name not in before
        }
        if new_alerts:
            name = min(new_alerts, key=new_alerts.__getitem__)
            delays.append(new_alerts[name] - ONSET)
            num_first[name] += 1
    quantiles = [float(q) for q in np.quantile(delays, (0.1, 0.5, 0.9))] if delays else None
    return {
        "size": size,
        "found": compute_share(len(delays), len(runs)),
        "first_by": dict(num_first),
        "delay_steps": quantiles,
        "delay_share": None if quantiles is None else [q / NUM_STEPS for q in quantiles],
    }


def list_alerts_at(
    run: RunColumns, decision: Decision, names: tuple[str, ...], num_steps: int
) -> set[str]:
    """Return the alerts, out of these names, that are raised after a number of steps."""
    raised = {
        alert.name + "!" * (alert.severity == "alarm")
        for alert in judge(decision, make_log_columns(run, num_steps)).alerts
    }
    return raised & set(names)


def format_share(share: list[float]) -> str:
    """Format a share with its interval in percent."""
    return f"{share[0]:.1%} [{share[1]:.1%}, {share[2]:.1%}]"


def format_tables(result: dict[str, Any]) -> str:
    """Return the tables as Markdown; docs/watch.md summarizes them."""
    kinds = ("recorded", "resampled")
    names = sorted({name for kind in kinds for name in result[kind]["raised"]})
    heads = " | ".join(f"{kind}, {result[kind]['num_runs']} runs" for kind in kinds)
    lines = [f"| raised in a healthy run | {heads} |", "|---|---|---|"]
    for name in names:
        shares = [
            result[kind]["raised"].get(name) or compute_share(0, result[kind]["num_runs"])
            for kind in kinds
        ]
        lines.append(f"| `{name}` | {' | '.join(map(format_share, shares))} |")
    lines += [
        "",
        (
            "| planted at half the run | size | found by the end | delay in steps, median [10 %, "
            "90 %] "
            "| of the run |"
        ),
    ]
    lines.append("|---|---|---|---|---|")
    for row in result["faults"]:
        low, middle, high = row["delay_steps"] or (None, None, None)
        delay = "" if middle is None else f"{middle:.0f} [{low:.0f}, {high:.0f}]"
        share = "" if middle is None else f"{middle / result['num_steps']:.0%}"
        lines.append(
            f"| {row['fault']} | {row['size']} {row['unit']} | {format_share(row['found'])} | "
            f"{delay} | {share} |"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="Result file.")
    parser.add_argument("--quick", action="store_true", help="Use few runs.")
    options = parser.parse_args(arguments)
    num_healthy, num_faulty = (8, 2) if options.quick else (100, 12)
    began = time.process_time()
    tables = load_file(CURVES)
    rng = np.random.default_rng(0)
    decisions = [make_decision(load_ladder(tables, left_out)) for left_out in range(NUM_LADDERS)]
    recorded = [(load_run(tables, i, rng), decisions[i % NUM_LADDERS]) for i in range(NUM_RUNS)]
    resampled = [
        (resample_run(tables, rng), decisions[i % NUM_LADDERS]) for i in range(num_healthy)
    ]
    result: dict[str, Any] = {
        "forecasts": [
            {
                key: value
                for key, value in dataclasses.asdict(run_decision.predicted).items()
                if key != "curve"
            }
            for run_decision in decisions
        ],
        "actual_nats": [
            float(x) for x in np.quantile(tables[f"final/{WIDTH}/{NUM_STEPS}"], (0, 0.5, 1))
        ],
        "recorded": measure_false_alarms(recorded),
        "resampled": measure_false_alarms(resampled),
    }
    print(json.dumps(result, indent=1))
    result["faults"] = []
    for fault, unit, sizes, names in FAULTS:
        for size in sizes:
            row = {"fault": fault, "unit": unit} | measure_detections(
                fault, size, names, resampled[:num_faulty]
            )
            result["faults"].append(row)
            print(json.dumps(row), flush=True)
    result |= {
        "onset_step": ONSET,
        "num_steps": NUM_STEPS,
        "every_steps": EVERY,
        "machine": describe_machine(),
    }
    result["cpu_seconds"] = time.process_time() - began
    print(format_tables(result))
    write_result(options.json, result)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
