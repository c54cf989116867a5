"""Views hold the report of a study as typed findings, and say it in sentences and tables.

Enters:   records and results; `report.json` as it was read.
Leaves:   findings (`report_model`), short sentences, tables of text.
Promises: pure functions; a report is written with the keys and numbers that it was read with.
Refuses:  a `report.json` that lacks what is read.
"""
