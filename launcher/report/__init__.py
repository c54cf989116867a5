"""The report: what people read about a study, a frozen config, or a main run.

Enters:   the records of `study` and `main_run`.
Leaves:   terminal text, JSON, HTML pages, figures, and W&B dashboards.
Promises: every format shows the same numbers.
Refuses:  nothing; a number that is not known is shown as unknown.
"""
