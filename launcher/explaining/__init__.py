"""Every field of a frozen launch config explained from the records: value, source, strength, what would change it.

Enters:   the folder of a frozen config: `launch.json`, its attestations, and the study around them where there is one.
Leaves:   an `Explained` per field, and words for people.
Promises: no sentence that the records do not bear out; what is not known here is named as that; loads nothing heavy.
Refuses:  a config or evidence that was edited; a name that is no field's.
"""
