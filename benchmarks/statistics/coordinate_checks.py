"""Error rates of the coordinate check on correct models and on models with planted mistakes.

    python benchmarks/statistics/coordinate_checks.py \
        --results benchmarks/results/coordinate_checks.jsonl

The coordinate check trains models of several widths (or depths) for a few steps, and tests whether
the changes of their activations stay the same size, as a parametrization such as muP promises.

Every check is drawn from a fixed seed (`coordinate_draws.py`) and gives one line of the results.
Checks that are in the file are not run again, so the same command resumes a stopped run. The rule
of the check was chosen on the draws of `--seed dev`; the committed results have the seed `second`.

The script prints the tables of docs/coordinate-check.md; `--summary` prints them from the file
without running a check. A check takes about five processor seconds, and all 600 take less than an
hour of one core.
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

from forerun._proxies.coordinates.coordinate_check import CoordinateCheck

NUM_RIGHT, NUM_EACH = 400, 20
"""Number of checks of correct models, and of each planted mistake."""
WORK = Path(__file__).parents[1] / "data" / "coordinate_checks"
"""Default folder of the corpora."""
HIDDEN_RATE = "hidden matrices' learning rate"
MISTAKE_NAMES: dict[str, tuple[str, ...]] = {
    # In a tied model the shared matrix is initialized by its own fan-in too.
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
"""Phrases by mistake; the check has named a mistake if its message contains one of them."""
assert {"none", *MISTAKE_NAMES} == set(get_args(Mistake)), "a mistake lacks its phrases"


def list_jobs() -> list[tuple[Mistake, int]]:
    """Return all checks in a fixed random order.

    So a run that is stopped early has run a representative part of the checks.
    """
    mistakes = get_args(Mistake)
    jobs = [
        (mistake, index)
        for mistake in mistakes
        for index in range(NUM_RIGHT if mistake == "none" else NUM_EACH)
    ]
    random.Random("order").shuffle(jobs)
    return jobs


def make_row(setting: Draw, check: CoordinateCheck, seconds: float) -> dict[str, Any]:
    """Return the result of a check as a row of the results.

    The row has the settings, the outcome, and how far the slopes are from their expected intervals.
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


def run_missing_checks(seed: str, results: Path, work: Path) -> None:
    """Run the checks that are not in the results."""
    finished = {(row["seed"], row["mistake"], row["index"]) for row in read_rows(results)}
    for mistake, index in list_jobs():
        if (seed, mistake, index) in finished:
            continue
        setting = draw(seed, index, mistake)
        start = time.perf_counter()
        check = run_check(setting, open_corpus(setting.corpus, setting.vocab_size, work))
        row = {"seed": seed, "mistake": mistake, "index": index}
        row |= make_row(setting, check, time.perf_counter() - start)
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
    """Return a row of the table of correct models."""
    counts = Counter(row["outcome"] for row in rows)
    flagged = counts["vanishes"] + counts["blows_up"]
    return f"| {name} | {len(rows)} | {counts['passes']} | {counts['cannot_tell']} | {flagged} |"


def main() -> None:
    """Run the remaining checks unless `--summary` is given, then print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--results", type=Path, required=True, help="Result file, one line per check."
    )
    parser.add_argument("--seed", default="second", help="Seed of the draws.")
    parser.add_argument("--work", type=Path, default=WORK, help="Folder of the corpora.")
    parser.add_argument("--summary", action="store_true", help="Only print the tables of the file.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.summary:
        run_missing_checks(options.seed, options.results, options.work)
    print(summarize([row for row in read_rows(options.results) if row["seed"] == options.seed]))


if __name__ == "__main__":
    main()
