"""Is this machine fit for a study? The standard library alone, so that a broken environment still
gets its report.

Enters:   what the machine, the environment and the folders are, gathered as plain facts.
Leaves:   `findings.DoctorFinding`s: ok, warn or fail, each with the command that fixes it.
Promises: what may crash or hang is tried in another process with a time limit; no secret's value is
kept.
Refuses:  nothing: what could not be looked at is a finding too.
"""
