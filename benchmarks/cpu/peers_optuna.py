"""A search by Optuna as its manual has it run side by side: processes that share a study in SQLite
(`peers.py`).

python benchmarks/cpu/peers_optuna.py ASKED.json            # as `peers_tune.py`; writes the same
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import optuna
from peers_objective import objective


def work(asked: dict[str, Any], number: int) -> None:
    """One process: trials until the study has them all."""
    import torch

    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    call, ranges, seed = objective(asked)

    def loss_of(trial: optuna.Trial) -> float:
        point = {
            name: trial.suggest_float(name, *ends, log=name != "warmup_fraction")
            for name, ends in ranges.items()
        }
        loss = call(point)
        trial.set_user_attr("ended", time.time())
        return loss

    study = optuna.load_study(
        study_name="peer",
        storage=f"sqlite:///{asked['study']}/optuna.db",
        sampler=optuna.samplers.TPESampler(seed=100 * seed + number),
    )
    states = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.RUNNING)
    study.optimize(
        loss_of, callbacks=[optuna.study.MaxTrialsCallback(asked["num_trials"], states=states)]
    )


def main(path: Path) -> None:
    """Start the processes, wait, and write what came of it."""
    asked = json.loads(path.read_text())
    os.makedirs(asked["study"], exist_ok=True)  # noqa: PTH103
    ready = time.time()
    # Before its processes, which would make the tables of the database at one time, and fail.
    study = optuna.create_study(study_name="peer", storage=f"sqlite:///{asked['study']}/optuna.db")
    command = [sys.executable, __file__, str(path)]
    workers = [subprocess.Popen([*command, str(number)]) for number in range(asked["num_workers"])]
    if sum(abs(worker.wait()) for worker in workers):
        raise SystemExit("a worker failed")
    ended = sorted(
        (trial.user_attrs["ended"], trial.value)
        for trial in study.trials
        if trial.value is not None
    )
    Path(asked["out"]).write_text(
        json.dumps(
            {
                "ready": ready,
                "done": time.time(),
                "ended": ended,
                "versions": {"optuna": optuna.__version__},
            }
        )
    )


if __name__ == "__main__":
    asked_path = Path(sys.argv[1])
    if len(sys.argv) > 2:
        work(json.loads(asked_path.read_text()), int(sys.argv[2]))
    else:
        main(asked_path)
