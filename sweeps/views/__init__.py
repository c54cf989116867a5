"""A study as tables: for notebooks, and as an Optuna storage. Read only.

Enters:   a ledger.
Leaves:   a DataFrame, an Optuna study.
Promises: nothing is written.
Refuses:  a folder without a sound ledger.
"""
