"""What will the big run do, and how sure are we? Pure functions of finished runs.

Enters:   a table of runs: parameters, tokens, final loss in nats.
Leaves:   a fit (laws, weights, draws, back-test), and from it predictions and allocations with
intervals.
Promises: the same table and seed give the same numbers; intervals are checked against held-out
budgets.
Refuses:  cells that are no measurement, tables that cannot identify a law, numbers without a
warning.

`laws` and `forecast` are of the loss, `compute` of what needs no such law (isoFLOP,
hyperparameters), `allocation` of what to buy with one; `summary` and `fit_file` tell and keep them.
"""
