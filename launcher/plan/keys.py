"""Building blocks of the plan's sections: their base class, the types of values, and the keys that
the registry of hyperparameters declares. Imports pydantic and nothing heavier.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError

from launcher.plan.sources import QUESTIONS
from proxies.core.hyperparameters import (
    CAN_BE_OFF,
    LEARNING_RATE,
    SET_BY,
    Hyperparameter,
    hyperparameter_named,
)
from proxies.core.rules import CHOICES, POWERS


def must(holds: Callable[[Any], object], said: str) -> AfterValidator:
    """Return a validator for a whole value.

    Args:
        holds: Returns whether the value is allowed.
        said: Message that follows the key and the value.
    """

    def check(value: Any) -> Any:
        if not holds(value):
            raise PydanticCustomError("refused", said)
        return value

    return AfterValidator(check)


_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RANGES = tuple(hyperparameter.name for hyperparameter in SET_BY["search"])
ONCE = must(lambda values: len(set(values)) == len(values), "must not repeat a value")
RISING = must(lambda ends: ends[0] <= ends[1], "must have the lower end first")

Positive = Annotated[float, Field(gt=0, le=1e30, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=10**9)]
Steps = Annotated[int, Field(ge=0, le=10**9)]
Width = Annotated[int, Field(ge=1, le=2**17)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
Range = Annotated[tuple[Positive, Positive], RISING]
Widths = Annotated[tuple[Width, ...], ONCE]
Octaves = Annotated[float, Field(ge=-20, le=20)]
"""Offset in octaves. Beyond these limits the numbers of a run would overflow."""

if TYPE_CHECKING:
    MoreAxis: TypeAlias = str
    AnyAxis: TypeAlias = str
    CanBeOff: TypeAlias = str
    Tested: TypeAlias = str
else:
    AnyAxis = Annotated[
        str, must(_NAME.fullmatch, "must be a name in lower case, such as expert_lr")
    ]
    MoreAxis = Annotated[
        AnyAxis, must(lambda name: name not in _RANGES, "has a key of its own in [search]")
    ]
    CanBeOff = Literal[CAN_BE_OFF]
    Tested = Annotated[
        AnyAxis,
        must(
            lambda name: name != LEARNING_RATE and hyperparameter_named(name).has_optimum,
            "is not tested so",
        ),
    ]


class Section(BaseModel):
    """Base class of sections. It is strict and frozen: unknown keys and values of another type are
    errors.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


_SomeSection = TypeVar("_SomeSection", bound=Section)


def with_values(section: type[_SomeSection]) -> type[_SomeSection]:
    """Return the section with a key for the value of each hyperparameter that `[proxy]` sets."""
    return _add_keys(
        section,
        {
            hyperparameter: (_build_number_type(hyperparameter), hyperparameter.default)
            for hyperparameter in SET_BY["proxy"]
        },
    )


def with_ranges(section: type[_SomeSection]) -> type[_SomeSection]:
    """Return the section with a key for the range of each hyperparameter that every search
    varies.
    """
    keys: dict[Hyperparameter, tuple[Any, Any]] = {}
    for hyperparameter in SET_BY["search"]:
        number_type = _build_number_type(hyperparameter)
        ends = tuple[number_type, number_type]  # type: ignore[valid-type]
        keys[hyperparameter] = Annotated[ends, RISING], hyperparameter.range
    return _add_keys(section, keys)


def with_rules(section: type[_SomeSection]) -> type[_SomeSection]:
    """Return the section with a key for each choice of a parametrization except its width rule,
    which the parametrization's name sets.
    """
    kinds: dict[str, Any] = {
        **{
            name: Literal[words] for name, words in CHOICES.items() if name not in ("name", "width")
        },
        **{
            name: Annotated[float, Field(ge=least, le=most)]
            for name, (least, most) in POWERS.items()
        },
    }
    fields: dict[str, Any] = {
        name: (kinds[name] | None, Field(None, description=about))
        for name, about in QUESTIONS.items()
    }
    return _create_section(section, fields)


def _add_keys(
    section: type[_SomeSection], keys: dict[Hyperparameter, tuple[Any, Any]]
) -> type[_SomeSection]:
    fields: dict[str, Any] = {
        hyperparameter.name: (kind, Field(default, description=hyperparameter.meaning))
        for hyperparameter, (kind, default) in keys.items()
        if hyperparameter.name not in section.model_fields
    }
    return _create_section(section, fields)


def _create_section(section: type[_SomeSection], fields: dict[str, Any]) -> type[_SomeSection]:
    created: type[_SomeSection] = create_model(
        section.__name__,
        __base__=section,
        __doc__=section.__doc__,
        __module__=section.__module__,
        **fields,
    )
    return created


def _build_number_type(hyperparameter: Hyperparameter) -> Any:
    """Return the type of a float within a hyperparameter's bounds."""
    upper = (
        hyperparameter.most
        if hyperparameter.most is not None or hyperparameter.below is not None
        else 1e30
    )
    return Annotated[
        float,
        Field(
            gt=hyperparameter.above,
            ge=hyperparameter.least,
            lt=hyperparameter.below,
            le=upper,
            allow_inf_nan=False,
        ),
    ]
