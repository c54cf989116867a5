"""One training run, or a bank of runs (trained as one batched model), as a function of its spec.

Enters:   a `RunSpec` (shape, parametrization, hyperparameters, schedule, seed) and token shards.
Leaves:   a `RunResult` and its `Curve`.
Promises: the same spec on the same machine gives the same bits, whichever runs share the bank; a
    run that diverges has a result like any other.
Refuses:  shapes that do not add up, token ids outside the vocabulary, truncated shards, non-finite
records.

This file imports nothing: importing `forerun._proxies.core.spec` must load nothing but the standard
library.
"""
