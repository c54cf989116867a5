"""The registry of hyperparameters: what everything else knows of one is declared here, once.
Standard library only.

Plans, search spaces, transfer tests, tables of runs, a trainer's placeholders, reports,
explanations and completion read `HYPERPARAMETERS`. To add one: an entry here, a field of `Hparams`,
and the code that trains by it. A plan may declare others of the user's own code, which
`hyperparameter` knows by their name alone and a run holds as `OwnValue`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal

from proxies.core import canon
from proxies.core.checks import Checks
from proxies.core.notation import format_learning_rate
from proxies.core.powers import UNSCALED, Powers, Ratios

Scale = Literal["linear", "log2", "log2_complement"]
"""`log2_complement`: evenly in log2 of 1 - value, the inverse of a moving average's memory in
steps."""
Scaling = Literal["learning_rate", "weight_decay", "eps", "moments"]
"""The rule of `proxies.core.rules` by which a parametrization moves a value from the base to
another shape."""
SetBy = Literal["search", "proxy", "axes"]
"""Where a plan sets it: a range of its own in `[search]`; a value in `[proxy]`, and a range in
`[search] axes` if it is to be searched; or only there."""
AppliedTo = Literal["gradient", "loss"]
"""Target of a run-wide setting: the gradient before an update, or the loss that is
differentiated."""
LEARNING_RATE = "learning_rate"
"""The one that every study is about: always searched, always tested for transfer."""
WARMUP = "warmup_fraction"
"""The one that a run's schedule holds, in whole steps; `Hparams` holds the others."""
SHARE_OF_STEPS = "share of the steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class Convention:
    """The value of published trainers, which wins unless paired runs say that it loses."""

    value: float
    source: str
    least_steps: int = 0
    """Of a share of the steps: at least so many, where a run is short."""
    most: float = math.inf
    """But no more than this."""
    bears_less: bool = False
    """A smaller value of it bears less of a learning rate, and is tried at a lower one too."""

    def at(self, num_steps: int) -> float:
        """The value for a run of so many steps, to three digits where steps count."""
        if not self.least_steps:
            return self.value
        return float(f"{min(self.most, max(self.value, self.least_steps / num_steps)):.3g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyperparameter:
    """One hyperparameter, as it is set at the base shape."""

    name: str
    """In plans, ledgers, tables and every JSON."""
    meaning: str
    """A sentence for the plan's reference and a trainer's placeholders."""
    default: float
    scale: Scale = "log2"
    unit: str = ""
    """Empty: none, or told in `meaning`."""
    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None
    """Bounds of its values; a bound that is None is none."""
    set_by: SetBy = "axes"
    range: tuple[float, float] | None = None
    """Searched unless the plan says otherwise; of those set by `search`."""
    can_be_off: bool = False
    """Whether a trial may do without it: 0 in a point of the search, `off` in `Hparams`."""
    off: float | None = 0.0
    has_optimum: bool = True
    """Whether the transfer of its optimum can be tested."""
    tested_over: tuple[str, ...] = ()
    """Axes over which a plan that says nothing tests it."""
    scaling: Scaling | None = None
    """None: the same number at every shape."""
    zero_means: str = ""
    """Name of the hyperparameter whose value it takes where it is 0; empty: 0 is a value of its
    own."""
    user_trainer: bool = True
    """Whether a user's own trainer, which brings its own optimizer, is given it."""
    applied_to: AppliedTo | None = None
    """Target of a run-wide setting, which is one number for the whole run; None for all others."""
    multiplies: str = ""
    """The forward multiplier (`proxies.core.numbers.ForwardNumbers`) that it is part of."""
    convention: Convention | None = None
    placeholder: str = ""
    """In a trainer's command line; empty: its name."""
    aliases: tuple[str, ...] = ()
    """Other names of its column in tables of runs, and of its key in trainers' logs."""
    short: str = ""
    """Where a name must be short; empty: the name."""

    @property
    def label(self) -> str:
        """In sentences and headings."""
        return self.name.replace("_", " ")

    @property
    def zero_is_none(self) -> bool:
        """Whether a 0 says that there is none of it, at no octave."""
        return self.can_be_off or (self.scale != "log2_complement" and self.least == 0)

    @property
    def told_as(self) -> str:
        """Its placeholder in a trainer's command line."""
        return self.placeholder or self.name

    def to_log2(self, value: float) -> float:
        """Octaves of a value; of a complement those of 1 - value. Raises ValueError where it has no
        logarithm.
        """
        scale = 1 - value if self.scale == "log2_complement" else value
        if not 0 < scale < math.inf:
            raise ValueError(f"{self.name} = {value}: this value has no octaves")
        return math.log2(scale)

    def from_log2(self, log2_value: float, digits: int = 0) -> float:
        """The inverse of `to_log2`, to so many digits, if any: of a complement, of 1 - value."""
        found = float(f"{math.exp2(log2_value):.{digits}g}") if digits else math.exp2(log2_value)
        return 1 - found if self.scale == "log2_complement" else found

    def rounded(self, value: float, digits: int) -> float:
        """To so many digits; of a complement, of 1 - value."""
        if self.scale == "log2_complement":
            return 1 - float(f"{1 - value:.{digits}g}")
        return float(f"{value:.{digits}g}")

    def text(self, value: float) -> str:
        """Return a value as people read it."""
        if value == 0 and self.can_be_off:
            return "off"
        if self.name == LEARNING_RATE:
            return format_learning_rate(value)
        return f"{self.rounded(value, 3):.10g}"


_DECODERS = "GPT-3 (arXiv 2005.14165), Llama (2302.13971), OLMo (2402.00838)"

HYPERPARAMETERS: Mapping[str, Hyperparameter] = MappingProxyType(
    {
        one.name: one
        for one in (
            Hyperparameter(
                name=LEARNING_RATE,
                meaning="Peak learning rate; under Muon that of hidden matrices.",
                default=math.nan,
                above=0,
                set_by="search",
                scaling="learning_rate",
                placeholder="lr",
                aliases=("lr", "max_lr", "peak_lr"),
                short="lr",
            ),
            Hyperparameter(
                name=WARMUP,
                meaning="Warmup as a share of the steps.",
                default=0.0,
                scale="linear",
                unit=SHARE_OF_STEPS,
                least=0,
                below=1,
                set_by="search",
                range=(0.02, 0.5),
                tested_over=("width",),
                convention=Convention(
                    # Pythia (arXiv 2304.01373); OLMo (2402.00838) and Llama (2302.13971): 0.6 to 1
                    # %
                    value=0.01,
                    source="1 % of the steps (Pythia, arXiv 2304.01373), at least 20 steps and at "
                    "most 10 %",
                    least_steps=20,  # as many gradients as Adam's second moment remembers at 0.95
                    most=0.1,  # no published run warms up for longer
                    bears_less=True,
                ),
                placeholder="warmup_steps",
                aliases=("warmup", "warmup_iters", "num_warmup_steps"),
                short="warmup",
            ),
            Hyperparameter(
                name="clip_norm",
                meaning="Largest gradient norm.",
                default=1.0,
                above=0,
                set_by="search",
                range=(0.25, 4.0),
                can_be_off=True,
                off=None,
                tested_over=("width",),
                applied_to="gradient",
                convention=Convention(value=1.0, source=_DECODERS),
                aliases=("clip", "grad_clip", "max_grad_norm"),
                short="clip",
            ),
            Hyperparameter(
                name="weight_decay",
                meaning="At the base width; under Muon that of hidden matrices.",
                default=0.0,
                least=0,
                set_by="proxy",
                can_be_off=True,
                scaling="weight_decay",
                convention=Convention(value=0.1, source=_DECODERS),
                aliases=("wd",),
            ),
            Hyperparameter(
                name="beta1",
                meaning="AdamW's.",
                default=0.9,
                scale="log2_complement",
                least=0,
                below=1,
                set_by="proxy",
                scaling="moments",
                convention=Convention(value=0.9, source=_DECODERS),
            ),
            Hyperparameter(
                name="beta2",
                meaning="AdamW's.",
                default=0.95,
                scale="log2_complement",
                least=0,
                below=1,
                set_by="proxy",
                scaling="moments",
                convention=Convention(value=0.95, source=_DECODERS),
            ),
            Hyperparameter(
                name="eps",
                meaning="AdamW's.",
                default=1e-8,
                above=0,
                most=1,
                set_by="proxy",
                has_optimum=False,
                scaling="eps",
            ),
            Hyperparameter(
                name="momentum",
                meaning="Muon's.",
                default=0.95,
                scale="log2_complement",
                above=0,
                below=1,
                set_by="proxy",
                user_trainer=False,
            ),
            Hyperparameter(
                name="adamw_learning_rate",
                meaning="Under Muon the peak learning rate of what AdamW steps; 0: as that of "
                "hidden matrices.",
                default=0.0,
                least=0,
                set_by="proxy",
                scaling="learning_rate",
                zero_means=LEARNING_RATE,
                user_trainer=False,
                short="adamw lr",
            ),
            Hyperparameter(
                name="adamw_weight_decay",
                meaning="Under Muon the weight decay of what AdamW steps.",
                default=0.0,
                least=0,
                set_by="proxy",
                scaling="weight_decay",
                user_trainer=False,
            ),
            Hyperparameter(
                name="embedding_multiplier",
                meaning="Of the embeddings' output.",
                default=1.0,
                above=0,
                multiplies="embedding",
            ),
            Hyperparameter(
                name="output_multiplier",
                meaning="Of the readout's input.",
                default=1.0,
                above=0,
                multiplies="output",
            ),
        )
    }
)
"""By name, in the order they are searched in."""


@cache
def hyperparameter_named(name: str) -> Hyperparameter:
    """By its name: the registry's, or one that a plan declares, whose octaves are log2 of its
    value.
    """
    return HYPERPARAMETERS.get(name) or Hyperparameter(
        name=name, meaning="Of the user's own code.", default=math.nan
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnValue:
    """A value of the user's own code that a plan searches: as it is set at the base, and how it
    grows.
    """

    name: str
    value: float
    """Of `words`, its place among them."""
    whole: bool = False
    """Whether the code gets a whole number."""
    word: str = ""
    """What the code gets in place of a number; empty: the number."""
    powers: Powers = UNSCALED

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.that(bool(self.name), "name is empty")
        checks.number("value")
        checks.done()

    def at(self, ratios: Ratios) -> float | int | str:
        """What the code gets at these ratios."""
        if self.word:
            return self.word
        value = self.value * self.powers.at(ratios)
        return round(value) if self.whole else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Hparams:
    """Hyperparameters at the base shape; a parametrization carries them to any other.

    A warmup is part of the run's schedule. Weight decay is decoupled, as PyTorch's AdamW and Muon
    have it: each step multiplies a weight by `1 - lr * weight_decay`.
    """

    learning_rate: float
    weight_decay: float = HYPERPARAMETERS["weight_decay"].default
    beta1: float = HYPERPARAMETERS["beta1"].default
    beta2: float = HYPERPARAMETERS["beta2"].default
    eps: float = HYPERPARAMETERS["eps"].default
    clip_norm: float | None = HYPERPARAMETERS["clip_norm"].default
    """Largest global gradient norm; None never clips."""
    momentum: float = dataclasses.field(
        default=HYPERPARAMETERS["momentum"].default, metadata=canon.UNLESS_DEFAULT
    )
    adamw_learning_rate: float = dataclasses.field(default=0.0, metadata=canon.UNLESS_DEFAULT)
    adamw_weight_decay: float = dataclasses.field(default=0.0, metadata=canon.UNLESS_DEFAULT)
    embedding_multiplier: float = HYPERPARAMETERS["embedding_multiplier"].default
    output_multiplier: float = HYPERPARAMETERS["output_multiplier"].default
    own: tuple[OwnValue, ...] = dataclasses.field(default=(), metadata=canon.UNLESS_DEFAULT)
    """Values of the user's own code, by the plan's order."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        for one in map(HYPERPARAMETERS.__getitem__, HPARAMS):
            if getattr(self, one.name) is not None or one.off is not None:
                checks.number(
                    one.name, above=one.above, least=one.least, below=one.below, most=one.most
                )
        checks.done()

    @classmethod
    def at(
        cls, point: Mapping[str, float], rest: Mapping[str, float], own: Iterable[OwnValue] = ()
    ) -> Hparams:
        """Those of a point of a search, in which 0 is none of what can be off; of others, `rest`'s
        or the default; with the values of the user's own code.
        """
        given = {name: value for name, value in {**rest, **point}.items() if name in HPARAMS}
        off = {
            name: HYPERPARAMETERS[name].off
            for name, value in given.items()
            if value == 0 and name in CAN_BE_OFF
        }
        return cls(**{**given, **off}, own=tuple(own))  # type: ignore[arg-type]

    @property
    def needs_tokens(self) -> bool:
        """Whether a value of the user's own code grows with the batch or the duration."""
        return any(one.powers.batch or one.powers.duration for one in self.own)

    @property
    def unclipped(self) -> Hparams:
        """The same hyperparameters, with nothing applied to the gradient."""
        off = {
            name: HYPERPARAMETERS[name].off
            for name in RUN_WIDE
            if HYPERPARAMETERS[name].applied_to == "gradient"
        }
        return dataclasses.replace(self, **off)  # type: ignore[arg-type]

    @property
    def run_wide(self) -> dict[str, float | None]:
        """Those that are one number for the whole run, by name."""
        return {name: getattr(self, name) for name in RUN_WIDE}

    @property
    def values(self) -> dict[str, float | None]:
        """By name."""
        return {name: getattr(self, name) for name in HPARAMS}


HPARAMS = tuple(
    field.name for field in dataclasses.fields(Hparams) if field.name in HYPERPARAMETERS
)
"""Names of its fields that the registry knows."""
ADDED_HPARAMS = tuple(
    field.name
    for field in dataclasses.fields(Hparams)
    if field.name in HYPERPARAMETERS and canon.UNLESS_DEFAULT.items() <= field.metadata.items()
)
"""Names of those that records leave out at their default: records made before they were there keep
their ids."""
USER_TRAINER_HPARAMS = tuple(name for name in HPARAMS if HYPERPARAMETERS[name].user_trainer)
"""Names of those that a user's own trainer is given."""
RUN_WIDE = tuple(name for name in HPARAMS if HYPERPARAMETERS[name].applied_to is not None)
"""Names of the run-wide settings, which are fields of a frozen config."""


def warmup_of(point: Mapping[str, float]) -> float:
    """A point's warmup, as a share of the steps; none where it is not searched."""
    return point.get(WARMUP, 0.0)


def with_warmup(point: Mapping[str, float], share: float) -> dict[str, float]:
    """The point with another warmup."""
    return {**point, WARMUP: share}


def _names(chosen: Iterable[Hyperparameter]) -> tuple[str, ...]:
    return tuple(one.name for one in chosen)


WITH_OPTIMUM = _names(one for one in HYPERPARAMETERS.values() if one.has_optimum)
"""Those whose transfer can be tested."""
CAN_BE_OFF = _names(one for one in HYPERPARAMETERS.values() if one.can_be_off)
SET_BY: Mapping[SetBy, tuple[Hyperparameter, ...]] = {
    place: tuple(one for one in HYPERPARAMETERS.values() if one.set_by == place)
    for place in ("search", "proxy", "axes")
}
"""By where a plan sets them."""
