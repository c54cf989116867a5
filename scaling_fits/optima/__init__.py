"""Find the best size, learning rate, and batch size of groups of runs, and extrapolate them. No law
of the loss is needed.

Enters:   tables of runs at a few budgets, or at a few sizes and durations.
Leaves:   optima with intervals, and power laws of them against compute, or against N and D.
Promises: an optimum is accepted only if runs lie on both sides of it; every extrapolation has an
interval.
Refuses:  groups of runs without a minimum, and a plain parabola without a correction of its bias.
"""
