"""What is said of one field of a frozen config: plain data, for `--json` as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from proxies.core.canon import Json
from transfer.question import Outcome

SourceKind = Literal["plan", "default", "search", "valley", "fit", "verdict", "rule", "corpus", "derived", "fixed"]
"""plan, default: a plan key, set or left alone; search, valley: the best trial, the fitted optimum of the learning
rate; fit: of the ladder; verdict: of a transfer test; rule: of a parametrization; derived: from other fields; fixed: by
this version of forerun."""
StrengthKind = Literal["measured", "assumed", "chosen", "exact", "unknown"]
"""measured: runs bear on it, for or against; assumed: none of this study's does, and one could; chosen: a wish, which
no run can show to be wrong; exact: follows from other fields; unknown: the evidence is not here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanKey:
    """A key of the plan that decides the field."""

    key: str
    value: Json
    """As the plan says it; null where the plan is not here."""
    default: Json
    is_set: bool | None
    """Whether its value is not the default; null where the plan is not here."""
    text: str
    """The plan's own sentence about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """Runs that the value, or what is known of it, comes from."""

    what: str
    num_runs: int
    num_seeds: int | None
    """Different ones; null where the records here do not say."""
    ids: tuple[str, ...]
    """Empty where the evidence does not name them one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a value came from."""

    kind: SourceKind
    text: str
    plan_keys: tuple[PlanKey, ...] = ()
    rules: tuple[str, ...] = ()
    """Of a parametrization or a policy, with whose they are."""
    runs: tuple[Runs, ...] = ()
    fields: tuple[str, ...] = ()
    """Other fields that it follows from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateSaid:
    """A gate of freezing that bears on the field."""

    name: str
    outcome: str
    reason: str
    accepted: str | None
    """The reason for which someone froze although it did not pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """What is known of a number, and how far."""

    of: str
    """What it is of, with its unit."""
    low: float
    high: float
    level: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Strength:
    """How good the evidence is."""

    kind: StrengthKind
    text: str
    outcome: Outcome | None = None
    gates: tuple[GateSaid, ...] = ()
    intervals: tuple[Interval, ...] = ()
    num_runs: int | None = None
    num_seeds: int | None = None
    extrapolation: float | None = None
    """How many times beyond the largest size measured the launch lies, on the axis where that is farthest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explained:
    """One field."""

    field: str
    value: Json
    written: bool
    """False: at its default, and left out of `launch.json`."""
    source: Source
    strength: Strength
    change: tuple[str, ...]
    """What would change it, or decide it: plan keys, runs, commands."""
    cost: str | None
    """What another value would cost; null where that was not measured."""
    unknown: tuple[str, ...] = ()
    """What the records here do not say."""
    warnings: tuple[str, ...] = ()
    """What must be said before the value: its forecast is inconclusive."""
