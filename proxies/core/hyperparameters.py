"""Registry of hyperparameters: each is declared here, once, for all packages.

Plans, search spaces, transfer tests, tables of runs, placeholders of trainers' commands, reports,
explanations, and completion read `HYPERPARAMETERS`. A new hyperparameter needs an entry here, a
field of `Hparams` that records omit at its default (`ADDED_HPARAMS`), and the code that trains with
it. A plan may declare further hyperparameters of the user's own code: `get_hyperparameter` knows
only their names, and a run holds them as `UserValue`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal

from forerun._proxies.core import canon
from forerun._proxies.core.checks import Checks
from forerun._proxies.core.notation import format_learning_rate
from forerun._proxies.core.powers import UNSCALED, Powers, Ratios

Scale = Literal["linear", "log2", "log2_complement"]
"""Scale on which a search draws values evenly. `log2_complement`: log2 of 1 - value, where
1 - value is the inverse of a moving average's memory in steps."""
Scaling = Literal["learning_rate", "weight_decay", "eps", "moments"]
"""Rule of `forerun._proxies.core.rules` by which a value scales from the base to another shape."""
SetBy = Literal["search", "proxy", "axes"]
"""Place in a plan. `search`: a range of its own in `[search]`; `proxy`: a value in `[proxy]`, and a
range in `[search] axes` if it is searched; `axes`: only a range in `[search] axes`."""
AppliedTo = Literal["gradient", "loss"]
"""Target of a run-wide setting: the gradient before an update, or the loss that is
differentiated."""
LEARNING_RATE = "learning_rate"
"""Hyperparameter that every study searches and tests for transfer."""
WARMUP = "warmup_fraction"
"""Hyperparameter that is part of a run's schedule, which holds it as a number of steps. All others
are fields of `Hparams`."""
SHARE_OF_STEPS = "share of the steps"
"""Unit of a warmup."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Convention:
    """A value that published trainers use. A study keeps it unless paired runs show that it is
    worse than the searched value.
    """

    value: float
    source: str
    min_steps: int = 0
    """Minimum number of steps of a value that is a share of the steps; 0 for other values."""
    most: float = math.inf
    """Upper limit of the value, also for the minimum number of steps."""
    needs_lower_rate: bool = False
    """Whether a smaller value needs a lower learning rate; a study then also tries the convention
    at a lower learning rate."""

    def compute_value(self, num_steps: int) -> float:
        """Return the value for a run of `num_steps` steps."""
        if not self.min_steps:
            return self.value
        return float(f"{min(self.most, max(self.value, self.min_steps / num_steps)):.3g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyperparameter:
    """Declaration of one hyperparameter, whose values are set at the base shape."""

    name: str
    """Name in plans, ledgers, tables, and JSON."""
    meaning: str
    """Sentence for the plan's reference and the placeholders of trainers' commands."""
    default: float
    scale: Scale = "log2"
    unit: str = ""
    """Unit; empty if there is none, or if `meaning` names it."""
    least: float | None = None
    above: float | None = None
    below: float | None = None
    most: float | None = None
    """Limits of the values: `least` and `most` are allowed values, `above` and `below` are not.
    None for no limit."""
    set_by: SetBy = "axes"
    range: tuple[float, float] | None = None
    """Range that is searched by default; None if there is no default."""
    can_be_off: bool = False
    """Whether a trial may do without it. A point of the search then has 0, and `Hparams` has
    `off`."""
    off: float | None = 0.0
    """Value in `Hparams` that turns it off."""
    has_optimum: bool = True
    """Whether the transfer of its optimum can be tested."""
    tested_over: tuple[str, ...] = ()
    """Axes over which a plan tests it by default."""
    scaling: Scaling | None = None
    """Rule by which the value scales; None if it is the same at every shape."""
    zero_means: str = ""
    """Name of another hyperparameter, whose value is used in place of 0; empty if 0 is an ordinary
    value."""
    user_trainer: bool = True
    """Whether a user's own trainer, which has its own optimizer, receives it."""
    applied_to: AppliedTo | None = None
    """Target of a run-wide setting, which is one number for the whole run; None for all others."""
    multiplies: str = ""
    """Forward multiplier (`forerun._proxies.core.numbers.ForwardNumbers`) that it is part of; empty
    for none."""
    convention: Convention | None = None
    placeholder: str = ""
    """Placeholder in a trainer's command line; empty for its name."""
    aliases: tuple[str, ...] = ()
    """Other names of its column in tables of runs, and of its key in trainers' logs."""
    short: str = ""
    """Short name; empty for its name."""

    @property
    def label(self) -> str:
        """Name in sentences and headings."""
        return self.name.replace("_", " ")

    @property
    def zero_is_none(self) -> bool:
        """Whether 0 means that the hyperparameter is absent, so that it has no logarithm."""
        return self.can_be_off or (self.scale != "log2_complement" and self.least == 0)

    @property
    def placeholder_name(self) -> str:
        """Placeholder in a trainer's command line."""
        return self.placeholder or self.name

    def to_log2(self, value: float) -> float:
        """Return log2 of a value; on the scale `log2_complement`, log2 of 1 - value.

        Raises:
            ValueError: The value has no finite logarithm.
        """
        scaled = 1 - value if self.scale == "log2_complement" else value
        if not 0 < scaled < math.inf:
            raise ValueError(f"{self.name} = {value}: this value has no finite logarithm")
        return math.log2(scaled)

    def from_log2(self, log2_value: float, digits: int = 0) -> float:
        """Return the inverse of `to_log2`, rounded to `digits` significant digits (0: unrounded).

        On the scale `log2_complement`, 1 - value is rounded.
        """
        scaled = math.exp2(log2_value)
        if digits:
            scaled = float(f"{scaled:.{digits}g}")
        return 1 - scaled if self.scale == "log2_complement" else scaled

    def round_value(self, value: float, digits: int) -> float:
        """Return a value in significant digits; on `log2_complement`, 1 - value is rounded."""
        if self.scale == "log2_complement":
            return 1 - float(f"{1 - value:.{digits}g}")
        return float(f"{value:.{digits}g}")

    def format_value(self, value: float) -> str:
        """Return a value as text for people."""
        if value == 0 and self.can_be_off:
            return "off"
        if self.name == LEARNING_RATE:
            return format_learning_rate(value)
        return f"{self.round_value(value, 3):.10g}"


