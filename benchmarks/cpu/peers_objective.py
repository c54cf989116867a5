"""The objective of `peers_tune.py` and `peers_optuna.py`: a plan's proxy, or nothing to train.

forerun's engine for one trial trains the proxy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANGES = {"learning_rate": (2**-12, 2**-2), "warmup_fraction": (0.0, 0.3), "clip_norm": (0.25, 4.0)}
"""Of the objective that costs nothing; as `peers.py` has them."""
DIVERGED_OVER_NATS = 1.0

Objective = Callable[[dict[str, float]], float]
"""From a point to its loss in nats."""


def trivial(config: dict[str, float]) -> float:
    """A loss, at once."""
    return 2.0 + 0.02 * (math.log2(config["learning_rate"]) + 6) ** 2


def trained(config: dict[str, float], study: Any) -> float:
    """The validation loss at a point of the search; of a run that diverged, what no run is
    above.
    """
    from proxies.data.tokens import TokenStore
    from proxies.training.solo import Solo

    store = TokenStore(study.corpus, trusted=True)
    solo, ended = Solo(store), []
    solo.admit(0, study.trial(config))
    while not ended:
        ended = solo.advance(50)
    loss = ended[0][1].loss_nats
    return math.log(store.manifest.vocab_size) + DIVERGED_OVER_NATS if loss is None else loss


def objective(asked: dict[str, Any]) -> tuple[Objective, dict[str, tuple[float, float]], int]:
    """What to call with a point, the ranges, and the search's seed."""
    if asked["plan"] is None:
        return trivial, RANGES, 0
    from launcher.study.study_folder import plan_study

    study = plan_study(
        Path(asked["plan"]), Path(asked["study"]), ("proxy.num_slots=1", "proxy.compiled=false")
    )
    search = study.plan.search
    names = ("learning_rate", "warmup_fraction", "clip_norm")
    return (
        functools.partial(trained, study=study),
        {name: getattr(search, name) for name in names},
        search.seed,
    )
