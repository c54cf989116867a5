"""Does the optimum stay put as the model grows, how sure are we, and what would being wrong cost?

Enters:   losses of proxy runs over an axis of size, a hyperparameter and seeds (or a table of
them), and the target.
Leaves:   a `Verdict`: optimum per size, drift per doubling, regret of transferring in nats, each
with an interval.
Promises: pure functions of their arguments; the same points and seed give the same verdict; `holds`
only on evidence.
Refuses:  an optimum at the grid's edge, a basin flat within its noise, too few rates: and says what
to run.
"""
