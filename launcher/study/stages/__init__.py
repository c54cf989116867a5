"""A study from its first run to its decision: the stages in order, the gates, and the evidence.

Enters:   a plan, a corpus, a ledger.
Leaves:   records of every stage, a decision with its gates, findings for the report.
Promises: a study that was stopped resumes with the runs that an uninterrupted one would have made.
Refuses:  a changed plan, and a failed gate that nobody accepted with a reason.
"""
