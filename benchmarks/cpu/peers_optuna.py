"""One search by Optuna's TPE in several processes that share a study in SQLite.

    python benchmarks/cpu/peers_optuna.py REQUEST

`peers.py` runs this program and measures its cost. REQUEST and the result file are those of
`peers_tune.py`, except that the result has no peak memory. The processes are set up as Optuna's
manual describes for searches on one machine.
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
from peers_objective import load_objective


def run_trials(request: dict[str, Any], worker_index: int) -> None:
    """Run trials in this process until the study has all of them."""
    import torch

    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    objective, ranges, seed = load_objective(request)

    def evaluate(trial: optuna.Trial) -> float:
        point = {
            name: trial.suggest_float(name, *ends, log=name != "warmup_fraction")
            for name, ends in ranges.items()
        }
        loss = objective(point)
        trial.set_user_attr("ended", time.time())
        return loss

    study = optuna.load_study(
        study_name="peer",
        storage=f"sqlite:///{request['study']}/optuna.db",
        sampler=optuna.samplers.TPESampler(seed=100 * seed + worker_index),
    )
    states = (optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.RUNNING)
    study.optimize(
        evaluate, callbacks=[optuna.study.MaxTrialsCallback(request["num_trials"], states=states)]
    )


def main(path: Path) -> None:
    """Start the worker processes, wait for them, and write the result."""
    request = json.loads(path.read_text())
    os.makedirs(request["study"], exist_ok=True)  # noqa: PTH103
    ready = time.time()
    # Create the study first: two processes that create the database's tables at once fail.
    study = optuna.create_study(
        study_name="peer", storage=f"sqlite:///{request['study']}/optuna.db"
    )
    command = [sys.executable, __file__, str(path)]
    workers = [
        subprocess.Popen([*command, str(number)]) for number in range(request["num_workers"])
    ]
    if sum(abs(worker.wait()) for worker in workers):
        raise SystemExit("a worker process failed; its error is in the output above")
    ended = sorted(
        (trial.user_attrs["ended"], trial.value)
        for trial in study.trials
        if trial.value is not None
    )
    Path(request["out"]).write_text(
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
    request_path = Path(sys.argv[1])
    if len(sys.argv) > 2:
        run_trials(json.loads(request_path.read_text()), int(sys.argv[2]))
    else:
        main(request_path)
