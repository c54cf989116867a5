"""Which runs a study needs: search, tests of transfer, ladder; and what their results say.

Enters:   a `Study` and the results so far.
Leaves:   lists of `RunSpec`s; values found and how they are carried to the target.
Promises: pure functions: the same results ask for the same runs. No torch.
Refuses:  axes and values that no run can have.
"""
