"""Delay until the watch sees planted faults, and its rate of false alarms on healthy runs.

    OMP_NUM_THREADS=1 python benchmarks/statistics/watch.py --json benchmarks/results/watch.json

The runs are recorded (`watch_curves.py`): a ladder of 32 rungs, and 24 healthy runs twice as long
as its longest. The band is the one that `freeze` would have predicted for them, from four ladders,
each with one rung of each size left out.

1. False alarms. Each recorded run, and healthy runs resampled from them (the slow departure of one
   run from the mean curve, with the quick noise of other runs in blocks), are judged repeatedly
   while they grow. The results have the share of runs that ever raised an alert, by name, with its
   binomial interval.
2. Faults. One fault is planted into resampled runs at half the steps. The results have the share
   that is found by the end, and the delay.

Data about a run's machine is simulated: step times scatter by 5 %, an occasional step takes 20
times as long, and a quarter of the runs restarts once. It takes some minutes of one core; `--quick`
takes one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from scipy.stats import beta

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "launcher"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planted_watch import columns_of, decision, started
from process_tree import machine
from watch_curves import BATCH_TOKENS, LADDER, MAIN, schedule_of

from launcher.frozen.frozen import Decision
from launcher.study.decide import predicted_loss
from launcher.watch.follower import judge
from launcher.watch.logs.columns import LogColumns
from proxies.core.flops import count_params
from proxies.core.shape import Shape
from proxies.core.spec import Curve
from scaling_fits.forecast.loss_curves import FinishedRun
from scaling_fits.forecast.uncertainty import fit_runs, predict
from scaling_fits.laws.table import from_columns

CURVES = Path(__file__).parents[1] / "grids" / "watch.safetensors"
WIDTH, NUM_STEPS, NUM_RUNS, _ = MAIN
ONSET, EVERY, BLOCK, SLOW = NUM_STEPS // 2, 32, 40, 48
NUM_RANKS, STEP_SECONDS, SCATTER = 8, 0.5, 0.05
LEVEL, BOOTSTRAP = 0.9, 100
STEPS = np.arange(1.0, NUM_STEPS + 1)

Floats = np.ndarray
Made = dict[str, Floats]
"""The columns of a run that faults are planted into."""


def params_of(width: int) -> int:
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


def rungs(tables: dict[str, Floats], left_out: int) -> list[FinishedRun]:
    """The ladder but one run of each size."""
    found = []
    for width, num_steps, num_runs, _ in LADDER:
        at = f"{width}/{num_steps}"
        for i in (i for i in range(num_runs) if i != left_out):
            losses = tuple(tables[f"loss/{at}"][i].astype(float).tolist())
            found.append(
                FinishedRun(
                    params=params_of(width),
                    tokens=num_steps * BATCH_TOKENS,
                    schedule=schedule_of(num_steps),
                    final_loss_nats=float(tables[f"final/{at}"][i]),
                    curve=Curve(
                        steps=tuple(range(1, num_steps + 1)), train_loss_nats=losses, grad_norm=()
                    ),
                )
            )
    return found


def decision_of(ladder: list[FinishedRun]) -> Decision:
    """Return the decision that `freeze` would have recorded."""
    table = from_columns(
        params=[run.params for run in ladder],
        tokens=[run.tokens for run in ladder],
        loss=[run.final_loss_nats for run in ladder],
    )
    fit = fit_runs(table, bootstrap=BOOTSTRAP, level=LEVEL)
    end = predict(fit, params_of(WIDTH), NUM_STEPS * BATCH_TOKENS)
    forecast = predicted_loss(end, schedule_of(NUM_STEPS), ladder)
    return decision(NUM_STEPS, forecast, warmup_steps=NUM_STEPS // 20)


def smooth(rows: Floats) -> Floats:
    """The slow part, by a running mean over the log of the step: a tenth of an octave and `SLOW`
    steps at least.
    """
    out = np.empty_like(rows)
    for i in range(rows.shape[1]):
        half = max(SLOW // 2, int(0.05 * i))
        out[:, i] = rows[:, max(0, i - half) : i + half + 1].mean(axis=1)
    return out


def resampled(tables: dict[str, Floats], rng: np.random.Generator) -> Made:
    """A healthy run: the mean curve, one run's slow departure, and the quick noise of others in
    blocks.
    """
    at = f"{WIDTH}/{NUM_STEPS}"
    made = {}
    donor = int(rng.integers(NUM_RUNS))
    blocks = rng.integers(NUM_RUNS, size=-(-NUM_STEPS // BLOCK))
    for name, column in (("loss", "train_loss_nats"), ("grad", "grad_norm")):
        logs = np.log(tables[f"{name}/{at}"].astype(float))
        mean = logs.mean(axis=0)
        slow = smooth(logs - mean)
        quick = logs - mean - slow
        rows = np.repeat(blocks, BLOCK)[:NUM_STEPS]
        made[column] = np.exp(mean + slow[donor] + quick[rows, np.arange(NUM_STEPS)])
    return made | times(rng)


def recorded(tables: dict[str, Floats], number: int, rng: np.random.Generator) -> Made:
    at = f"{WIDTH}/{NUM_STEPS}"
    losses, norms = (tables[f"{name}/{at}"][number].astype(float) for name in ("loss", "grad"))
    return {"train_loss_nats": losses, "grad_norm": norms} | times(rng)


def times(rng: np.random.Generator) -> Made:
    """Draw step times of a healthy machine."""
    ranks = STEP_SECONDS * np.exp(SCATTER * rng.standard_normal((NUM_STEPS, NUM_RANKS)))
    seconds = ranks.max(axis=1) * np.where(rng.random(NUM_STEPS) < 0.01, 20.0, 1.0)
    restart = int(rng.integers(NUM_STEPS)) if rng.random() < 0.25 else NUM_STEPS
    seconds[restart : restart + 3] *= 10
    return {"rank_seconds": ranks, "seconds": seconds, "restart": np.array([restart])}


def columns(made: Made, upto: int) -> LogColumns:
    restart = int(made["restart"][0])
    events = [started(), *([started(step=restart)] if restart < upto else [])]
    seconds = made["seconds"][:upto]
    return columns_of(
        made["train_loss_nats"][:upto],
        grad_norm=made["grad_norm"][:upto],
        seconds=seconds,
        tokens_per_second=BATCH_TOKENS / seconds,
        rank_seconds=made["rank_seconds"][:upto],
        events=tuple(events),
    )


def alerts(made: Made, decided: Decision, since: int, every: int) -> dict[str, int]:
    """Name of each alert that was ever raised, alarms marked `!`, and the step at which it first
    was.
    """
    found: dict[str, int] = {}
    for upto in range(since, NUM_STEPS + 1, every):
        for alert in judge(decided, columns(made, upto)).alerts:
            found.setdefault(alert.name + "!" * (alert.severity == "alarm"), upto)
    return found


def binomial(count: int, num: int) -> list[float]:
    """Share, and its 95 % interval (Clopper and Pearson)."""
    low = float(beta.ppf(0.025, count, num - count + 1)) if count else 0.0
    high = float(beta.ppf(0.975, count + 1, num - count)) if count < num else 1.0
    return [count / num, low, high]


def planted(made: Made, fault: str, size: float) -> Made:
    """A copy with the fault from `ONSET` on."""
    new = {name: column.copy() for name, column in made.items()}
    since = np.maximum(0.0, STEPS - ONSET)
    loss, after = new["train_loss_nats"], STEPS > ONSET
    if fault == "spike of 4 steps":
        loss[ONSET : ONSET + 4] += size
    elif fault in ("spike that lasts", "jump"):
        loss[after] += size
    elif fault == "drift":
        new["train_loss_nats"] = loss + size * since / (0.1 * NUM_STEPS)
    elif fault == "gradients":
        new["grad_norm"] = new["grad_norm"] * size ** (since / (0.1 * NUM_STEPS))
    elif fault == "slow":
        new["seconds"] = new["seconds"] / np.where(after, 1 - size, 1.0)
    else:
        new["rank_seconds"][after, 3] *= 1 + size
    return new


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


def false_alarms(runs: list[tuple[Made, Decision]]) -> dict[str, Any]:
    raised: Counter[str] = Counter()
    for made, decided in runs:
        names = alerts(made, decided, EVERY, EVERY)
        raised.update(
            {*names, *(["any alarm"] if any(name.endswith("!") for name in names) else [])}
        )
    raised.setdefault("any alarm", 0)
    return {
        "num_runs": len(runs),
        "raised": {name: binomial(n, len(runs)) for name, n in sorted(raised.items())},
    }


def detections(
    fault: str, size: float, names: tuple[str, ...], runs: list[tuple[Made, Decision]]
) -> dict[str, Any]:
    delays, first = [], Counter()
    for made, decided in runs:
        before = alerts_at(made, decided, names, ONSET)
        found = alerts(planted(made, fault, size), decided, ONSET + EVERY, EVERY)
        new = {name: step for name, step in found.items() if name in names and name not in before}
        if new:
            name = min(new, key=new.__getitem__)
            delays.append(new[name] - ONSET)
            first[name] += 1
    quantiles = [float(q) for q in np.quantile(delays, (0.1, 0.5, 0.9))] if delays else None
    return {
        "size": size,
        "found": binomial(len(delays), len(runs)),
        "first_by": dict(first),
        "delay_steps": quantiles,
        "delay_share": quantiles and [q / NUM_STEPS for q in quantiles],
    }


def alerts_at(made: Made, decided: Decision, names: tuple[str, ...], upto: int) -> set[str]:
    """Return those of the names that are already raised."""
    there = {
        a.name + "!" * (a.severity == "alarm") for a in judge(decided, columns(made, upto)).alerts
    }
    return there & set(names)


def format_share(share: list[float]) -> str:
    """Format a share with its interval in percent."""
    return f"{share[0]:.1%} [{share[1]:.1%}, {share[2]:.1%}]"


def page(body: dict[str, Any]) -> str:
    """The tables, as Markdown; docs/watch.md sums them up."""
    kinds = ("recorded", "resampled")
    names = sorted({name for kind in kinds for name in body[kind]["raised"]})
    heads = " | ".join(f"{kind}, {body[kind]['num_runs']} runs" for kind in kinds)
    lines = [f"| raised in a healthy run | {heads} |", "|---|---|---|"]
    for name in names:
        shares = [
            body[kind]["raised"].get(name) or binomial(0, body[kind]["num_runs"]) for kind in kinds
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
    for row in body["faults"]:
        low, middle, high = row["delay_steps"] or (None, None, None)
        delay = "" if middle is None else f"{middle:.0f} [{low:.0f}, {high:.0f}]"
        share = "" if middle is None else f"{middle / body['num_steps']:.0%}"
        lines.append(
            f"| {row['fault']} | {row['size']} {row['unit']} | {format_share(row['found'])} | "
            f"{delay} | {share} |"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args(arguments)
    num_healthy, num_ill = (8, 2) if asked.quick else (100, 12)
    began = time.process_time()
    tables = load_file(CURVES)
    rng = np.random.default_rng(0)
    decisions = [decision_of(rungs(tables, left_out)) for left_out in range(4)]
    pairs = [(recorded(tables, i, rng), decisions[i % 4]) for i in range(NUM_RUNS)]
    healthy = [(resampled(tables, rng), decisions[i % 4]) for i in range(num_healthy)]
    body: dict[str, Any] = {
        "forecasts": [
            {
                key: value
                for key, value in dataclasses.asdict(each.predicted).items()
                if key != "curve"
            }
            for each in decisions
        ],
        "actual_nats": [
            float(x) for x in np.quantile(tables[f"final/{WIDTH}/{NUM_STEPS}"], (0, 0.5, 1))
        ],
        "recorded": false_alarms(pairs),
        "resampled": false_alarms(healthy),
    }
    print(json.dumps(body, indent=1))
    body["faults"] = []
    for fault, unit, sizes, names in FAULTS:
        for size in sizes:
            row = {"fault": fault, "unit": unit} | detections(fault, size, names, healthy[:num_ill])
            body["faults"].append(row)
            print(json.dumps(row), flush=True)
    body |= {
        "onset_step": ONSET,
        "num_steps": NUM_STEPS,
        "every_steps": EVERY,
        "machine": machine(),
    }
    body["cpu_seconds"] = time.process_time() - began
    print(page(body))
    if asked.json:
        asked.json.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
