"""Where every field of a frozen launch config came from: value, source, strength, what would change
it.

Enters:   at the freeze a decision, its study and the report's numbers; at `forerun explain` the
attestation alone.
Leaves:   the attestation `provenance.json`, a record a field; words for people.
Promises: nothing is worked out again when it is read, so what is shown is what was known at the
          freeze; reading loads nothing heavy.
Refuses:  a config or an attestation that was edited; one without the attestation; a name that is no
field's.
"""
