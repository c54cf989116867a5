"""The watch on a main run: what its metrics say, compared with what was frozen before it.

Enters:   a `frozen.Decision`, and a run's lines (`launcher.base.metrics`) or a dashboard's copy of
them.
Leaves:   alerts with their evidence and the command to run next, the run's standing, a score once
it has ended.
Promises: the statistics are pure functions of numbers; `benchmarks/watch.py` measures their false
alarms.
Refuses:  to call a run healthy or ill on too little: it says that it cannot tell.
"""
