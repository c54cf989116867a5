"""Records that all packages share: runs, shapes, schedules, parametrizations, hyperparameters.

Start reading at `spec.RunSpec`, then `rules.Parametrization`. The package needs only the standard
library.

Enters:   plain values.
Leaves:   `RunSpec`, `RunResult`, rules of parametrizations, FLOPs, canonical JSON.
Promises: equal records have the same text and the same sha256; every record checks itself.
Refuses:  values that no run can have, all problems at once.
"""
