"""The store of a study: a hash-chained ledger, curves, checkpoints, locks, and their repair.

Enters:   records to append.
Leaves:   `ledger.db`, `curves/`, `checkpoints/`, `live.json`.
Promises: appended records survive a power loss; readers change nothing.
Refuses:  a damaged chain, a second or stale driver, a full disk.
"""
