"""Trains an export with torchtitan, for tests and benchmarks."""

import json
import shutil
from pathlib import Path

from trainer_venv import build_torchrun_command, run_in_trainer

MAIN = Path(__file__).parents[3] / "benchmarks" / "gpu" / "torchtitan_main.py"


def train_export(python: Path, export_dir: Path, corpus: Path, num_ranks: int, *options: str):
    """Run the export on `num_ranks` ranks; return the process and step, loss and norm of each
    step.
    """
    losses = export_dir / "losses.jsonl"
    losses.unlink(missing_ok=True)
    shutil.copy(MAIN, export_dir)
    options = ("--module", "forerun_torchtitan", "--config", "main_run", *options)
    command = [*build_torchrun_command(python, num_ranks), MAIN.name, *options]
    done = run_in_trainer(
        command, export_dir, FORERUN_DATA=corpus, LOSSES=losses, FORERUN_LOG_EVERY_STEPS="1"
    )
    assert losses.exists(), done.stderr[-3000:]
    return done, [json.loads(line)[:3] for line in losses.read_text().splitlines()]
