"""One search by Ray Tune with OptunaSearch (TPE): run by `peers.py`, with the interpreter that has `ray[tune]`.

    python benchmarks/peers_tune.py ASKED

ASKED is a JSON file: {"plan", "study", "num_trials", "num_workers", "reuse_actors", "out"}. A null plan: no training,
the trial says its loss at once. Writes {"ready", "ended": [[time.time(), loss], ...], "peak_rss_mb", "versions"}.
A diverged trial is told as the loss at which our engine gives it up: a searcher that hears NaN learns nothing.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import ray
from process_tree import own_peak_mb
from ray import tune
from ray.tune.search.optuna import OptunaSearch

RANGES = {"learning_rate": (2**-12, 2**-2), "warmup_fraction": (0.0, 0.3), "clip_norm": (0.25, 4.0)}
"""Of the objective that costs nothing; as `peers.py` has them."""
DIVERGED_OVER_NATS = 1.0


def trivial(config: dict[str, float]) -> None:
    """A loss, at once."""
    loss = 2.0 + 0.02 * (math.log2(config["learning_rate"]) + 6) ** 2
    tune.report({"loss": loss, "ended": time.time()})


def trained(config: dict[str, float], study: Any) -> None:
    """The proxy at a point of the search, by our engine for one trial."""
    from proxies.data.tokens import TokenStore
    from proxies.training.solo import Solo

    store = TokenStore(study.corpus, trusted=True)
    solo, ended = Solo(store), []
    solo.admit(0, study.trial(config))
    while not ended:
        ended = solo.advance(50)
    loss = ended[0][1].loss_nats
    worst = math.log(store.manifest.vocab_size) + DIVERGED_OVER_NATS
    tune.report({"loss": worst if loss is None else loss, "ended": time.time()})


def objective(asked: dict[str, Any]) -> tuple[Any, dict[str, tuple[float, float]], int]:
    """What to call with a point, the ranges, and the search's seed."""
    if asked["plan"] is None:
        return trivial, RANGES, 0
    from launcher.study.study_folder import plan_study

    study = plan_study(Path(asked["plan"]), Path(asked["study"]), ("proxy.num_slots=1",))
    search = study.plan.search
    names = ("learning_rate", "warmup_fraction", "clip_norm")
    return functools.partial(trained, study=study), {name: getattr(search, name) for name in names}, search.seed


def main(asked: dict[str, Any]) -> None:
    """Search, and write what came of it."""
    call, ranges, seed = objective(asked)
    space = {
        name: tune.uniform(*ends) if name == "warmup_fraction" else tune.loguniform(*ends)
        for name, ends in ranges.items()
    }
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    ray.init(
        address="local", num_cpus=asked["num_workers"], include_dashboard=False, log_to_driver=False,
        logging_level=logging.ERROR,
    )  # fmt: skip
    ready = time.time()
    tuner = tune.Tuner(
        tune.with_resources(call, {"cpu": 1}),
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
        "ready": ready, "done": time.time(), "ended": ended,
        "peak_rss_mb": own_peak_mb(),
        "versions": {"ray": ray.__version__, "optuna": optuna.__version__},
    }  # fmt: skip
    ray.shutdown()
    Path(asked["out"]).write_text(json.dumps(body))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
