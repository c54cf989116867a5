"""A study as a table, for notebooks. Read only.

Enters:   a ledger.
Leaves:   a DataFrame.
Promises: nothing is written.
Refuses:  a folder without a sound ledger.
"""
