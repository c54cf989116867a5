"""Sweeps of many runs that lose no result and never repeat a finished run.

Enters:   a source of `RunSpec`s (a list, or a search), a pool of workers that host banks, a study
folder.
Leaves:   a ledger of hash-chained records and a curve file per run.
Promises: one outcome per run, durable once reported; an interrupted search continues with the same
points.
Refuses:  a damaged ledger, a changed plan, a second or stale driver, a full disk, an unbounded
wait.
"""
