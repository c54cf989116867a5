"""The pages below docs/reference, made from the code: `make reference` writes them, a test holds
them against it.

Enters:   the verbs as click has them, the plan's sections, the records' source, the recorded shapes
of answers.
Leaves:   `writing.PAGES`: of each file name what makes its text.
Promises: the same text on any terminal and with any width; what has no sentence in the code is no
sentence here.
Refuses:  an environment variable that the code reads and no sentence explains, and the reverse.
"""
