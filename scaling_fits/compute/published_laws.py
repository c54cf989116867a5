"""Published laws of the best peak learning rate, to begin a search at: facts with their sources.

They were measured with AdamW in standard parametrization and their own schedules and data; no law here is a target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedLaw:
    """learning rate = coefficient * N^params_exponent * D^tokens_exponent."""

    name: str
    source: str
    coefficient: float
    params_exponent: float
    tokens_exponent: float

    def at(self, params: float, tokens: float) -> float:
        """The law's value at N parameters and D tokens."""
        return self.coefficient * math.pow(params, self.params_exponent) * math.pow(tokens, self.tokens_exponent)


_OF_COMPUTE = -0.1250  # DeepSeek's exponent of C, taken as 6 * N * D; theirs counts non-embedding FLOPs per token

PUBLISHED = (
    # N without embeddings; final learning rate fixed at 1e-5.
    PublishedLaw(
        name="StepLaw", source="arXiv 2503.04715", coefficient=1.79, params_exponent=-0.713, tokens_exponent=0.307
    ),
    PublishedLaw(
        name="DeepSeek LLM", source="arXiv 2401.02954", coefficient=0.3118 * 6**_OF_COMPUTE,
        params_exponent=_OF_COMPUTE, tokens_exponent=_OF_COMPUTE,
    ),
)  # fmt: skip
