"""The study's store: a hash-chained ledger, curves, checkpoints, locks, and their repair.

Enters:   records to append.
Leaves:   `ledger.db`, `curves/`, `checkpoints/`, `live.json`.
Promises: what was appended survives a power loss; readers change nothing.
Refuses:  a damaged chain, a second or stale driver, a full disk.
"""
