"""The logbook: one page of dated events of a study and its main run, written from the records.

Enters:   ledger, attestations, the event log of a main run, people's notes.
Leaves:   `logbook.md`.
Promises: the same records give the same page; notes are kept even if the ledger is damaged.
Refuses:  nothing.
"""
