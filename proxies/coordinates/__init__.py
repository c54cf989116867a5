"""The coordinate check: does each layer's output keep its size as width or depth grows?

Enters:   a model to train at several widths, seeds.
Leaves:   slopes with intervals, a verdict per layer, the likely mistake.
Promises: a verdict is one only if the seeds agree.
Refuses:  fewer than two widths.
"""
