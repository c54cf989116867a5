"""Tables of runs that people already have, as the points of a question.

Enters:   rows of a file.
Leaves:   the points of one question, and notes on what was assumed.
Promises: every problem is reported with its line.
Refuses:  columns that cannot be told apart.
"""
