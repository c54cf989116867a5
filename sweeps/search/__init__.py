"""Search methods: samplers, growing ranges, pruning, replicates.

Enters:   a space, the points tried so far, and their outcomes.
Leaves:   the next point, or the answer that the search has ended.
Promises: each suggestion is a pure function of what is recorded.
Refuses:  an empty space.
"""