_DECODERS = "GPT-3 (arXiv 2005.14165), Llama (2302.13971), OLMo (2402.00838)"

HYPERPARAMETERS: Mapping[str, Hyperparameter] = MappingProxyType(
    {
        hyperparameter.name: hyperparameter
        for hyperparameter in (
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
                    # OLMo (2402.00838) and Llama (2302.13971): 0.6 to 1 %
                    value=0.01,
                    source="1 % of the steps (Pythia, arXiv 2304.01373), at least 20 steps and at "
                    "most 10 %",
                    min_steps=20,  # memory of Adam's second moment at beta2 = 0.95, in steps
                    most=0.1,  # the longest warmup of a published run
                    needs_lower_rate=True,
                ),
                placeholder="warmup_steps",
                aliases=("warmup", "warmup_iters", "num_warmup_steps"),
                short="warmup",
            ),
            Hyperparameter(
                name="clip_norm",
                meaning="Maximum gradient norm.",
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
                meaning="Weight decay at the base width; under Muon that of hidden matrices.",
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
                meaning="Decay factor of AdamW's first moment.",
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
                meaning="Decay factor of AdamW's second moment.",
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
                meaning="Term that AdamW adds to its denominator.",
                default=1e-8,
                above=0,
                most=1,
                set_by="proxy",
                has_optimum=False,
                scaling="eps",
            ),
            Hyperparameter(
                name="momentum",
                meaning="Momentum of Muon.",
                default=0.95,
                scale="log2_complement",
                above=0,
                below=1,
                set_by="proxy",
                user_trainer=False,
            ),
            Hyperparameter(
                name="adamw_learning_rate",
                meaning="Under Muon, peak learning rate of the parameters that AdamW steps; 0: the "
                "same as for hidden matrices.",
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
                meaning="Under Muon, weight decay of the parameters that AdamW steps.",
                default=0.0,
                least=0,
                set_by="proxy",
                scaling="weight_decay",
                user_trainer=False,
            ),
            Hyperparameter(
                name="embedding_multiplier",
                meaning="Multiplier of the embeddings' output.",
                default=1.0,
                above=0,
                multiplies="embedding",
            ),
            Hyperparameter(
                name="output_multiplier",
                meaning="Multiplier of the readout's input.",
                default=1.0,
                above=0,
                multiplies="output",
            ),
        )
    }
)
"""Hyperparameters by name, in the order in which they are searched."""


