"""Section `[search]` of a plan: what is searched, how, and how long. Imports pydantic and nothing heavier."""

from __future__ import annotations

from pydantic import Field

from launcher.plan_sections import Count, Fraction, Range, Section, Seed


class SearchSection(Section):
    """Optuna's search at the base width."""

    num_trials: Count = Field(24, description="Trials in all.")
    learning_rate: Range = Field((2.0**-9, 2.0**-3), description="Lowest and highest peak learning rate.")
    warmup_fraction: tuple[Fraction, Fraction] = Field((0.02, 0.5), description="Warmup as a share of the steps.")
    clip_norm: Range = Field((0.25, 4.0), description="Largest gradient norm.")
    parallelism: Count = Field(8, description="P: suggestion k uses the outcomes of trials 0 ... k-P alone.")
    num_startup: Count = Field(12, description="Trials spread evenly before TPE begins.")
    seed: Seed = Field(0, description="Of the search, and of the trials' weights and data order.")
