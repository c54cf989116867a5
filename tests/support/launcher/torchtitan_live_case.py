"""Helper for tests that train an export with torchtitan."""

import json
import shutil
import subprocess
from pathlib import Path

from trainer_venv import build_torchrun_command, run_in_trainer

MAIN = Path(__file__).parents[3] / "benchmarks" / "gpu" / "torchtitan_main.py"


def train_export(
    python: Path, export_dir: Path, corpus: Path, *options: str, num_ranks: int
) -> tuple[subprocess.CompletedProcess[str], list[list[float]]]:
    """Train an export on several ranks of this machine.

    Args:
        python: Interpreter that has torchtitan.
        export_dir: Folder of the export.
        corpus: Folder of the corpus.
        options: Further options of torchtitan's command line.
        num_ranks: Number of ranks to start.

    Returns:
        The finished process, and the step, loss, and gradient norm of each step.
    """
    losses = export_dir / "losses.jsonl"
    losses.unlink(missing_ok=True)
    shutil.copy(MAIN, export_dir)
    options = ("--module", "forerun_torchtitan", "--config", "main_run", *options)
    command = [*build_torchrun_command(python, num_ranks), MAIN.name, *options]
    process = run_in_trainer(
        command, export_dir, FORERUN_DATA=corpus, LOSSES=losses, FORERUN_LOG_EVERY_STEPS="1"
    )
    assert losses.exists(), process.stderr[-3000:]
    return process, [json.loads(line)[:3] for line in losses.read_text().splitlines()]
