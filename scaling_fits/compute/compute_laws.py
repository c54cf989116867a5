"""Laws through optima against compute, and by how much their intervals must be stretched to cover held-out optima."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from scaling_fits.compute.power_laws import (
    Floats,
    FloorLaw,
    PowerLaw,
    fit_floor_law,
    fit_power_law,
    recentred,
)
from scaling_fits.compute.valleys import draws_per_window

LEAST_OPTIMA = 3  # two points draw a line through anything
_HINDCAST_DRAWS = 100
_MANY_OPTIMA = 8  # from here on the two dearest, predicted from cheaper ones, say which to leave out; else the dearest
_WRONG = 3.0  # inflation of the loss above which the law itself is in doubt

Pair = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inflation:
    """Factors, in logs, on both arms of the intervals of a prediction: under them held-out optima are covered."""

    params: float = 1.0
    tokens: float = 1.0
    loss: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Points:
    """Optima as the laws take them: natural values (R,), and variances of their logs (R,)."""

    flops: Floats
    params: Floats
    tokens: Floats
    params_variance: Floats
    tokens_variance: Floats
    loss_flops: Floats
    """FLOPs at which the loss is known (S,): a frontier's are others."""
    loss: Floats
    loss_variance: Floats
    noise_sd: float
    """Of one run, in log loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Laws:
    """The three laws, and what hindcasts say of their intervals."""

    params: PowerLaw
    tokens: PowerLaw
    loss: FloorLaw
    inflation: Inflation


def fit_laws(points: Points, *, bootstrap: int, level: float, seed: int) -> Laws:
    """N*, D* and loss against FLOPs, through at least `LEAST_OPTIMA` optima.

    Raises:
        PowerLawError: fewer optima.
    """
    sizes = params_and_tokens(points, slice(None))
    loss = loss_law(points, slice(None), num_draws=bootstrap, seed=seed)
    inflation = _hindcast(points, level, seed) if bootstrap else Inflation()
    return Laws(**sizes, loss=loss, inflation=inflation)


def params_and_tokens(points: Points, part: slice) -> dict[str, PowerLaw]:
    """N* and D* against FLOPs through some of the points, by name."""
    against = {"flops": points.flops[part]}
    return {
        "params": fit_power_law(against, np.log(points.params[part]), points.params_variance[part]),
        "tokens": fit_power_law(against, np.log(points.tokens[part]), points.tokens_variance[part]),
    }


def loss_law(points: Points, part: slice, *, num_draws: int, seed: int) -> FloorLaw:
    """The loss at the optimum against FLOPs through some of the points, the cheapest left out as far as that helps.

    Small runs are often worse tuned, and bend the law. Starts from which the law needs at least 4 optima are judged by
    the dearest optima, each predicted from cheaper ones, and the draws mix them by weight.
    """
    flops, loss, variance = (x[part] for x in (points.loss_flops, points.loss, points.loss_variance))

    def law(start: int, stop: int, draws: int) -> FloorLaw:
        return fit_floor_law(flops[start:stop], loss[start:stop], variance[start:stop], num_draws=draws, seed=seed,
                             log_noise_sd=points.noise_sd)  # fmt: skip

    count = len(loss)
    num_ahead = 2 if count >= _MANY_OPTIMA else 1
    starts = range(count - 3 - num_ahead)
    if len(starts) < 2:
        return law(0, count, num_draws)
    ahead = range(count - num_ahead, count)
    errors = np.array([[math.log(law(start, stop, 0).at(flops[stop]) / loss[stop]) for stop in ahead]
                       for start in starts])  # fmt: skip
    squares = (errors**2).mean(axis=1) + float(variance[-num_ahead:].mean())
    draws = draws_per_window(squares, num_ahead, num_draws)
    best = int(squares.argmin())
    mixed = tuple(draw for start, number in zip(starts, draws, strict=True) if number
                  for draw in recentred(law(start, count, number), law(best, count, 0).centre_flops).draws)  # fmt: skip
    return dataclasses.replace(law(best, count, 0), draws=mixed)


def _hindcast(points: Points, level: float, seed: int) -> Inflation:
    """Fit the cheapest optima, from 4 on, predict all dearer ones, and stretch until `level` of those is covered.

    A held-out optimum has noise of its own, which counts as part of the arm. With fewer than 5 optima nothing is
    held out and nothing is learned.
    """
    misses: dict[str, list[float]] = {"params": [], "tokens": [], "loss": []}
    for cut in range(LEAST_OPTIMA + 1, len(points.flops)):
        for name, law in params_and_tokens(points, slice(cut)).items():
            values, variances = getattr(points, name), getattr(points, f"{name}_variance")
            misses[name] += [
                _miss(values[i], law.at(points.flops[i]), law.interval_at(points.flops[i], level=level), variances[i])
                for i in range(cut, len(points.flops))
            ]
    for cut in range(LEAST_OPTIMA + 1, len(points.loss)):
        loss = loss_law(points, slice(cut), num_draws=_HINDCAST_DRAWS, seed=seed)
        misses["loss"] += [
            _miss(points.loss[i], loss.at(flops), loss.interval_at(flops, level, seed), points.loss_variance[i])
            for i, flops in enumerate(points.loss_flops.tolist())
            if i >= cut
        ]
    return Inflation(**{name: max(1.0, float(np.quantile(z, level))) if z else 1.0 for name, z in misses.items()})


def _miss(value: float, predicted: float, interval: Pair | None, variance: float) -> float:
    """How many arms of the interval the value is off, in logs."""
    assert interval is not None
    off = math.log(value / predicted)
    arm = math.log(interval[1] / predicted) if off > 0 else math.log(predicted / interval[0])
    return abs(off) / max(math.hypot(arm, math.sqrt(variance)), 1e-12)


def law_warnings(optima: int, laws: Laws) -> list[str]:
    """What a reader of the laws must know."""
    warnings = []
    if laws.inflation.loss > _WRONG:
        warnings.append(
            "held-out optima lie off the loss law, and its intervals are "
            f"{laws.inflation.loss:.3g} times as wide for it: the runs do not follow one law (are the small ones as "
            "well tuned?)"
        )
    if not laws.loss.has_floor:
        why = "fewer than 4 optima" if optima < 4 else "the optima do not tell it from 0"
        warnings.append(f"loss against compute has no floor E ({why}): the value is a pure power law, which falls too "
                        "far far out; the interval allows for a floor")  # fmt: skip
    if laws.loss.exponent <= 0:
        warnings.append("the loss at the optimum does not fall with compute: look at the runs")
    if not 0 < laws.params.exponents[0] < 1:
        warnings.append(f"N* grows as C^{laws.params.exponents[0]:.3g}, outside 0 to 1: look at the runs")
    return warnings
