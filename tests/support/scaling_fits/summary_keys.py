"""Top-level JSON keys of the summaries of fits and allocations.

Users' scripts rely on these keys, both from the Python functions and from the commands.
"""

FIT_KEYS = {
    "form",
    "status",
    "parameters",
    "members",
    "intervals",
    "level",
    "exponents",
    "num_runs",
    "dropped",
    "backtest",
    "warnings",
}
ALLOCATION_KEYS = {
    "flops",
    "params",
    "tokens",
    "tokens_per_param",
    "batch_tokens",
    "loss",
    "interval",
    "params_interval",
    "tokens_interval",
    "flat_range",
    "warnings",
}
