"""Workers as Ray actors, on a cluster that forerun starts or on an existing one.

Enters:   the number of workers, and the share of a device that each takes.
Leaves:   a `Pool`.
Promises: only `pool` and `head` import Ray; nothing of it outlives the driver.
Refuses:  a cluster whose nodes cannot run the study.
"""
