"""Predict the loss of a large run and its uncertainty from finished runs. All functions are pure.

Enters:   a table of runs: parameters, tokens, final loss in nats.
Leaves:   a fit (laws, weights, draws, back-test), and from it predictions and allocations with
intervals.
Promises: the same table and seed give the same numbers; intervals are checked against held-out
budgets.
Refuses:  cells that are not measurements, tables that cannot identify a law, numbers without a
warning.

`laws` and `forecast` model the loss. `optima` holds analyses that need no law of the loss
(isoFLOP, hyperparameters). `allocation` chooses sizes and shapes for a budget. `summary` and
`fit_file` print and store fits.
"""
