"""Basics of the launcher that every other folder uses: files, logs, signals, and progress lines.
Nothing here knows studies.

Enters:   paths, lines of metrics, signals.
Leaves:   metrics files, event logs, names of checkpoint folders, terminal progress, and calls of
wandb in its own process.
Promises: nothing here imports torch, Ray, or Optuna.
Refuses:  files that are not plain files, and links that lead out of a folder.
"""
