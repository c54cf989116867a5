"""Tests of logs that count steps in different ways, and of logs with impossible values.

A finished run is recognized however its log counts, and no absurd number is printed.
"""

import json
import random
import re
import subprocess
import sys

import pytest
from tiny_study import run_forerun, run_json
from watched_case import NUM_STEPS, compute_loss_at, read_log, write_lines

from forerun._launcher.main_run.watch.follower import Follower
from forerun._launcher.main_run.watch.logs.keys import ColumnNames
from forerun._launcher.main_run.watch.logs.readings import LogReader
from forerun._launcher.main_run.watch.logs.sources import open_source
from forerun._proxies.external.metric_files import LoggedMetrics

FINAL = 2.15
"""Final validation loss in nats."""
VALIDATED = [{"step": NUM_STEPS, "val_loss": FINAL}]
VALIDATED_EARLY = [{"step": NUM_STEPS - 1, "val_loss": FINAL}]


def make_rows(*steps):
    """Return a row with a falling loss for each step."""
    return [{"step": step, "loss": compute_loss_at(step + 1)} for step in steps]


COUNTS = {
    "0 and N": [
        {"iter": at, "train/loss": 3.0, "val/loss": loss}
        for at, loss in ((0, 3.0), (NUM_STEPS, FINAL))
    ],
    "0 to N": [*make_rows(*range(NUM_STEPS + 1)), *VALIDATED],
    "0 to N - 1": [*make_rows(*range(NUM_STEPS)), *VALIDATED_EARLY],
    "0 to N - 1, validated at N": [*make_rows(*range(NUM_STEPS)), *VALIDATED],
    "1 to N": [*make_rows(*range(1, NUM_STEPS + 1)), *VALIDATED],
    "N only": [*make_rows(NUM_STEPS), *VALIDATED],
}
"""Rows of the log of a finished run of N steps, by the step numbers that the log has."""


@pytest.mark.parametrize("counting", COUNTS)
def test_finished_run_is_recognized_however_it_counts(frozen, tmp_path, counting):
    path = write_lines(tmp_path / "log.jsonl", COUNTS[counting])
    code, body = run_json("watch", frozen, "--conclude", "--metrics", path)
    assert (code, body.get("actual_nats")) == (0, FINAL), body
    assert read_log(path, num_steps=NUM_STEPS).columns.step == NUM_STEPS
    logged = LoggedMetrics()
    for row in COUNTS[counting]:
        for key, series in (("loss", logged.train_loss), ("val_loss", logged.validation_loss)):
            value = row.get(key, row.get({"loss": "train/loss", "val_loss": "val/loss"}[key]))
            if value is not None:
                series[row.get("step", row.get("iter"))] = value
    assert logged.count_steps_done(NUM_STEPS) == NUM_STEPS


def test_live_watch_of_a_finished_foreign_run_returns(frozen, tmp_path):
    rows = [{**row, "mfu": -100.0} for row in COUNTS["0 and N"]]
    path = write_lines(tmp_path / "log.jsonl", rows)
    command = [
        sys.executable,
        "-m",
        "forerun",
        "watch",
        str(frozen),
        "--metrics",
        str(path),
        "--every",
        "0.2",
    ]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode in (0, 3, 4) and "the run finished; next:" in process.stdout
    final = next(line for line in process.stdout.splitlines() if "final validation loss" in line)
    # A known final loss needs no forecast, and a finished run needs no further look.
    assert f": {FINAL:.3f} nats" in final and "from here" not in final
    assert "next: forerun watch" not in process.stdout.partition("the run finished")[0]
    assert not re.search(r"MFU -?\d", process.stdout)
    assert "1 value left out as impossible" in process.stdout


ABSURD = re.compile(
    r"-\d[\d,.]*( s\b| min\b| h\b|%| tokens| device)|\bnan\b|\binf\b|of 0\b|in -|MFU 0\.0%|\d{25}"
    r"|\s1 (steps|lines|alarms|values) "
)
"""Matches negative times and shares, values that are not numbers, and a plural after 1."""


def write_odd_log(path, seed):
    """Write a log with oddities drawn from a seed, in its steps, values, and last bytes."""
    rng = random.Random(seed)
    steps = list(range(1, rng.choice((2, 30, 300, NUM_STEPS)) + 1))
    match seed % 10:
        case 0:
            steps = [0]
        case 1:
            steps = [NUM_STEPS]
        case 2:
            steps += steps[: len(steps) // 2]  # The log begins again.
        case 3:
            rng.shuffle(steps)
        case 4:
            steps = [step for step in steps for _ in range(2)]
    at, rows = 1.8e9, []
    for step in steps:
        at += rng.choice((1.0, 1.0, -3600.0, 1e6, 0.0))
        row = {"step": step, "loss": compute_loss_at(step + 1)}
        if seed % 3 == 0:
            row["loss"] = rng.choice((row["loss"], row["loss"], "NaN", -1.0, None, True, 1e300))
        row |= {
            "mfu": rng.choice((-100.0, 0.4, 40.0, 0.0)),
            "seconds": rng.choice((0.5, -1.0, 0.0, 1e12, "NaN")),
        }
        row |= {
            "tokens_per_second": rng.choice((1e4, -1.0, 0.0)),
            "_timestamp": rng.choice((at, -1.0, 1e300, "inf")),
        }
        row |= {"grad_norm": rng.choice((1.0, -1.0, "Infinity"))}
        rows.append(row)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    content = text.encode()[: -rng.choice((1, 7, 25))] if seed % 5 == 0 else text.encode()
    if seed % 7 == 0:
        content += bytes(rng.randrange(256) for _ in range(500))
    path.write_bytes(content)


@pytest.mark.parametrize("seed", range(40))
def test_odd_log_prints_no_absurd_number(decision, frozen, tmp_path, seed):
    path = tmp_path / "log.jsonl"
    write_odd_log(path, seed)
    keys = ColumnNames({})
    reader = LogReader(open_source(str(path), keys), keys, decision.digest, NUM_STEPS)
    for last in (False, True):
        status = Follower(decision, reader, frozen=frozen, run_dir=tmp_path / "run").look(last=last)
        assert not ABSURD.search(status.text), status.text
        figures = status.body["figures"]
        assert 0 <= figures["step"] <= NUM_STEPS
        assert figures["mfu"] is None or 0 <= figures["mfu"] <= 1
        projection = figures["projection"]
        if projection is not None:
            assert (
                min(projection["remaining_seconds"]) >= 0 and min(projection["device_hours"]) >= 0
            )


def test_odd_log_on_the_command_line_prints_no_absurd_number(frozen, tmp_path):
    write_odd_log(tmp_path / "log.jsonl", 21)
    code, out, err = run_forerun("watch", frozen, "--once", "--metrics", tmp_path / "log.jsonl")
    assert code in (0, 3, 4) and "Traceback" not in err and not ABSURD.search(out)
