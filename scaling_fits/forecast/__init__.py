"""Forecasts with honest intervals: laws pooled, refitted, weighed by held-out runs.

Enters:   fitted laws.
Leaves:   losses, exponents and sizes with intervals; whether a forecast is conclusive.
Promises: intervals are calibrated on public scaling runs (`benchmarks/statistics/forecasts.py`).
Refuses:  nothing: it states what is not determined.
"""
