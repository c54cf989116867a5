"""Read existing tables of runs into the points of one transfer question.

Enters:   rows of a file.
Leaves:   the points of one question, and notes on what was assumed.
Promises: every problem is reported with its line.
Refuses:  columns that have the same meaning.
"""
