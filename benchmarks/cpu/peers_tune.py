"""One search by Ray Tune with OptunaSearch (TPE): run by `peers.py`, with the interpreter that has
`ray[tune]`.

    python benchmarks/cpu/peers_tune.py ASKED

ASKED is a JSON file: {"plan", "study", "num_trials", "num_workers", "reuse_actors", "out"}. A null
plan: no training, the trial says its loss at once. Writes {"ready", "ended": [[time.time(), loss],
...], "peak_rss_mb", "versions"}. A diverged trial is told as the loss at which our engine gives it
up: a searcher that hears NaN learns nothing.
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
from peers_objective import Objective, objective
from ray import tune
from ray.tune.search.optuna import OptunaSearch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from process_tree import own_peak_mb


def reporting(call: Objective) -> Callable[[dict[str, float]], None]:
    """A trainable that tells the loss of a point, and when it ended."""
    return lambda config: tune.report({"loss": call(config), "ended": time.time()})


def main(asked: dict[str, Any]) -> None:
    """Search, and write what came of it."""
    call, ranges, seed = objective(asked)
    space = {
        name: tune.uniform(*ends) if name == "warmup_fraction" else tune.loguniform(*ends)
        for name, ends in ranges.items()
    }
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    ray.init(
        address="local",
        num_cpus=asked["num_workers"],
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    ready = time.time()
    tuner = tune.Tuner(
        tune.with_resources(reporting(call), {"cpu": 1}),
        param_space=space,
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            search_alg=OptunaSearch(seed=seed),
            num_samples=asked["num_trials"],
            max_concurrent_trials=asked["num_workers"],
            reuse_actors=asked["reuse_actors"],
        ),
        run_config=tune.RunConfig(storage_path=os.path.abspath(asked["study"]), verbose=0),  # noqa: PTH100
    )
    results = tuner.fit()
    if results.errors:
        raise results.errors[0]
    ended = sorted((each.metrics["ended"], each.metrics["loss"]) for each in results)
    body = {
        "ready": ready,
        "done": time.time(),
        "ended": ended,
        "peak_rss_mb": own_peak_mb(),
        "versions": {"ray": ray.__version__, "optuna": optuna.__version__},
    }
    ray.shutdown()
    Path(asked["out"]).write_text(json.dumps(body))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
