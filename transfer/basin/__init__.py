"""Fit the loss basin of each size: its shape, its noise, and its optimum.

Enters:   points of one size or of all sizes.
Leaves:   optima with intervals, or the reason there is none.
Promises: several families of curves are averaged, because theory does not prescribe one.
Refuses:  an optimum at the grid's edge, a curve flat within its noise.
"""
