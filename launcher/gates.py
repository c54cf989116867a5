"""The gates of freezing: what each asks, and what it found. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from launcher.study import Study
from proxies import canon

if TYPE_CHECKING:
    from launcher.decide import Choice
    from scaling_fits.uncertainty import FittedRuns
    from transfer.verdict import Verdict

FARTHEST_REACH = 100.0
"""Times the largest rung's FLOPs: published ladders were back-tested to 30 and 100 times, with errors of 4 to 6 %."""

GateOutcome = Literal["passed", "failed", "cannot_tell"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """One condition of freezing."""

    name: str
    outcome: GateOutcome
    reason: str


def gates(
    study: Study, coordinates: canon.Json | None, verdict: Verdict, fit: FittedRuns, choice: Choice
) -> tuple[Gate, ...]:
    """Every condition of freezing, with what was found; `coordinates` is None where the check has not run."""
    return (
        coordinate_gate(coordinates),
        transfer_gate(verdict),
        _fit_gate(fit, choice),
        _data_gate(study, choice),
    )


def coordinate_gate(coordinates: canon.Json) -> Gate:
    """The coordinate check's: every layer's updates are of one size at every width."""
    if coordinates is None:
        return Gate(name="coordinates", outcome="cannot_tell", reason="not run yet: `forerun check PLAN` does")
    assert isinstance(coordinates, dict)
    layers = coordinates["layers"]
    assert isinstance(layers, list)
    said = [
        f"{layer['layer']} {layer['outcome'].replace('_', ' ')} (slope {layer['slope']:+.2f})"
        + (f": {layer['cause']}" if layer["cause"] else "")
        for layer in layers
        if isinstance(layer, dict) and isinstance(layer["outcome"], str) and layer["outcome"] != "passes"
    ]
    if coordinates["not_finite_width"] is not None:
        said.insert(0, f"width {coordinates['not_finite_width']} left the finite numbers")
    outcomes: dict[object, GateOutcome] = {"passes": "passed", "cannot_tell": "cannot_tell"}
    return Gate(
        name="coordinates",
        outcome=outcomes.get(coordinates["outcome"], "failed"),
        reason="; ".join(said) or f"all {len(layers)} layers' updates keep their size as width grows",
    )


def transfer_gate(verdict: Verdict) -> Gate:
    """The verdict's: the cost of the transferred rate is under the margin."""
    outcomes: dict[str, GateOutcome] = {"holds": "passed", "drifts": "failed", "cannot_tell": "cannot_tell"}
    return Gate(name="transfer", outcome=outcomes[verdict.outcome], reason="; ".join(verdict.reasons))


def _fit_gate(fit: FittedRuns, choice: Choice) -> Gate:
    """The fit's: the largest rung, held out, was predicted, and the target is not out of reach.

    A law at the bound of its search (an irreducible loss of zero, say) may still predict: the back-test says.
    """
    backtest, reach = fit.backtest, choice.prediction.extrapolation
    if fit.status not in ("converged", "at_bound"):
        return Gate(name="fit", outcome="cannot_tell", reason=f"{fit.status}: {'; '.join(fit.warnings)}")
    if backtest is None:
        return Gate(name="fit", outcome="cannot_tell", reason="too few rungs to hold the largest one out")
    said = [f"held-out largest rung predicted with {backtest.largest_error:.2%} error at most"]
    covered = backtest.num_covered == len(backtest.runs)
    said.append(f"{'inside' if covered else 'outside'} its {fit.level:.0%} interval")
    said.append(f"target at {reach:.3g} times the largest rung's FLOPs")
    outcome: GateOutcome = "passed" if covered else "failed"
    if covered and reach > FARTHEST_REACH:
        outcome = "cannot_tell"
        said.append(f"beyond {FARTHEST_REACH:g} times no back-test speaks: add larger rungs")
    return Gate(name="fit", outcome=outcome, reason=", ".join([*said, *fit.warnings]))


def _data_gate(study: Study, choice: Choice) -> Gate:
    have, want = study.manifest.num_tokens("train"), choice.num_tokens
    outcome: GateOutcome = "passed" if want <= have else "failed"
    return Gate(name="data", outcome=outcome, reason=f"{want:,.0f} tokens wanted, {have:,} unique ones at hand")
