"""The mode that repeated calibrations choose on this machine, and the seconds that they take.

    python benchmarks/cpu/calibration.py --json benchmarks/results/calibration.json

Before the first trial of a study, forerun measures how fast the proxy trains in several modes, and
chooses the fastest. A mode is a number of slots (trials that a worker trains as one batched model),
with or without torch.compile. This script repeats that calibration for the plan of
`forerun init`, at base widths of 32 to 256 and with two batch sizes, on one pool of Ray workers
(one per core). Each calibration runs in full, and no study records it.

The script prints a row for each width and batch size, and writes the rows: the chosen modes with
their counts; the rate of each mode over that of one slot (minimum, median and maximum over the
calibrations); and the seconds. It takes about 15 minutes of two cores; `--quick` takes 2 minutes.
`--compiled` also tries torch.compile, which takes some minutes per calibration.
"""

from __future__ import annotations

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

from result_files import describe_machine, make_parser, write_result

from forerun._launcher.study.calibration.mode_choice import ModeMeasurements, choose_mode
from forerun._launcher.study.calibration.procedure import group_runs, make_measure_modes
from forerun._launcher.study.plan.calibration_records import Calibration, PlannedWork, describe_mode
from forerun._launcher.study.plan.study import Study
from forerun._launcher.study.stages.study_folder import read_study
from forerun._launcher.study.stages.worker_pools import start_pool
from forerun._sweeps.run.device_kinds import ask_device_kinds

MODE_SECONDS = 2.0
"""Seconds for which a mode is measured."""
NUM_TIMES, WIDTHS, BATCHES = 20, (32, 64, 128, 256), (128, 1024)
"""Calibrations per case, base widths, and tokens per step: two sequences of 64, where the overhead
of a step is largest, and the plan's own batch.
"""


def make_study(folder: Path, width: int, batch_tokens: int, compiled: bool) -> Study:
    """Return a study with the plan of `init` at another base width and batch size."""
    plan_values = {
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
        part
        for key, value in plan_values.items()
        for part in ("--set", f"{key}={json.dumps(value)}")
    ]
    subprocess.run(
        [sys.executable, "-m", "forerun", "init", "--out", str(plan), *settings], check=True
    )
    return read_study(plan, folder / "study")


def main(arguments: list[str]) -> int:
    """Measure all cases and write the result."""
    parser = make_parser(__doc__, quick="Calibrate three times, at two widths.")
    parser.add_argument("--times", type=int, default=NUM_TIMES, help="Calibrations per case.")
    parser.add_argument("--compiled", action="store_true", help="Also try torch.compile.")
    options = parser.parse_args(arguments)
    times, widths = (3, WIDTHS[:2]) if options.quick else (options.times, WIDTHS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = Path(sysconfig.get_paths()["stdlib"], "asyncio")
        tokenize_options = [
            "tokenize",
            str(library),
            "--out",
            str(folder / "corpus"),
            "--suffix",
            ".py",
        ]
        subprocess.run([sys.executable, "-m", "forerun", *tokenize_options], check=True)
        studies = [
            make_study(folder, width, batch, options.compiled)
            for width in widths
            for batch in BATCHES
        ]
        rows = [repeat_calibration(study, times) for study in studies]
    result = {
        "rows": rows,
        "machine": describe_machine(),
        "versions": {name: importlib.metadata.version(name) for name in ("ray", "torch")},
    }
    write_result(options.json, result)
    return 0


def repeat_calibration(study: Study, times: int) -> dict[str, Any]:
    """Calibrate the group of the base width several times, print its row, and return it."""
    pool = start_pool(study, lambda: None)
    try:
        calibrations, seconds = [], []
        for _ in range(times):
            began = time.monotonic()
            calibrations.append(calibrate(study, pool))
            seconds.append(time.monotonic() - began)
    finally:
        pool.close()
    row = summarize(calibrations, seconds)
    print(json.dumps(row), flush=True)
    return row


def calibrate(study: Study, pool: Any) -> Calibration:
    """Calibrate once, for a group of runs with about a minute of work.

    The steps are those of `forerun._launcher.study.calibration.procedure`.
    """
    group = next(group for group in group_runs(study) if group.asked.part == "proxy")
    kinds = ask_device_kinds(pool, lambda: None)
    work = PlannedWork(kinds=kinds, phases=group.phases)
    measurements = ModeMeasurements(
        group.asked.given,
        make_measure_modes(study, group.example, pool, kinds, MODE_SECONDS, lambda: None),
    )
    return choose_mode(group.asked, work, measurements)


def summarize(calibrations: list[Calibration], seconds: list[float]) -> dict[str, Any]:
    """Return the row of one study's calibrations."""
    request = calibrations[0].asked
    ratios = collections.defaultdict(list)
    for calibration in calibrations:
        for measured_mode in calibration.figures:
            mode_name = describe_mode(measured_mode.mode, request.given)
            ratios[mode_name].append(measured_mode.ratio)
    chosen = collections.Counter(
        describe_mode(calibration.chosen, request.given) for calibration in calibrations
    )
    return {
        "width": request.shape.width,
        "batch_tokens": request.batch_tokens,
        "times": len(calibrations),
        "chosen": dict(chosen),
        "ratios": {
            mode: [min(mode_ratios), statistics.median(mode_ratios), max(mode_ratios)]
            for mode, mode_ratios in ratios.items()
        },
        "seconds": [min(seconds), statistics.median(seconds), max(seconds)],
        "last": [dataclasses.asdict(measured) for measured in calibrations[-1].figures],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
