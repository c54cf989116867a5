"""Main runs that have ended, beside what was forecast of them: the largest rungs of later ladders, and their score.

A ledger holds them as `concluded` (of its own study) and as `history` (of the studies it was forked from). A study's
own forecast, and so the digest it froze, never hangs on its own main run: what uses it are `forerun fit STUDY` and
every study forked from this one, where it joins the table of rungs and sets the scale of the interval. No torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxies.core import canon
from proxies.core.checks import Checks
from proxies.core.rules import Parametrization
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.core.spec import Curve

if TYPE_CHECKING:
    from launcher.plan.study import Study
    from scaling_fits.forecast.conclusive import Foretold
    from scaling_fits.forecast.loss_curves import FinishedRun
    from scaling_fits.forecast.uncertainty import FittedRuns
    from sweeps.store.ledger import Ledger

CONCLUDED, HISTORY = "concluded", "history"
"""Kinds of records of the ledger."""
_SHARE_DIGITS = 2
"""Of a share of the steps: whole steps round it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Concluded:
    """A main run that came to its end."""

    digest: str
    params: int
    tokens: int
    shape: Shape
    parametrization: Parametrization
    schedule: Schedule
    data_id: str
    predicted_nats: float
    low_nats: float
    high_nats: float
    level: float
    extrapolation: float
    """Training FLOPs over the largest run's that the forecast was fitted to."""
    interval_scale: float = 1.0
    """What that interval had been multiplied by for misses before it (`scaling_fits.forecast.conclusive`)."""
    actual_nats: float
    """Validation loss at the end."""
    curve: Curve
    """Means of the training loss over some hundred parts of the run, each at its mean step."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.whole("params", "tokens")
        checks.number("interval_scale", above=0)
        checks.number("extrapolation", above=0)
        checks.done()

    @property
    def foretold(self) -> Foretold:
        """The forecast and the outcome alone."""
        from scaling_fits.forecast.conclusive import Foretold

        return Foretold(
            predicted_nats=self.predicted_nats, low_nats=self.low_nats, high_nats=self.high_nats, level=self.level,
            actual_nats=self.actual_nats,
        )  # fmt: skip

    @property
    def z(self) -> float:
        """The miss by the interval that the fit gave by itself."""
        return self.foretold.z * self.interval_scale


def inherited(ledger: Ledger) -> list[Concluded]:
    """What the studies that this one was forked from brought, oldest first.

    Raises:
        CanonError: a record of a version that this one cannot read.
    """
    return _decoded(ledger, HISTORY)


def concluded(ledger: Ledger) -> list[Concluded]:
    """This study's own; raises as `inherited`."""
    return _decoded(ledger, CONCLUDED)


def _decoded(ledger: Ledger, kind: str) -> list[Concluded]:
    return [canon.decode(Concluded, record.body, f"{kind} {record.key[:16]}") for record in ledger.records(kind)]


def take_over(ledger: Ledger, parent: Ledger) -> int:
    """Record what the parent has, its own and what it inherited, and is not here yet; how many that were."""
    wanted = {run.digest: run for run in (*inherited(parent), *concluded(parent))}
    new = [run for digest, run in wanted.items() if ledger.find(HISTORY, digest) is None]
    for run in new:
        ledger.append(HISTORY, run.digest, run)
    return len(new)


def like(study: Study, runs: Iterable[Concluded]) -> tuple[list[Concluded], list[str]]:
    """The runs of this study's recipe, which its ladder's laws are of, and why each other one is left out."""
    kept, said = [], []
    for run in runs:
        differs = _differences(study, run)
        if differs:
            said.append(f"the concluded run {run.digest[:8]} is left out of the fit: {'; '.join(differs)}")
        else:
            kept.append(run)
    return kept, said


def _differences(study: Study, run: Concluded) -> list[str]:
    ours, theirs = (
        _recipe(study.base_shape, study.plan.schedule(run.schedule.num_steps, 0.0)),
        _recipe(run.shape, run.schedule),
    )
    found = [f"its {name} is {theirs[name]}, here {ours[name]}" for name in ours if ours[name] != theirs[name]]
    if run.data_id != study.manifest.data_id:
        found.append("it was trained on other data")
    if run.parametrization != study.plan.parametrization:
        found.append(f"its parametrization is {run.parametrization.name}, here {study.plan.parametrization.name}"
                     if run.parametrization.name != study.plan.parametrization.name
                     else "its parametrization has other rules")  # fmt: skip
    return found


def _recipe(shape: Shape, schedule: Schedule) -> dict[str, object]:
    """What a law of loss against size and tokens holds for, sizes and the search's findings aside."""
    steps = schedule.num_steps
    return {
        "family": shape.family, "tying": shape.tied, "QK-norm": shape.qk_norm, "context": shape.seq_len,
        "schedule": schedule.kind, "last learning rate": schedule.final_fraction,
        "share of decay": round(schedule.decay_steps / steps, _SHARE_DIGITS),
        "share of batch warmup": round(schedule.batch_warmup_steps / steps, _SHARE_DIGITS),
    }  # fmt: skip


def as_rungs(runs: Iterable[Concluded]) -> list[FinishedRun]:
    """The same for the laws of curves."""
    from scaling_fits.forecast.loss_curves import FinishedRun

    return [
        FinishedRun(
            params=run.params, tokens=run.tokens, num_steps=run.schedule.num_steps, final_loss_nats=run.actual_nats,
            curve=run.curve,
        )
        for run in runs
    ]  # fmt: skip


def scaled(fit: FittedRuns, runs: Iterable[Concluded], notes: Iterable[str] = ()) -> FittedRuns:
    """The fit with its intervals at the scale that earlier forecasts ask for, and what must be said of it."""
    from scaling_fits.forecast.conclusive import interval_scale

    misses = [run.z for run in runs]
    scale = interval_scale(misses, fit.level) if misses else 1.0
    said = [*notes]
    if misses:
        worst = max(map(abs, misses))
        said.append(
            f"{len(misses)} concluded main runs are among the runs; their forecasts missed by up to {worst:.2g} "
            f"standard deviations, so intervals of a loss are {scale:.3g} times as wide as the fit's own"
        )
    return dataclasses.replace(fit, record_scale=scale, warnings=fit.warnings + tuple(said))
