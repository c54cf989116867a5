"""Measure how often the coordinate check is wrong, on correct models and on models with planted
mistakes.

    python benchmarks/statistics/coordinate_checks.py \\
        --results benchmarks/results/coordinate_checks.jsonl

Every check is drawn from a fixed seed (`coordinate_draws.py`) and is one line of the results.
Checks that are in the file are not run again, so the same command resumes a stopped run. The rule
was chosen on the checks of `--seed dev`; the committed results are those of the seed `second`. A
check takes about five processor seconds. `--summary` prints the tables of docs/coordinate-check.md
from the file.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import torch
from coordinate_draws import Draw, Mistake, draw, open_corpus, run_check

from proxies.coordinates.coordinates import CoordinateCheck

NUM_RIGHT, NUM_EACH = 400, 20
"""Number of checks of correct models, and of each planted mistake."""
WORK = Path(__file__).parents[1] / "data" / "coordinate_checks"
HIDDEN_RATE = "hidden matrices' learning rate"
MISTAKE_NAMES: dict[str, tuple[str, ...]] = {
    # In a tied model the shared matrix is initialized by its own fan-in too
    "every model its own base": (HIDDEN_RATE, "unscaled readout", "initial std"),
    "the widest model on its own base": (HIDDEN_RATE, "unscaled readout", "initial std"),
    "attention over 1/sqrt(head_dim)": ("attention logits blow up",),
    "readout unscaled": ("unscaled readout",),
    "hidden rate unscaled": (HIDDEN_RATE,),
    "hidden rate shrinks too fast by a root": (HIDDEN_RATE + " shrinks too fast",),
    "hidden rate shrinks too fast by a width": (HIDDEN_RATE + " shrinks too fast",),
    "embedding rate changes with width": ("the embedding's learning rate",),
    "hidden initial std does not shrink": ("hidden matrices' initial std",),
    "no depth rule": ("no depth rule",),
}
"""Words by mistake; the check has named a mistake if its message contains one of them."""


def list_jobs() -> list[tuple[Mistake, int]]:
    """Return all checks in a fixed random order, so that a stopped run has a representative part of
    them.
    """
    mistakes = get_args(Mistake)
    jobs = [
        (mistake, index)
        for mistake in mistakes
        for index in range(NUM_RIGHT if mistake == "none" else NUM_EACH)
    ]
    random.Random("order").shuffle(jobs)
    return jobs


def describe(setting: Draw, check: CoordinateCheck, seconds: float) -> dict[str, Any]:
    """Return the result of a check: its settings, its outcome, and the distances of its slopes from
    their intervals.
    """
    distances = [
        (layer.slope - layer.expected[0], layer.slope - layer.expected[1])
        for layer in check.layers
        if math.isfinite(layer.slope)
    ]
    return {
        "corpus": setting.corpus,
        "vocab_size": setting.vocab_size,
        "axis": setting.axis,
        "points": setting.points,
        "model": setting.model,
        "tied": setting.tied,
        "optimizer": "muon" if setting.muon else "adamw",
        "parametrization": check.parametrization,
        "head_dim_grows": setting.head_dim_grows,
        "num_layers": setting.num_layers,
        "log2_rate": setting.log2_rate,
        "batch_tokens": setting.batch_tokens,
        "seq_len": setting.seq_len,
        "num_steps": setting.num_steps,
        "num_seeds": setting.num_seeds,
        "outcome": check.outcome,
        "mistakes": check.mistakes,
        "not_passed": [layer.layer for layer in check.layers if layer.outcome != "passes"],
        "lowest_beside": round(min((low for low, _ in distances), default=0.0), 3),
        "highest_beside": round(max((high for _, high in distances), default=0.0), 3),
        "seconds": round(seconds, 1),
    }


def run(seed: str, results: Path, work: Path) -> None:
    """Run the checks that are not in the results."""
    done = {(row["seed"], row["mistake"], row["index"]) for row in read_rows(results)}
    for mistake, index in list_jobs():
        if (seed, mistake, index) in done:
            continue
        setting = draw(seed, index, mistake)
        start = time.perf_counter()
        check = run_check(setting, open_corpus(setting.corpus, setting.vocab_size, work))
        row = {"seed": seed, "mistake": mistake, "index": index}
        row |= describe(setting, check, time.perf_counter() - start)
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_rows(results: Path) -> list[dict[str, Any]]:
    """Return the results of the checks that were run before."""
    return (
        [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    )


def summarize(rows: list[dict[str, Any]]) -> str:
    """Return the tables of correct models by setting, and of planted mistakes."""
    right = [row for row in rows if row["mistake"] == "none"]
    lines = ["| right | checks | passes | cannot tell | flagged |", "|---|---|---|---|---|"]
    lines.append(_format_row("all", right))
    for key in ("vocab_size", "corpus", "model", "tied", "optimizer", "axis"):
        values = sorted({row[key] for row in right})
        lines += [
            _format_row(f"{key} {value}", [row for row in right if row[key] == value])
            for value in values
        ]
    lines += ["", "| mistake | checks | flagged | named |", "|---|---|---|---|"]
    for mistake, words in MISTAKE_NAMES.items():
        planted = [row for row in rows if row["mistake"] == mistake]
        flagged = [row for row in planted if row["outcome"] in ("vanishes", "blows_up")]
        named = [
            row
            for row in flagged
            if any(word in message for word in words for message in row["mistakes"])
        ]
        lines.append(f"| {mistake} | {len(planted)} | {len(flagged)} | {len(named)} |")
    return "\n".join(lines)


def _format_row(name: str, rows: list[dict[str, Any]]) -> str:
    counts = Counter(row["outcome"] for row in rows)
    flagged = counts["vanishes"] + counts["blows_up"]
    return f"| {name} | {len(rows)} | {counts['passes']} | {counts['cannot_tell']} | {flagged} |"


def main() -> None:
    """Run the remaining checks unless `--summary` is given, then print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--seed", default="second")
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the corpora")
    parser.add_argument("--summary", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.summary:
        run(options.seed, options.results, options.work)
    print(summarize([row for row in read_rows(options.results) if row["seed"] == options.seed]))


if __name__ == "__main__":
    main()
