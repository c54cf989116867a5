"""Checks of this machine for a study. They use the standard library alone, so that a broken
environment still gets a report.

Enters:   plain facts about the machine, the environment, and the folders.
Leaves:   `findings.DoctorFinding`s: ok, warn or fail, each with the command that fixes it.
Promises: what may crash or hang is tried in another process with a time limit; no value of a secret
is kept.
Refuses:  nothing: a check that cannot run is a finding too.
"""
