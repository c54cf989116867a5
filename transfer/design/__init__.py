"""Which runs to add so that a verdict can be given.

Enters:   what is known so far.
Leaves:   runs and seeds, the most telling for their cost first.
Promises: pure functions.
Refuses:  nothing.
"""
