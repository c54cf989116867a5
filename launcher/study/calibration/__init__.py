"""Calibration: how fast workers train each shape, which numerics are chosen, and a study's cost.

Enters:   a `Study`, and measurements by its workers.
Leaves:   slots, threads, compilation and precision per shape; runs, hours and dollars per stage,
with intervals.
Promises: the choice is a pure function of the recorded figures.
Refuses:  a shape that no slot holds.
"""
