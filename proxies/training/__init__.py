"""The training loop of proxies: one trial, or a bank of K trials as one batched model.

Enters:   `RunSpec`s and token shards.
Leaves:   `RunResult`s, curves, saved states.
Promises: the same spec gives the same bits, whatever other trials are in the bank; a run that
  diverges has a result like any other.
Refuses:  a saved state of another run, a mode that the device does not support.
"""
