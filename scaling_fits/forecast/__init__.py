"""Forecasts with calibrated intervals: laws are pooled, refitted, and weighted by held-out runs.

Enters:   fitted laws.
Leaves:   losses, exponents, and sizes with intervals; whether a forecast is conclusive.
Promises: intervals are calibrated on public scaling runs (`benchmarks/statistics/forecasts.py`).
Refuses:  nothing: numbers that the runs do not determine are marked.
"""
