"""Building blocks of the plan's sections: their base class, the types of values, and the keys that
the registry of hyperparameters declares. Imports pydantic and nothing heavier.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, create_model
from pydantic_core import PydanticCustomError

from forerun._launcher.study.plan.sources import CHOICE_SUBJECTS
from forerun._proxies.core.hyperparameters import (
    CAN_BE_OFF,
    LEARNING_RATE,
    SET_BY,
    Hyperparameter,
    get_hyperparameter,
)
from forerun._proxies.core.rules import CHOICES, POWER_BOUNDS


def require(holds: Callable[[Any], object], message: str) -> AfterValidator:
    """Return a pydantic validator that refuses values for which `holds` is false.

    Args:
        holds: Returns whether the value is allowed.
        message: Message that follows the key and the value.
    """

    def check(value: Any) -> Any:
        if not holds(value):
            raise PydanticCustomError("refused", message)
        return value

    return AfterValidator(check)


_NAME = re.compile(r"[a-z][a-z0-9_]*")
_RANGES = tuple(hyperparameter.name for hyperparameter in SET_BY["search"])
ONCE = require(lambda values: len(set(values)) == len(values), "must not repeat a value")
RISING = require(lambda ends: ends[0] <= ends[1], "must have the lower end first")

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

# A type checker cannot evaluate these types, which depend on the registry of hyperparameters.
if TYPE_CHECKING:
    MoreAxis: TypeAlias = str
    AnyAxis: TypeAlias = str
    CanBeOff: TypeAlias = str
    Tested: TypeAlias = str
else:
    AnyAxis = Annotated[
        str, require(_NAME.fullmatch, "must be a name in lower case, such as expert_lr")
    ]
    MoreAxis = Annotated[
        AnyAxis, require(lambda name: name not in _RANGES, "has a key of its own in [search]")
    ]
    CanBeOff = Literal[CAN_BE_OFF]
    Tested = Annotated[
        AnyAxis,
        require(
            lambda name: name != LEARNING_RATE and get_hyperparameter(name).has_optimum,
            "cannot be tested here: it has no optimum, or is the learning rate, which is always "
            "tested",
        ),
    ]


def _join_lines(schema: dict[str, Any]) -> None:
    """Join the lines of the descriptions in a JSON Schema, which come from docstrings."""
    for described in (schema, *schema.get("properties", {}).values()):
        if "description" in described:
            described["description"] = " ".join(described["description"].split())


class Section(BaseModel):
    """Base class of sections. It is strict and frozen: unknown keys and values of another type are
    errors. The docstring of a key is its description in plan files and in the reference.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        json_schema_extra=_join_lines,
    )


_SomeSection = TypeVar("_SomeSection", bound=Section)


def add_value_keys(section: type[_SomeSection]) -> type[_SomeSection]:
    """Return the section with a key for the value of each hyperparameter that `[proxy]` sets."""
    return _add_keys(
        section,
        {
            hyperparameter: (_build_number_type(hyperparameter), hyperparameter.default)
            for hyperparameter in SET_BY["proxy"]
        },
    )


def add_range_keys(section: type[_SomeSection]) -> type[_SomeSection]:
    """Return the section with a key for the range of each hyperparameter that every search
    varies.
    """
    keys: dict[Hyperparameter, tuple[Any, Any]] = {}
    for hyperparameter in SET_BY["search"]:
        number_type = _build_number_type(hyperparameter)
        ends = tuple[number_type, number_type]  # type: ignore[valid-type]
        keys[hyperparameter] = Annotated[ends, RISING], hyperparameter.range
    return _add_keys(section, keys)


def add_rule_keys(section: type[_SomeSection]) -> type[_SomeSection]:
    """Return the section with a key for each choice of a parametrization. The width rule has no
    key, because the name of the parametrization sets it.
    """
    kinds: dict[str, Any] = {
        **{
            name: Literal[words] for name, words in CHOICES.items() if name not in ("name", "width")
        },
        **{
            name: Annotated[float, Field(ge=least, le=most)]
            for name, (least, most) in POWER_BOUNDS.items()
        },
    }
    fields: dict[str, Any] = {
        name: (kinds[name] | None, Field(None, description=about))
        for name, about in CHOICE_SUBJECTS.items()
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
    # Without a bound of its own, a value gets a large one, so that no product overflows.
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
