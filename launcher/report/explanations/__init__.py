"""Explanations of a frozen launch config: source, strength, and possible changes of every field.

Enters:   at the freeze a decision, its study and the report's numbers; at `forerun explain` the
    attestation alone.
Leaves:   the attestation `provenance.json`, with a record per field; text for people.
Promises: nothing is computed again when it is read, so what is shown is what was known at the
    freeze; reading loads nothing heavy.
Refuses:  a config or an attestation that was edited; a config without the attestation; a name that
    no field has.
"""
