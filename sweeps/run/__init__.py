"""The driver: it executes runs on a pool and records their outcomes.

Enters:   a source of runs and a pool of workers.
Leaves:   one outcome per run in the ledger.
Promises: a lost or hung worker costs time, never an outcome; no wait is unbounded.
Refuses:  spending beyond a cap.
"""
