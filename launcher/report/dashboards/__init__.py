"""Dashboards show a study and its main run in W&B, from the ledger and the run's metrics.

Enters:   ledger, curves, metrics of a main run.
Leaves:   W&B runs and a workspace.
Promises: one-way, and repeatable; a separate process does the writing, so that a dashboard
    never stops training.
Refuses:  a key in a file.
"""
