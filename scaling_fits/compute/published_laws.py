"""Published laws of the best peak learning rate and batch, to set beside one's own: facts with their sources.

They were measured with AdamW in standard parametrization and their own schedules and data; no law here is a target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Hyperparameter = Literal["learning_rate", "batch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedLaw:
    """value = coefficient * N^params_exponent * D^tokens_exponent; batches in tokens."""

    name: str
    source: str
    hyperparameter: Hyperparameter
    coefficient: float
    params_exponent: float
    tokens_exponent: float
    note: str

    def at(self, params: float, tokens: float) -> float:
        """The law's value at N parameters and D tokens."""
        return self.coefficient * math.pow(params, self.params_exponent) * math.pow(tokens, self.tokens_exponent)


def _of_compute(name: str, source: str, what: Hyperparameter, scale: float, exponent: float) -> PublishedLaw:
    """A law of compute C, taken as 6 * N * D."""
    return PublishedLaw(
        name=name, source=source, hyperparameter=what, coefficient=scale * 6**exponent, params_exponent=exponent,
        tokens_exponent=exponent, note="a law of compute C, taken as 6ND; theirs counts non-embedding FLOPs per token",
    )  # fmt: skip


_STEP_NOTE = "N without embeddings; final learning rate fixed at 1e-5"

PUBLISHED = (
    PublishedLaw(name="StepLaw", source="arXiv 2503.04715", hyperparameter="learning_rate", coefficient=1.79,
                 params_exponent=-0.713, tokens_exponent=0.307, note=_STEP_NOTE),
    PublishedLaw(name="StepLaw", source="arXiv 2503.04715", hyperparameter="batch", coefficient=0.58,
                 params_exponent=0.0, tokens_exponent=0.571, note=_STEP_NOTE),
    _of_compute("DeepSeek LLM", "arXiv 2401.02954", "learning_rate", 0.3118, -0.1250),
    _of_compute("DeepSeek LLM", "arXiv 2401.02954", "batch", 0.2920, 0.3271),
)  # fmt: skip


def published(hyperparameter: Hyperparameter) -> tuple[PublishedLaw, ...]:
    """The laws of one hyperparameter."""
    return tuple(law for law in PUBLISHED if law.hyperparameter == hyperparameter)
