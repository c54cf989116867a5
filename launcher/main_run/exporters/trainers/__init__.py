"""Each trainer's own files: one module a trainer, and the texts it writes.

Enters:   a `forerun._launcher.main_run.frozen.frozen.Decision`.
Leaves:   a folder that the trainer starts from, and a fidelity report.
Promises: numbers are written out in full; the trainer itself proves them (`prove.py`).
Refuses:  a version or a decision that the trainer cannot run.
"""
