"""The drills before a launch: what a lab breaks on purpose before it spends the money.

Enters: a frozen config, its corpus, and this machine.
Leaves: a result per drill, and one attestation that names the config's digest.
Promises: what is looked at are runs of the embedded trainer itself, under torchrun, with the faults
    that drills are called after; a faulty trainer fails the drill that looks for its fault
    (tested).
Refuses: a config that the embedded trainer does not train; a corpus that is another; a shape that
    this machine does not hold.
"""
