"""What shall be bought? Sizes and tokens for a budget, and integer shapes.

Enters:   a fit, and a budget in FLOPs, GPU-hours or dollars with what binds it.
Leaves:   N, D and loss with intervals, the flat range, a shape in integers.
Promises: what binds is said; what was assumed is in the answer.
Refuses:  a budget without price or throughput, shapes no parallelism divides, sizes no law reaches.
"""
