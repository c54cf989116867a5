"""The runs that a study needs (search, tests of transfer, ladder), and the evaluation of their
results.

Enters:   a `Study` and the results so far.
Leaves:   lists of `RunSpec`s; the values found, and the rules that carry them to the target.
Promises: pure functions: the same results ask for the same runs. No module imports torch.
Refuses:  axes and values that no run can have.
"""
