"""From the sizes that were run to the target: drift of the optimum, and what a transferred value
costs.

Enters:   optima or losses per size.
Leaves:   drift, offset and regret, each with an interval.
Promises: no cost is larger than training can lose.
Refuses:  nothing: what the runs do not determine is marked so.
"""
