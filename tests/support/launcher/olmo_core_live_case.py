"""Trains an export with OLMo-core, for tests and benchmarks."""

import json
from pathlib import Path

from live_case import build_curve
from trainer_venv import build_torchrun_command, run_in_trainer


def train_export(python: Path, folder: Path, corpus: Path, num_ranks: int, *options: str):
    """Run the export's own script unchanged on `num_ranks` ranks; return the process and its
    steps, losses and gradient norms.
    """
    command = [*build_torchrun_command(python, num_ranks), "train.py", *options]
    done = run_in_trainer(command, folder, FORERUN_DATA=corpus, OLMO_SHARED_FS="1")
    files = list(folder.glob("outputs/*/metrics.jsonl"))
    rows = [json.loads(line) for line in files[0].read_text().splitlines()] if files else []
    return done, build_curve(rows)
