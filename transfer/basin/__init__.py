"""The loss against a hyperparameter at each size: its shape, noise and optimum.

Enters:   points of one size or all sizes.
Leaves:   optima with intervals, or the reason there is none.
Promises: several families of curves are averaged; no theory gives one.
Refuses:  an optimum at the grid's edge, a curve flat within its noise.
"""
