"""Views turn the findings of a study into plain data for the report and the terminal.

Enters:   records and results.
Leaves:   JSON-ready dicts, short sentences, numbers as HTML.
Promises: pure functions; what comes from a study is escaped.
Refuses:  nothing.
"""
