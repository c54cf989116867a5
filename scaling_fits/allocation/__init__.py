"""Choose parameters and tokens for a budget, and integer shapes.

Enters:   a fit, and a budget in FLOPs, GPU-hours, or dollars, with its limits.
Leaves:   N, D, and loss with intervals, the flat range, a shape in integers.
Promises: the result names the limit that binds and all assumptions.
Refuses:  a budget without price or throughput, shapes that no parallelism divides, sizes that the
law does not cover.
"""
