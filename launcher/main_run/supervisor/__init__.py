"""Starts the main run, and starts it again from its newest good checkpoint when it dies or hangs.

Enters:   a frozen config, nodes or a SLURM job.
Leaves:   attempts with the cause of each death; job scripts.
Promises: no process outlives its attempt; a fault that repeats without progress ends the run.
Refuses:  a second supervisor on one run.
"""
