"""What a run takes before it runs: memory, a parallelism that fits, time, money, failures, and whether to begin.

Enters:   a `proxies.core.shape.Shape` with tokens, an accelerator, a plan.
Leaves:   bytes per rank, degrees of parallelism with their reasons, hours and dollars with intervals.
Promises: every formula names its source; every assumed number can be replaced; memory is held against torch's tracker.
Refuses:  a shape that no parallelism fits; a layout that does not divide it.
"""
