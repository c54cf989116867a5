"""Values that published trainers use, and the paired runs that say whether a searched value beats one. No torch.

A search of some dozen runs likes values by luck. So convention wins unless runs with the same seeds, which have the
same initial values and data, say clearly that it loses. Which runs are asked for is a pure function of outcomes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from proxies.core.hyperparameters import HYPERPARAMETERS
from proxies.core.spec import RunResult, RunSpec
from transfer.question import Hyperparameter

if TYPE_CHECKING:
    from launcher.plan.plan import Plan

Basis = Literal["same", "margin", "noise", "undetermined", "searched"]
"""Why a value is used: both are one run; the convention loses less than the margin; no more than one run's noise; too
few runs can tell; or the searched value is clearly better."""

SCOUTS = 2
"""Seeds by which the better of two learning rates is found: the others then run at that one alone."""
LOWER_RATE = -1.0
"""Octaves: the other rate at which a value is tried that bears less of a rate, as a shorter warmup does."""

_OPEN = [one for one in HYPERPARAMETERS.values() if one.convention is not None]
CONVENTIONAL: tuple[Hyperparameter, ...] = tuple(
    one.name for one in sorted(_OPEN, key=lambda one: one.convention is not None and one.convention.bears_less)
)
"""In the order in which single ones are decided: last what the learning rate hangs on."""


def convention(plan: Plan, name: Hyperparameter) -> tuple[float, str]:
    """The conventional value at the base, and whose it is."""
    found = HYPERPARAMETERS[name].convention
    assert found is not None, name
    return found.at(plan.proxy.num_steps), found.source


def rate_offsets(values: Mapping[str, float], best: Mapping[str, float]) -> tuple[float, ...]:
    """Octaves of the learning rate at which conventional values are tried in place of a search's best."""
    for name, value in values.items():
        found = HYPERPARAMETERS[name].convention
        if found is not None and found.bears_less and value < best[name]:
            return 0.0, LOWER_RATE
    return (0.0,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What paired runs say of a convention."""

    basis: Basis
    loses_nats: tuple[float, float, float] | None
    """By which the convention's mean is above that of the searched value: estimate and interval; None: not known."""
    noise_nats: float | None
    """Standard deviation of one run, what its seed brings taken out where that matters."""
    octaves: float
    """Of the learning rate at which the convention was run, above that of the searched value."""
    num_seeds: int
    num_diverged: int = 0
    """Of the convention's runs."""

    @property
    def conventional(self) -> bool:
        """Whether the convention is used."""
        return self.basis != "searched"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """Runs that are asked for, as far as outcomes tell, and what they say once all have ended."""

    specs: tuple[RunSpec, ...]
    finding: Finding | None


def contest(
    searched: Callable[[int], RunSpec], conventional: Callable[[float, int], RunSpec], offsets: Sequence[float],
    num_seeds: int, results: Mapping[str, RunResult], *, margin_nats: float, level: float,
) -> Contest:  # fmt: skip
    """A searched value against a convention, seed by seed.

    Args:
        searched: its run with a seed, 0 ... num_seeds - 1.
        conventional: that of the convention at so many octaves from the searched value's rate.
        offsets: octaves to choose from, by the first `SCOUTS` seeds where there are several.
        num_seeds: of each, 2 or more.
        results: so far, by id.
        margin_nats: what may be lost.
        level: of the interval.
    """
    scouts = SCOUTS if len(offsets) > 1 else num_seeds
    runs = {(0, seed): searched(seed) for seed in range(num_seeds)}
    runs |= {(1 + i, seed): conventional(octaves, seed) for i, octaves in enumerate(offsets) for seed in range(scouts)}
    if any(spec.id not in results for (which, _), spec in runs.items() if which):
        return Contest(specs=tuple(runs.values()), finding=None)

    def lost(i: int) -> tuple[int, float]:
        losses = [results[runs[1 + i, seed].id].loss_nats for seed in range(scouts)]
        return losses.count(None), sum(loss for loss in losses if loss is not None)

    best = min(range(len(offsets)), key=lost)  # of equals, the first
    runs |= {(1 + best, seed): conventional(offsets[best], seed) for seed in range(scouts, num_seeds)}
    specs = tuple(runs.values())
    if any(spec.id not in results for spec in specs):
        return Contest(specs=specs, finding=None)
    outcomes = {key: results[spec.id] for key, spec in runs.items()}
    return Contest(
        specs=specs, finding=_found(outcomes, 1 + best, offsets[best], num_seeds, margin_nats=margin_nats, level=level)
    )


def _found(
    outcomes: Mapping[tuple[int, int], RunResult], which: int, octaves: float, num_seeds: int, *, margin_nats: float,
    level: float,
) -> Finding:  # fmt: skip
    """What the runs of the searched value (0) and of the convention (`which`) say."""
    from sweeps.search.replicates import difference

    diverged = [
        sum(result.status == "diverged" for (number, _), result in outcomes.items() if number == of)
        for of in (0, which)
    ]
    rows = [(number, seed, result.loss_nats) for (number, seed), result in outcomes.items()]
    told = None if any(diverged) else difference([(n, k, x) for n, k, x in rows if x is not None], 0, which, level)
    basis: Basis = "undetermined"
    if diverged[1] > diverged[0]:
        basis = "searched"
    elif told is not None and told.high < margin_nats:
        basis = "margin"
    elif told is not None and told.low > 0:
        basis = "searched"
    elif told is not None and told.value <= told.noise:
        basis = "noise"
    return Finding(
        basis=basis, loses_nats=None if told is None else (told.value, told.low, told.high),
        noise_nats=None if told is None else told.noise, octaves=octaves, num_seeds=num_seeds,
        num_diverged=diverged[1],
    )  # fmt: skip


def num_runs(num_offsets: int, num_seeds: int) -> int:
    """Runs of a contest."""
    scouts = SCOUTS * num_offsets + num_seeds - SCOUTS if num_offsets > 1 else num_seeds
    return num_seeds + scouts


def because(finding: Finding, margin_nats: float) -> str:
    """Why a convention is used, or not, as one says it."""
    if finding.basis == "same":
        return "the search found it too"
    if finding.loses_nats is not None and finding.noise_nats is not None:
        value, low, high = finding.loses_nats
        noise = f"{finding.noise_nats:.4f}"
        whys = {
            "margin": f"under the margin of {margin_nats:g}",
            "noise": f"no more than the noise of one run, {noise}",
            "undetermined": f"not determined, conventional: one run's noise is {noise}, more seeds would tell",
            "searched": f"clearly more than the noise, and not under the margin of {margin_nats:g}",
        }
        return (
            f"it loses {value:.4f} [{low:.4f}, {high:.4f}] nats over {finding.num_seeds} seeds, {whys[finding.basis]}"
        )
    if finding.basis == "searched":
        return f"it diverged with {finding.num_diverged} of {finding.num_seeds} seeds"
    return "not determined, conventional: too few runs can tell"
