"""The driver: runs in, outcomes out; banks filled, losses counted, caps kept.

Enters:   a source of runs and a pool of workers.
Leaves:   one outcome per run in the ledger.
Promises: a lost or hung worker costs time, never an outcome; no unbounded wait.
Refuses:  spending beyond a cap.
"""
