"""Helper for tests that train an export with OLMo-core."""

import json
import subprocess
from pathlib import Path

import numpy as np
from live_case import build_curve
from trainer_venv import build_torchrun_command, run_in_trainer


def train_export(
    python: Path, export_dir: Path, corpus: Path, *overrides: str, num_ranks: int
) -> tuple[subprocess.CompletedProcess[str], np.ndarray]:
    """Run the export's own script on several ranks of this machine.

    Args:
        python: Interpreter that has OLMo-core.
        export_dir: Folder of the export.
        corpus: Folder of the corpus.
        overrides: Overrides of `run.json`, such as `num_ranks=1`.
        num_ranks: Number of ranks to start.

    Returns:
        The finished process, and the curve of `live_case.build_curve`, which is empty if the script
        logged no step.
    """
    command = [*build_torchrun_command(python, num_ranks), "train.py", *overrides]
    process = run_in_trainer(command, export_dir, FORERUN_DATA=corpus, OLMO_SHARED_FS="1")
    files = list(export_dir.glob("outputs/*/metrics.jsonl"))
    rows = [json.loads(line) for line in files[0].read_text().splitlines()] if files else []
    return process, build_curve(rows)
