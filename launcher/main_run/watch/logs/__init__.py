"""Logs of a main run, from wherever they are written, as columns over steps.

Enters:   forerun's `metrics.jsonl`, any trainer's JSONL, W&B, TensorBoard.
Leaves:   `LogColumns`: arrays over logged steps, and notes on what is unusual about the log.
Promises: logs that grow, are cut, or are replaced are followed: each look reads what is there.
Refuses:  a log in which no loss is found.
"""
