"""The answers that verbs print, as data and as text.

Enters:   findings, fits, verdicts, parametrizations.
Leaves:   what `--json` prints, and the same for people.
Promises: text and JSON come from the same data.
Refuses:  tables that nobody can read as runs.
"""
