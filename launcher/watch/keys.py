"""Under which names trainers log what the watch reads. Standard library only.

The names are those of the embedded trainer (also in the copies it leaves in W&B and TensorBoard), of torchtitan,
Megatron-LM, OLMo-core, Hugging Face's Trainer, Lightning, nanoGPT and its kin. A name that is asked for by option takes
the place of all of a column's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

UNASKED_STEP, TIME = "_step", "_timestamp"
"""Of every row of W&B, also of those that hold nothing of ours; the time is in seconds since 1970."""
STEP, LOSS, VALIDATION = "step", "train_loss_nats", "validation_loss_nats"
NAMES: Mapping[str, tuple[str, ...]] = {
    STEP: ("step", "train/global_step", "trainer/global_step", "global_step", "iteration", "iter", UNASKED_STEP),
    LOSS: (
        "train_loss_nats", "train_loss", "loss_metrics/global_avg_loss", "lm loss", "train/CE loss", "train/loss",
        "loss/train", "loss",
    ),
    VALIDATION: (
        "validation_loss_nats", "val_loss", "validation_loss", "validation_metrics/loss", "lm loss validation",
        "val/loss", "eval/loss", "eval_loss", "loss/val",
    ),
    "grad_norm": ("grad_norm", "grad-norm", "train/grad_norm", "optim/total grad norm"),
    "lr": ("lr", "learning-rate", "learning_rate", "train/learning_rate", "optim/LR (group 0)"),
    "tokens": ("tokens",),
    "tokens_per_second": ("tokens_per_second",),
    "seconds": ("seconds", "time_metrics/end_to_end(s)", "iteration-time"),
    "mfu": ("mfu",),
    "hfu": ("hfu",),
    "clip_norm": ("clip_norm",),
}  # fmt: skip
"""By column: what it may be called, the first that a source has counting."""
_WORDS = {"nan": math.nan, "inf": math.inf, "infinity": math.inf, "-inf": -math.inf, "-infinity": -math.inf}


class Keys:
    """Which name of a source is which column."""

    def __init__(self, asked: Mapping[str, str]) -> None:
        """`asked`: column -> the one name it has there; empty ones are not asked for."""
        self._names = dict(NAMES)
        self._names |= {column: (name,) for column, name in asked.items() if name}

    @property
    def wanted(self) -> frozenset[str]:
        """Every name that may be one of ours."""
        return frozenset(name for names in self._names.values() for name in names) | {TIME}

    def told(self, column: str) -> str:
        """The names a column may have, for the message that it has none."""
        return ", ".join(map(repr, self._names[column]))

    def chosen(self, there: Set[str]) -> dict[str, str]:
        """Column -> the name it has among these; a column that has none of them is not there."""
        found = {column: next((name for name in names if name in there), "") for column, names in self._names.items()}
        return {column: name for column, name in found.items() if name}


def whole(value: object) -> int | None:
    """A step: a whole number of at least 0, also as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if value == int(value) and value >= 0 else None


def number(value: object) -> float | None:
    """A float, NaN and infinities also as words; None for anything that is no number."""
    if isinstance(value, str):
        return _WORDS.get(value.strip().lower())
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
