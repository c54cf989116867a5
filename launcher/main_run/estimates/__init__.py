"""Estimates of a run before it runs: memory, time, money.

Enters:   a `forerun._proxies.core.shape.Shape` with tokens and a layout, an accelerator, a plan.
Leaves:   bytes per rank, hours and dollars with intervals.
Promises: every formula names its source; memory is compared with torch's tracker, hours against
published runs.
Refuses:  numbers of a machine that cannot be; a measured throughput above the peak.
"""
