"""The plan of a study, written as TOML and checked key by key, and the runs that follow from it
alone.

Enters:   `plan.toml`, options of `init`, presets.
Leaves:   a `Plan` and a `Study`; a plan file with a sentence for every key; its JSON Schema.
Promises: every problem is reported at once, with its key, value and limit.
Refuses:  a plan that cannot lead to a decision, or one that holds a secret.
"""
