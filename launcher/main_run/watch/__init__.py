"""The watch compares a main run's metrics with what was frozen before the run.

Enters:   a `frozen.Decision`, and a run's lines (`forerun._launcher.main_run.metrics_file`) or a
dashboard's copy of
    them.
Leaves:   alerts with their evidence and the next command, the run's standing, and a score once it
    has ended.
Promises: the statistics are pure functions of numbers; `benchmarks/statistics/watch.py` measures
    their false alarms.
Refuses:  to call a run healthy or ill on too little data: it says that it cannot tell.
"""
