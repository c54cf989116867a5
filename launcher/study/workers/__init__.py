"""The code that runs inside a worker: engines of proxies behind the pool's `Host` protocol.

Enters:   calls of the pool: start, step, save, stop.
Leaves:   losses, results, saved states, on one device.
Promises: a run that is moved to another worker continues bit by bit.
Refuses:  a corpus or code that differs from the driver's.
"""
