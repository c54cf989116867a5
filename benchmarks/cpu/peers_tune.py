"""One search by Ray Tune with OptunaSearch (TPE).

    python benchmarks/cpu/peers_tune.py REQUEST

`peers.py` runs this program, with a Python that has `ray[tune]`, and measures its cost. REQUEST is
a JSON file with the keys "plan", "study", "num_trials", "num_workers", "reuse_actors" and "out"; a
plan of null asks for trials that train nothing. The program writes "ready", "done", "ended" (pairs
of time.time() and loss), "peak_rss_mb" and "versions" to the file "out". A diverged trial reports
the loss at which forerun's engine gives it up, because a searcher that receives NaN learns nothing.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import ray
from peers_objective import Objective, load_objective
from ray import tune
from ray.tune.search.optuna import OptunaSearch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from process_tree import read_peak_memory_mb


def make_trainable(objective: Objective) -> Callable[[dict[str, float]], None]:
    """Return a trainable that reports the loss of a point and the time when it ended."""
    return lambda config: tune.report({"loss": objective(config), "ended": time.time()})


def main(request: dict[str, Any]) -> None:
    """Run the search and write its result."""
    objective, ranges, seed = load_objective(request)
    space = {
        name: tune.uniform(*ends) if name == "warmup_fraction" else tune.loguniform(*ends)
        for name, ends in ranges.items()
    }
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    ray.init(
        address="local",
        num_cpus=request["num_workers"],
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    ready = time.time()
    tuner = tune.Tuner(
        tune.with_resources(make_trainable(objective), {"cpu": 1}),
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            search_alg=OptunaSearch(seed=seed),
            num_samples=request["num_trials"],
            max_concurrent_trials=request["num_workers"],
            reuse_actors=request["reuse_actors"],
        ),
        run_config=tune.RunConfig(storage_path=os.path.abspath(request["study"]), verbose=0),  # noqa: PTH100
    )
    results = tuner.fit()
    if results.errors:
        raise results.errors[0]
    ended = sorted((result.metrics["ended"], result.metrics["loss"]) for result in results)
    output = {
        "ready": ready,
        "done": time.time(),
        "ended": ended,
        "peak_rss_mb": read_peak_memory_mb(),
        "versions": {"ray": ray.__version__, "optuna": optuna.__version__},
    }
    ray.shutdown()
    Path(request["out"]).write_text(json.dumps(output))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
