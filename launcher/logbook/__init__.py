"""One dated chronicle of a study and its main run, drawn from the records.

Enters:   ledger, attestations, the chronicle of a main run, people's notes.
Leaves:   `logbook.md`.
Promises: the same records give the same page; notes are kept on a damaged ledger too.
Refuses:  nothing.
"""
