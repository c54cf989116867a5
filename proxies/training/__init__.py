"""The training loop of proxies: one trial, or a bank of K trials as one batched model.

Enters:   `RunSpec`s and token shards.
Leaves:   `RunResult`s, curves, saved states.
Promises: the same spec gives the same bits, whoever shares the bank; divergence is data.
Refuses:  a saved state of another run, a mode that the device lacks.
"""
