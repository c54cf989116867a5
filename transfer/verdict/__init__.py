"""Give the verdict (holds, drifts, or cannot tell) with its reasons, as data and as sentences.

Enters:   a question and its points.
Leaves:   a `Verdict`, its summary, the rule a launch config keeps.
Promises: `holds` only on evidence; the same points and seed give the same verdict.
Refuses:  nothing: too little evidence is `cannot tell`.
"""
