"""Find the best size, learning rate, and batch size at each budget, and extrapolate them. No law of
the loss is needed.

Enters:   tables of runs at a few budgets.
Leaves:   optima per budget with intervals, and power laws of them against compute, or against N and
D.
Promises: an optimum is accepted only if runs lie on both sides of it; every extrapolation has an
interval.
Refuses:  budgets without a minimum, and a plain parabola without a correction of its bias.
"""
