"""What every other folder of the launcher uses: files, logs, signals and progress lines, with no
study in them.

Enters:   paths, lines of metrics, signals.
Leaves:   metrics files, chronicles, checkpoint folders by name, terminal progress, one call to
    wandb in a process of its own.
Promises: nothing here loads torch, Ray or Optuna.
Refuses:  files that are not plain files, links that lead out of a folder.
"""
