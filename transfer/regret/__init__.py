"""Extrapolate the optimum to the target size, and estimate the regret of a transferred value.

Enters:   optima or losses per size.
Leaves:   drift, offset, and regret, each with an interval.
Promises: no regret exceeds the loss that training can lose at all.
Refuses:  nothing: numbers that the runs do not determine are None.
"""
