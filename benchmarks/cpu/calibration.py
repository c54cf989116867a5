"""Choices of repeated calibrations on this machine, and the time that they take.

    python benchmarks/cpu/calibration.py --json benchmarks/results/calibration.json

The plan of `forerun init`, at base widths of 32 to 256 and two batch sizes, is calibrated
repeatedly by one pool of Ray workers, one per core, as before the first trial of a study. Nothing
is skipped or recorded. For each width and batch size the results have the choices with their
counts, the modes' rates over that of one slot (smallest, median and largest over the calibrations),
and the seconds. It takes about 15 minutes of two cores; `--quick` takes 2. `--compiled` also tries
torch.compile, which takes some minutes per calibration.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import importlib.metadata
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from process_tree import machine

from launcher.calibration.mode_choice import Bench, choose
from launcher.calibration.procedure import asking, groups_of
from launcher.plan.calibration_records import Calibration, PlannedWork, mode_name
from launcher.plan.study import Study
from launcher.study.pools import start_pool
from launcher.study.study_folder import plan_study
from sweeps.run.kinds import kinds_of

NUM_TIMES, WIDTHS, BATCHES = 20, (32, 64, 128, 256), (128, 1024)
"""Batches in tokens: two sequences of 64, where launching costs most, and the plan's own."""


def study_of(folder: Path, width: int, batch_tokens: int, compiled: bool) -> Study:
    """The plan of `init` at another base width."""
    given = {
        "data.path": "corpus",
        "proxy.base_width": width,
        "proxy.batch_tokens": batch_tokens,
        "proxy.compiled": "auto" if compiled else False,
        "transfer.widths": [width, 2 * width],
        "ladder.widths": [width, 2 * width],
        "transfer.control_widths": [],
        "transfer.check_widths": [width, 2 * width],
    }
    plan = folder / f"{width}-{batch_tokens}.toml"
    settings = [
        part for key, value in given.items() for part in ("--set", f"{key}={json.dumps(value)}")
    ]
    subprocess.run(
        [sys.executable, "-m", "launcher", "init", "--out", str(plan), *settings], check=True
    )
    return plan_study(plan, folder / "study")


def main(arguments: list[str]) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--times", type=int, default=NUM_TIMES)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--quick", action="store_true", help="Three times, at two widths.")
    asked = parser.parse_args(arguments)
    times, widths = (3, WIDTHS[:2]) if asked.quick else (asked.times, WIDTHS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = Path(sysconfig.get_paths()["stdlib"], "asyncio")
        tokenized = ["tokenize", str(library), "--out", str(folder / "corpus"), "--suffix", ".py"]
        subprocess.run([sys.executable, "-m", "launcher", *tokenized], check=True)
        studies = [
            study_of(folder, width, batch, asked.compiled) for width in widths for batch in BATCHES
        ]
        rows = [measured(study, times) for study in studies]
    body = {
        "rows": rows,
        "machine": machine(),
        "versions": {name: importlib.metadata.version(name) for name in ("ray", "torch")},
    }
    if asked.json:
        asked.json.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    return 0


def measured(study: Study, times: int) -> dict[str, Any]:
    """So many calibrations of the base width's group."""
    pool = start_pool(study, lambda: None)
    try:
        found, seconds = [], []
        for _ in range(times):
            began = time.monotonic()
            found.append(one(study, pool))
            seconds.append(time.monotonic() - began)
    finally:
        pool.close()
    row = row_of(found, seconds)
    print(json.dumps(row), flush=True)
    return row


def one(study: Study, pool: Any) -> Calibration:
    """One calibration, as `launcher.calibration.procedure` makes it for a group with a minute of
    work or so.
    """
    group = next(group for group in groups_of(study) if group.asked.part == "proxy")
    kinds = kinds_of(pool, lambda: None)
    work = PlannedWork(kinds=kinds, phases=group.phases)
    bench = Bench(group.asked.given, asking(study, group.example, pool, kinds, 2.0, lambda: None))
    return choose(group.asked, work, bench)


def row_of(found: list[Calibration], seconds: list[float]) -> dict[str, Any]:
    """What came of all."""
    asked = found[0].asked
    ratios = collections.defaultdict(list)
    for calibration in found:
        for figure in calibration.figures:
            ratios[mode_name(figure.mode, asked.given)].append(figure.ratio)
    chosen = collections.Counter(
        mode_name(calibration.chosen, asked.given) for calibration in found
    )
    return {
        "width": asked.shape.width,
        "batch_tokens": asked.batch_tokens,
        "times": len(found),
        "chosen": dict(chosen),
        "ratios": {
            mode: [min(each), statistics.median(each), max(each)] for mode, each in ratios.items()
        },
        "seconds": [min(seconds), statistics.median(seconds), max(seconds)],
        "last": [dataclasses.asdict(figure) for figure in found[-1].figures],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
