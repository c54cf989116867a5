"""Choose the runs to add so that a verdict can be given.

Enters:   the runs so far, their optima, and the question.
Leaves:   runs and seeds to add, cheapest first.
Promises: pure functions.
Refuses:  nothing.
"""
