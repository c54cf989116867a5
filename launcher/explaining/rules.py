"""Which choices of a parametrization made a number, in words, and what their laws come to at the launch.

A choice bears on a number if another answer to it would scale the number otherwise; of that the rules themselves are
asked, so a new choice or number needs nothing here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

from launcher.explaining.parametrizations import forward_laws
from launcher.frozen.frozen import ParameterGroup
from launcher.plan import sources
from proxies.core.checks import SpecError
from proxies.core.hyperparameters import HYPERPARAMETERS
from proxies.core.numbers import KINDS, Kind
from proxies.core.optimizers import GROUP_NUMBERS
from proxies.core.powers import Powers, Ratios
from proxies.core.rules import CHOICES, PRESETS, KindRule, Parametrization, forward_rule, kind_rule, scaling
from proxies.core.spec import RunSpec

CLOSE = 1e-6
"""Of a base value times a factor: how far from the frozen number it may be for being where that is from."""
_AXES = tuple(field.name for field in dataclasses.fields(Ratios))


def _others(rules: Parametrization, choice: str) -> Iterator[Parametrization]:
    """The same parametrization with each other answer to a choice."""
    if choice in ("name", "width"):  # answers to other questions hang on it: the standard form has them all
        yield PRESETS["mup" if rules.width == "none" else "sp"]
        return
    answers: Any = CHOICES.get(choice) or [None if a == "None" else float(a) for a in sources.CHOICES[choice]]
    for answer in answers:
        try:
            yield dataclasses.replace(rules, **{choice: answer})
        except SpecError:  # no answer beside the others
            continue


def _law(rules: Parametrization, kind: Kind, name: str) -> Powers:
    """How a number of a group of that kind moves with the ratios."""
    if name in GROUP_NUMBERS:
        return scaling(rules, name, kind)
    powers: Powers = getattr(kind_rule(rules, kind), name)
    return powers


def _laws(rules: Parametrization) -> dict[tuple[str, str], Powers]:
    """Every power by kind of parameter (or `forward`) and name of the number."""
    names = {*GROUP_NUMBERS, *(field.name for field in dataclasses.fields(KindRule))}
    laws: dict[tuple[str, str], Powers] = {(kind, name): _law(rules, kind, name) for kind in KINDS for name in names}
    return laws | {("forward", name): power for name, power in forward_rule(rules).items()}


@functools.cache
def bearing(rules: Parametrization, choice: str) -> frozenset[tuple[str, str, str]]:
    """What a choice bears on: kind (or `forward`), name of the number, and axis over which it scales otherwise."""
    own = _laws(rules)
    return frozenset(
        (*at, axis)
        for other in _others(rules, choice)
        for at, power in _laws(other).items()
        for axis in _AXES
        if getattr(power, axis) != getattr(own[at], axis)
    )


def choices_behind(rules: Parametrization, kind: str, name: str) -> tuple[str, ...]:
    """The choices that bear on a number of a kind of parameter, or of the forward pass."""
    if name in sources.CHOICES and kind == "forward":
        return (name,)
    return tuple(
        choice for choice in sources.CHOICES if (kind, name) in {at[:2] for at in bearing(rules, choice)}
    )  # fmt: skip


def choice_words(rules: Parametrization, choice: str) -> str:
    """One choice, its answer, and who gives it."""
    if choice == "name":
        return f"{rules.name}: {sources.PRESETS[rules.name]}"
    value = getattr(rules, choice)
    return f"{rules.name}, {choice} = {value}: {sources.answer_in_words(choice, value)}"


def group_words(run: RunSpec, group: ParameterGroup, name: str) -> str:
    """By which power of the ratios a group's number follows from the base's; only what the numbers bear out."""
    kind, power = group.kind.replace("_", " "), _law(run.parametrization, group.kind, name)
    frozen, factor = getattr(group, name), power.at(run.ratios)
    if name not in GROUP_NUMBERS:
        if not frozen:
            return f"a {kind} starts at {'one' if kind.endswith('gain') else 'zero'}: no spread"
        return f"{kind}: times {power}; at the base {frozen / factor:.6g}"
    base = getattr(run.hparams, name)
    if HYPERPARAMETERS[name].scale == "log2_complement":
        return f"{kind}: 1 - value times {power}; {base:.6g} at the base, {frozen:.6g} here"
    return _compared(f"{kind}: times {power}", base, factor, frozen)


def forward_words(run: RunSpec, name: str, frozen: float) -> str:
    """The law of a forward multiplier, and the number by it where it is a power of the ratios."""
    powers = dict[str, Powers](forward_rule(run.parametrization).items())
    law, power = forward_laws(run.parametrization)[name], powers.get(name)
    base = math.prod(run.hparams.values[one.name] or 1.0 for one in HYPERPARAMETERS.values() if one.multiplies == name)
    return law if power is None else _compared(f"times {law}", base, power.at(run.ratios), frozen)


def _compared(law: str, base: float, factor: float, frozen: float) -> str:
    if math.isclose(base * factor, frozen, rel_tol=CLOSE):
        return f"{law}, which is {base:.6g} x {factor:.6g} = {frozen:.6g}"
    return f"{law}; in all {frozen:.6g} from the base's {base:.6g}"
