"""The drills before a launch: faults that a lab injects on purpose before it spends the money.

Enters:   a frozen config, its corpus, and this machine.
Leaves:   a result per drill, and one attestation that names the config's digest.
Promises: the drills run the embedded trainer itself, under torchrun, with the faults after which
    they are named; a trainer with a fault fails the drill that looks for it (tested).
Refuses:  a config that the embedded trainer does not train; another corpus; a shape for which this
    machine is too small.
"""
