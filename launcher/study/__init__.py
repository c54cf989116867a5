"""A study from its first run to its decision: stages in order, gates, evidence.

Enters:   a plan, a corpus, a ledger.
Leaves:   records of every stage, a decision with its gates, findings for the report.
Promises: a stopped study resumes with the runs that an uninterrupted one would have asked for.
Refuses:  a changed plan, a closed gate that nobody accepted with a reason.
"""
