"""The decoder that proxies train, its loss, and its optimizers, for one model and for a bank.

A bank trains K trials of one shape as one batched model, whose tensors have a leading trial axis.
Start reading at `decoder.Decoder`, then `bank_adamw.BankAdamW`.

Enters:   a shape, token ids, and numbers per parameter.
Leaves:   logits, losses, and updates.
Promises: a trial of a bank computes the same as the same model alone.
Refuses:  sequences of another length than the shape's.
"""
