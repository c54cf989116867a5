"""Does the optimum stay put as the model grows, how sure are we, and what would being wrong cost?

Enters:   losses of proxy runs over width, learning rate and seed (or a table of them), and the width to launch.
Leaves:   a `Verdict`: optimum per width, drift per doubling, regret of transferring in nats, each with an interval.
Promises: pure functions of their arguments; the same points and seed give the same verdict; `holds` only on evidence.
Refuses:  an optimum at the grid's edge, a valley flat within its noise, fewer than four rates: and says what to run.
"""
