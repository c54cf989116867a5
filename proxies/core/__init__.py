"""The language of the project: what a run is, how records are checked, written and hashed. Standard
library only.

Enters:   plain values.
Leaves:   `RunSpec`, `RunResult`, shapes, schedules, rules of parametrizations, FLOPs, canonical
JSON.
Promises: one value has one text and one sha256; every record checks itself.
Refuses:  values that no run can have, all problems at once.
"""
