"""The corpus and the banks that several benchmarks train on.

Benchmarks import this module; it is not a program.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Curve, RunResult, RunSpec
from forerun._proxies.data.corpus import tokenize
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.training.bank import Bank


def write_python_corpus(folder: Path) -> TokenStore:
    """Tokenize the source of Python's standard library as bytes, and return the corpus."""
    tokenize(
        [Path(sysconfig.get_paths()["stdlib"])],
        folder / "corpus",
        suffixes=(".py",),
        excluded=("site-packages", "dist-packages"),
    )
    return TokenStore(folder / "corpus")


def make_demo_shape(vocab_size: int) -> Shape:
    """Return the shape of the demo's proxy at its base width."""
    return Shape(
        num_layers=2,
        width=32,
        num_heads=2,
        num_kv_heads=2,
        ffn_width=64,
        seq_len=64,
        vocab_size=vocab_size,
        family="llama",
        tied=False,
        qk_norm=False,
    )


def train_runs(specs: Sequence[RunSpec], store: TokenStore) -> list[tuple[RunResult, Curve]]:
    """Train runs of one shape, batch and schedule length in one bank.

    Args:
        specs: Runs to train, with equal numerics.
        store: Corpus of the runs.

    Returns:
        Result and curve of each run, in the order of `specs`.
    """
    first = specs[0]
    bank = Bank(first.shape, first.batch_tokens, first.numerics, store, optimizer=first.optimizer)
    waiting, index_by_slot = list(enumerate(specs)), dict[int, int]()
    ended: dict[int, tuple[RunResult, Curve]] = {}
    while waiting or index_by_slot:
        free_slots = [slot for slot in range(first.numerics.num_slots) if slot not in bank.steps]
        for slot in free_slots[: len(waiting)]:
            index_by_slot[slot], spec = waiting.pop(0)
            bank.admit(slot, spec)
        for slot, result, curve in bank.advance(first.schedule.num_steps):
            ended[index_by_slot.pop(slot)] = result, curve
    return [ended[index] for index in range(len(specs))]
