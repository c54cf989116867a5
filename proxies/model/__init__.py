"""The decoder that proxies train, and its optimizer; every tensor may carry a leading trial axis.

Enters:   a shape, token ids, numbers per parameter.
Leaves:   logits, losses, updates.
Promises: a slot of a bank computes what the same model computes alone.
Refuses:  shapes that do not divide.
"""
