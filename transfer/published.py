"""Rules that others published, to be set beside what was measured. Standard library only.

The exponent of a hyperparameter against size: value ~ size^power. They disagree, which is why forerun measures.
"""

from __future__ import annotations

from dataclasses import dataclass

from transfer.question import Axis, Hyperparameter


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One source's exponent."""

    power: float
    source: str


_RULES: dict[tuple[Hyperparameter, Axis], tuple[Rule, ...]] = {
    ("learning_rate", "duration"): (
        Rule(power=0.0, source="no rule"),
        Rule(power=-0.28, source="Marin, issue 4225"),
        Rule(power=-0.3, source="Marin Delphi"),
        Rule(power=-0.32, source="HyperP, arXiv 2603.28743"),
        Rule(power=-0.5, source="Complete(d)P, arXiv 2512.22382"),
    ),
    ("learning_rate", "batch"): (
        Rule(power=0.0, source="no rule"),
        Rule(power=0.5, source="Complete(d)P, arXiv 2512.22382; Marin; nanochat"),
        Rule(power=1.0, source="linear scaling, arXiv 1706.02677"),
    ),
    ("weight_decay", "batch"): (
        Rule(power=0.0, source="no rule"),
        Rule(power=0.5, source="Complete(d)P, arXiv 2512.22382; nanochat"),
    ),
    ("weight_decay", "duration"): (
        Rule(power=0.0, source="no rule"),
        Rule(power=-0.5, source="Complete(d)P, arXiv 2512.22382"),
        Rule(power=-1.0, source="nanochat"),
    ),
}  # fmt: skip


def rules_for(hyperparameter: Hyperparameter, axis: Axis) -> tuple[Rule, ...]:
    """What is published; nothing for most, warmup and clip among them."""
    return _RULES.get((hyperparameter, axis), ())
