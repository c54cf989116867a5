"""What shall be bought? Sizes and tokens for a budget, and integer shapes.

Enters:   a fit, and a budget in FLOPs, GPU-hours or dollars with what binds it.
Leaves:   N, D and loss with intervals, the flat range, a shape in integers.
Promises: the answer names what binds and what was assumed.
Refuses:  a budget without price or throughput, shapes no parallelism divides, sizes no law reaches.
"""
