"""The coordinate check: does each layer's output keep its size as width or depth grows?

Enters:   a model to train at several widths (or depths) and seeds.
Leaves:   slopes with intervals, a verdict per layer, the likely mistake.
Promises: a layer passes or fails only if the seeds agree; otherwise the check cannot tell.
Refuses:  fewer than two widths.
"""
