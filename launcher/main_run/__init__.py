"""The main run: the frozen launch config and everything that executes, exports, or observes it.

Enters:   a frozen launch config, a tokenized corpus, and the machines to train on.
Leaves:   exports for other trainers, a trained model with its checkpoints, the findings of the
rehearsal and of the watch.
Promises: nothing here knows the study that chose the config; its numbers are applied as written.
Refuses:  a config that was edited, or that another version wrote.
"""
