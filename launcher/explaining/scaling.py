"""Rules of a parametrization as they made one number of one group, in words, each held against the number frozen."""

from __future__ import annotations

import math
from typing import Any

from launcher.explaining.known import Known
from launcher.frozen.frozen import ParameterGroup
from launcher.plan import sources
from proxies.core.numbers import Kind
from proxies.core.powers import Ratios
from proxies.core.rules import IN_BLOCKS, Parametrization, kind_rule

CLOSE = 1e-6
"""Of a product of a base value and a factor: how far from the frozen number it may be for being where that is from."""
_BEARS: dict[str, tuple[str, ...]] = {
    "learning_rate": ("rate_batch_power", "rate_duration_power"),
    "weight_decay": ("weight_decay", "decayed", "moments"),
    "eps": ("eps", "moments"),
    "beta1": ("moments",),
    "beta2": ("moments",),
    "init_std": (),
}
"""Choices of a parametrization that bear on a number of every kind of parameter."""


def rules_of(rules: Parametrization, kind: Kind, name: str) -> tuple[str, ...]:
    """The choices behind a number of a kind of parameter, with whose they are."""
    choices = [*_BEARS[name]]
    by_width = name in ("learning_rate", "init_std")
    if by_width and kind == "hidden":
        choices.insert(0, "width")
    if name in ("learning_rate", "init_std", "weight_decay") and kind == "readout":
        choices.append("output")
    if name == "learning_rate" and kind == "embedding":
        choices.append("embedding_rate")
    if name in ("learning_rate", "eps") and kind in IN_BLOCKS:
        choices.append("depth_alpha")
    own = () if kind == "hidden" or not by_width else (f"{rules.name}: {sources.PRESETS[rules.name]}",)
    return own + tuple(choice_words(rules, choice) for choice in choices)


def choice_words(rules: Parametrization, choice: str) -> str:
    """One choice, its answer, and who gives it."""
    value = getattr(rules, choice)
    return f"{rules.name}, {choice} = {value}: {sources.answer_in_words(choice, value)}"


def ratios_of(known: Known) -> Ratios | None:
    """The launch against the base; batch and tokens are 1 where no rule uses them, None where they are not known."""
    d = known.decision
    width, depth = d.shape.width / d.base_shape.width, d.shape.num_layers / d.base_shape.num_layers
    if not d.parametrization.needs_tokens:
        return Ratios(width=width, depth=depth)
    batch, steps = known.value_of("proxy.batch_tokens"), known.value_of("proxy.num_steps")
    if not batch or not steps or known.value_of("proxy.batch_warmup_fraction"):
        return None
    return Ratios(width=width, depth=depth, batch=d.batch_tokens / batch, duration=d.num_tokens / (batch * steps))


def factor_words(known: Known, group: ParameterGroup, name: str) -> str:
    """By which power of the ratios the group's number follows from the one carried; only what the numbers bear out."""
    rules = known.decision.parametrization
    if name in ("beta1", "beta2"):
        return "the same of every kind of parameter"
    power = getattr(kind_rule(rules, group.kind), name)
    law = f"{group.kind.replace('_', ' ')}: times {power}"
    carried, ratios = _carried(known, name), ratios_of(known)
    independent = name == "weight_decay" and rules.weight_decay == "independent"
    if carried is None or ratios is None or independent:
        return law + (" as a share of a step, whatever the rate" if independent else "")
    factor, frozen = power.at(ratios), getattr(group, name)
    if math.isclose(carried * factor, frozen, rel_tol=CLOSE):
        return f"{law}, which is {carried:.6g} x {factor:.6g} = {frozen:.6g}"
    return f"{law}; here it is {frozen / carried:.6g} times the {carried:.6g} carried to the launch"


def _carried(known: Known, name: str) -> float | None:
    """The value set at the base, moved by the measured rules: what the parametrization scales."""
    rows: Any = known.transfer.get("values", ())
    row = next((row for row in rows if row["hyperparameter"] == name), None)
    if row is not None:
        return float(row["target_value"] if name == "learning_rate" else row["base_value"]) or None
    value = known.provenance.get("point", {}).get(name, known.value_of(f"proxy.{name}"))
    return None if value is None or name not in ("eps",) else float(value)
