"""One frozen decision as the files of a trainer.

Enters:   a `forerun._launcher.main_run.frozen.frozen.Decision`.
Leaves:   the trainer's own files and a fidelity report, field by field.
Promises: what is written is read back and compared with the decision.
Refuses:  a trainer or version it does not know; a field it cannot express, unless asked to export
all the same.
"""
