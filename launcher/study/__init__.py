"""The study: the runs before the main run, from the plan to the decision.

Enters:   a plan (TOML) and tokenized data.
Leaves:   a ledger of runs, the verdicts and gates over them, and the decision to freeze.
Promises: an interrupted study continues where it stopped; no finished run is lost or repeated.
Refuses:  a plan with problems (all of them at once), a second driver on one study.
"""
