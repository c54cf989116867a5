"""The frozen launch config: one content-addressed decision, and its attestations.

Enters:   a decision.
Leaves:   `launch.json` in a folder named by its digest; evidence, exports and launches that name
it.
Promises: the digest covers the decision alone; a folder is written whole or not at all.
Refuses:  an edited config, an attestation of another digest.
"""
