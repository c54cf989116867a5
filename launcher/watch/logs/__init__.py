"""A main run's metrics from wherever they are logged, as columns over steps.

Enters:   our `metrics.jsonl`, any trainer's JSONL, W&B, TensorBoard.
Leaves:   `LogColumns`: arrays over logged steps, and what is odd about the log.
Promises: logs that grow, are cut or replaced are followed: each look reads what is there.
Refuses:  a log in which no loss is found.
"""
