"""Judge whether an optimal hyperparameter transfers to a larger model, with intervals and regret.

Enters:   losses of proxy runs over sizes along one axis, values of a hyperparameter, and seeds (or
a table of them), and the target size.
Leaves:   a `Verdict`: optimum per size, drift per doubling, and the regret of transferring in nats,
each with an interval.
Promises: pure functions of their arguments; the same points and seed give the same verdict; `holds`
only on evidence.
Refuses:  an optimum at the grid's edge, a loss basin flat within its noise, too few rates. The
verdict then lists the runs to add.
"""
