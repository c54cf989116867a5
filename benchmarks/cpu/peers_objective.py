"""The objective that Ray Tune and Optuna minimize in `peers.py`: train a proxy, or train nothing.

`peers_tune.py` and `peers_optuna.py` import this module; it is not a program. forerun's engine for
one trial trains the proxy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANGES = {"learning_rate": (2**-12, 2**-2), "warmup_fraction": (0.0, 0.3), "clip_norm": (0.25, 4.0)}
"""Ranges of the objective that trains nothing; `peers.py` uses the same."""
DIVERGED_OVER_NATS = 1.0
"""Nats above the loss of a uniform guess that a diverged run is given."""

Objective = Callable[[dict[str, float]], float]
"""Function from a point of the search to its loss in nats."""


def compute_trivial_loss(point: dict[str, float]) -> float:
    """Return a loss without training: a parabola in the log of the learning rate."""
    return 2.0 + 0.02 * (math.log2(point["learning_rate"]) + 6) ** 2


def train_proxy(point: dict[str, float], study: Any) -> float:
    """Train the proxy at a point and return its validation loss.

    A diverged run returns a loss above that of every finished run.
    """
    from forerun._proxies.data.tokens import TokenStore
    from forerun._proxies.training.single_trial import SingleTrialEngine

    store = TokenStore(study.corpus, trusted=True)
    engine = SingleTrialEngine(store)
    ended: list[Any] = []
    engine.admit(0, study.build_trial(point))
    while not ended:
        ended = engine.advance(50)
    loss = ended[0][1].loss_nats
    return math.log(store.manifest.vocab_size) + DIVERGED_OVER_NATS if loss is None else loss


def load_objective(
    request: dict[str, Any],
) -> tuple[Objective, dict[str, tuple[float, float]], int]:
    """Return the objective of a request, its ranges, and the seed of the search."""
    if request["plan"] is None:
        return compute_trivial_loss, RANGES, 0
    from forerun._launcher.study.stages.study_folder import read_study

    study = read_study(
        Path(request["plan"]), Path(request["study"]), ("proxy.num_slots=1", "proxy.compiled=false")
    )
    search = study.plan.search
    return (
        functools.partial(train_proxy, study=study),
        {name: getattr(search, name) for name in RANGES},
        search.seed,
    )
