"""Which size, rate and batch were best at each budget, and where do they go? No law of the loss is
asked.

Enters:   tables of runs at a few budgets.
Leaves:   optima per budget with intervals, and power laws of them against compute, or against N and
D.
Promises: an optimum is one only if runs lie on both sides of it; every extrapolation has an
interval.
Refuses:  budgets without a minimum, and a bare parabola without its bias.
"""