@cache
def get_hyperparameter(name: str) -> Hyperparameter:
    """Return the hyperparameter of a name: the registry's, or one of the user's own code."""
    return HYPERPARAMETERS.get(name) or Hyperparameter(
        name=name, meaning="Value of the user's own code.", default=math.nan
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class UserValue:
    """A value of the user's own code that a plan searches, and how it scales."""

    name: str
    value: float
    """Value at the base; if the values are words, the index of the word."""
    whole: bool = False
    """Whether the code receives a whole number."""
    word: str = ""
    """Word that the code receives in place of a number; empty for the number."""
    powers: Powers = UNSCALED
    """Scaling of the value."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        checks.require(bool(self.name), "name is empty")
        checks.require_number("value")
        checks.raise_problems()

    def compute_value(self, ratios: Ratios) -> float | int | str:
        """Return what the code receives at these ratios."""
        if self.word:
            return self.word
        value = self.value * self.powers.evaluate(ratios)
        return round(value) if self.whole else value


@dataclass(frozen=True, kw_only=True, slots=True)
class Hparams:
    """Hyperparameters at the base shape; a parametrization scales them to any other.

    The warmup is part of the run's schedule. Weight decay is decoupled, as in PyTorch's AdamW and
    Muon: each step multiplies a weight by `1 - lr * weight_decay`.
    """

    learning_rate: float
    weight_decay: float = HYPERPARAMETERS["weight_decay"].default
    beta1: float = HYPERPARAMETERS["beta1"].default
    beta2: float = HYPERPARAMETERS["beta2"].default
    eps: float = HYPERPARAMETERS["eps"].default
    clip_norm: float | None = HYPERPARAMETERS["clip_norm"].default
    """Maximum global gradient norm; None to never clip."""
    momentum: float = dataclasses.field(
        default=HYPERPARAMETERS["momentum"].default, metadata=canon.UNLESS_DEFAULT
    )
    adamw_learning_rate: float = dataclasses.field(default=0.0, metadata=canon.UNLESS_DEFAULT)
    adamw_weight_decay: float = dataclasses.field(default=0.0, metadata=canon.UNLESS_DEFAULT)
    embedding_multiplier: float = HYPERPARAMETERS["embedding_multiplier"].default
    output_multiplier: float = HYPERPARAMETERS["output_multiplier"].default
    own: tuple[UserValue, ...] = dataclasses.field(default=(), metadata=canon.UNLESS_DEFAULT)
    """Values of the user's own code, in the plan's order."""

    def __post_init__(self) -> None:
        checks = Checks(self)
        for name in HPARAMS:
            declared = HYPERPARAMETERS[name]
            if getattr(self, name) is not None or declared.off is not None:
                checks.require_number(
                    name,
                    above=declared.above,
                    least=declared.least,
                    below=declared.below,
                    most=declared.most,
                )
        checks.raise_problems()

    @classmethod
    def from_point(
        cls, point: Mapping[str, float], fixed: Mapping[str, float], own: Iterable[UserValue] = ()
    ) -> Hparams:
        """Return the hyperparameters of a trial.

        Args:
            point: Values that are searched, by name. 0 turns a hyperparameter off that can be off.
            fixed: Values that are not searched, by name. All others have their default.
            own: Values of the user's own code.
        """
        given = {name: value for name, value in {**fixed, **point}.items() if name in HPARAMS}
        off = {
            name: HYPERPARAMETERS[name].off
            for name, value in given.items()
            if value == 0 and name in CAN_BE_OFF
        }
        return cls(**{**given, **off}, own=tuple(own))  # type: ignore[arg-type]

    @property
    def needs_tokens(self) -> bool:
        """Whether a value of the user's own code scales with batch or duration."""
        return any(value.powers.batch or value.powers.duration for value in self.own)

    @property
    def unclipped(self) -> Hparams:
        """The hyperparameters with everything off that acts on the gradient, such as clipping."""
        off = {
            name: HYPERPARAMETERS[name].off
            for name in RUN_WIDE
            if HYPERPARAMETERS[name].applied_to == "gradient"
        }
        return dataclasses.replace(self, **off)  # type: ignore[arg-type]

    @property
    def run_wide(self) -> dict[str, float | None]:
        """Run-wide settings by name."""
        return {name: getattr(self, name) for name in RUN_WIDE}

    @property
    def values(self) -> dict[str, float | None]:
        """Values by name."""
        return {name: getattr(self, name) for name in HPARAMS}


HPARAMS = tuple(
    field.name for field in dataclasses.fields(Hparams) if field.name in HYPERPARAMETERS
)
"""Names of the hyperparameters that are fields of `Hparams`."""
ADDED_HPARAMS = tuple(
    field.name
    for field in dataclasses.fields(Hparams)
    if field.name in HYPERPARAMETERS and canon.UNLESS_DEFAULT.items() <= field.metadata.items()
)
"""Names of hyperparameters that records omit at their default, so that records from before they
existed keep their ids."""
USER_TRAINER_HPARAMS = tuple(name for name in HPARAMS if HYPERPARAMETERS[name].user_trainer)
"""Names of the hyperparameters that a user's own trainer receives."""
RUN_WIDE = tuple(name for name in HPARAMS if HYPERPARAMETERS[name].applied_to is not None)
"""Names of the run-wide settings, which are fields of a frozen config."""
WITH_OPTIMUM = tuple(name for name, declared in HYPERPARAMETERS.items() if declared.has_optimum)
"""Names of the hyperparameters whose transfer can be tested."""
CAN_BE_OFF = tuple(name for name, declared in HYPERPARAMETERS.items() if declared.can_be_off)
"""Names of the hyperparameters that a trial may be without."""
SET_BY: Mapping[SetBy, tuple[Hyperparameter, ...]] = {
    place: tuple(declared for declared in HYPERPARAMETERS.values() if declared.set_by == place)
    for place in ("search", "proxy", "axes")
}
"""Hyperparameters by their place in a plan."""


def get_warmup(point: Mapping[str, float]) -> float:
    """Return a point's warmup as a share of the steps; 0 if it is not searched."""
    return point.get(WARMUP, 0.0)


def replace_warmup(point: Mapping[str, float], share: float) -> dict[str, float]:
    """Return a point with another warmup."""
    return {**point, WARMUP: share}
