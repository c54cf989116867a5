"""What to try next: samplers, growing ranges, pruning, replicates.

Enters:   a space, points tried, their outcomes.
Leaves:   the next point, or that there is none.
Promises: each suggestion is a pure function of what is recorded.
Refuses:  an empty space.
"""
