"""Changes of the plan after which Megatron-LM can express a field that it lost."""

from __future__ import annotations

from collections.abc import Sequence

PLAN_REMEDIES: dict[str, str] = {
    "groups.eps": 'proxy.rules = { eps = "hidden" }',
    "groups.weight_decay": (
        'proxy.rules = { weight_decay = "unscaled", decayed = "two_dimensional" }'
    ),
    "groups.learning_rate": 'proxy.rules = { embedding_rate = "constant" }',
    "learning_rate": (
        "search.warmup_fraction = [0.0, 0.0], or a range in which the main run's warmup has 100 "
        "steps"
    ),
    "data.order": (
        "data.path with a corpus of at least the main run's tokens, or a smaller "
        "target.budget_flops"
    ),
}
"""Plan key, with a value that Megatron-LM can express, by prefix of a field that it cannot.

Most of these fields are lost because Megatron-LM has one value for all groups. A warmup of 100
steps is within `megatron_lm.MAX_EQUIVALENT_ERROR` of the frozen one.
"""


def list_plan_remedies(fields: Sequence[str]) -> list[str]:
    """Return the plan keys to set, with values, so that these fields become expressible."""
    return list(
        dict.fromkeys(
            text
            for field in fields
            for prefix, text in PLAN_REMEDIES.items()
            if field.startswith(prefix)
        )
    )
