"""The embedded trainer of the main run: the training loop, its checkpoints and its callbacks, under
torchrun. `training` is the file to read first.

Enters:   a frozen config, a corpus, the ranks that torchrun started.
Leaves:   `metrics.jsonl`, checkpoints, `ending.json`.
Promises: the live optimizer has the frozen numbers, proven before the first step; a resumed run is
bitwise the same.
Refuses:  a config it cannot run, a damaged checkpoint, a batch that is not the frozen one.
"""
