"""Workers as Ray actors, on a cluster of our own or one that exists.

Enters:   how many workers, with how much of which device.
Leaves:   a `Pool`.
Promises: Ray enters in `pool` and `head` alone; nothing of it outlives the driver.
Refuses:  a cluster whose nodes cannot run the study.
"""
