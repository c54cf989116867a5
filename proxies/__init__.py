"""One training run, or a bank of them, as a pure function of its spec.

Enters:   a `RunSpec` (shape, parametrization, hyperparameters, schedule, seed) and token shards.
Leaves:   a `RunResult` and its `Curve`.
Promises: the same spec on the same machine gives the same bits, whoever shares the bank; divergence
is data.
Refuses:  shapes that do not add up, token ids outside the vocabulary, truncated shards, non-finite
records.

This file stays empty: importing `proxies.core.spec` must load nothing but the standard library.
"""
