"""Section `[search]` of a plan: what is searched, how, and for how many trials. Imports pydantic
and nothing heavier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Discriminator, Field, Tag

from forerun._launcher.study.plan.axes import UserAxis
from forerun._launcher.study.plan.keys import (
    ONCE,
    AnyAxis,
    CanBeOff,
    Count,
    MoreAxis,
    Positive,
    Range,
    Section,
    Seed,
    add_range_keys,
    require,
)
from forerun._proxies.core.hyperparameters import CAN_BE_OFF, HYPERPARAMETERS, SET_BY
from forerun._sweeps.search.samplers import SAMPLERS
from forerun._sweeps.search.space import SearchSpace, build_search_space

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from forerun._sweeps.search.samplers import Sampler


if TYPE_CHECKING:
    SamplerName = str
else:  # the registry is the only place that lists the names
    SamplerName = Literal[tuple(SAMPLERS)]


def _get_form(value: object) -> str:
    """Return the tag of an axis: that of a range, or of a table."""
    return AXIS_FORMS[isinstance(value, (dict, UserAxis))]


MAX_TRIALS, MAX_EXTENSIONS = 10**6, 100
"""Maximum number of trials and of extensions. An estimate lists every trial, so a mistyped number
must not exhaust the machine's memory."""
AXIS_FORMS = ("axis-range", "axis-table")
"""Tags of the two forms of an axis, a range and a table. Pydantic adds them to the location of a
problem."""
RangeOrAxis = Annotated[
    Annotated[Range, Tag(AXIS_FORMS[0])] | Annotated[UserAxis, Tag(AXIS_FORMS[1])],
    Discriminator(_get_form),
]
_REPLICATES = require(
    lambda number: number not in (1, 2, 3), "must be 0, or at least 4: two trials, twice each"
)
_SEVERAL = require(lambda number: number != 1, "must be 0, or at least 2: one seed shows no noise")


def _join_lines(registry: Mapping[str, Sampler]) -> str:
    """Return one sentence per entry of a registry, joined."""
    return "; ".join(f"{name}: {entry.line}" for name, entry in registry.items())


@add_range_keys
class _Ranges(Section):
    """The number of trials and the ranges. Ranges that the registry declares come last."""

    num_trials: Annotated[int, Field(ge=1, le=MAX_TRIALS)] = 24
    """Number of trials."""
    learning_rate: Range = (2.0**-9, 2.0**-3)
    """Lowest and highest peak learning rate."""


class SearchSection(_Ranges):
    """The hyperparameter search at the base width, by Optuna."""

    axes: dict[MoreAxis, RangeOrAxis] = Field({})
    """Other hyperparameters to search, as { name = [lowest, highest] }; [proxy] sets the rest. For
    your own code also any name that it knows, with a scale (log, linear, integer, categorical) and
    exponents of width, depth, batch, and duration: { expert_lr = { range = [1e-3, 0.1],
    width = -1.0 } }."""
    choices: dict[AnyAxis, Annotated[tuple[Positive, ...], Field(min_length=2), ONCE]] = Field({})
    """Hyperparameters searched over a list, not a range, as { name = [value, value] }."""
    can_be_off: Annotated[tuple[CanBeOff, ...], ONCE] = Field(
        (),
        description="Searched hyperparameters that a trial may also turn off: any of "
        f"{', '.join(CAN_BE_OFF)}.",
    )
    warm_start: tuple[dict[AnyAxis, Annotated[float, Field(ge=0, allow_inf_nan=False)]], ...] = ()
    """Points of the first trials, as [{ name = value }]; a name left out is in the middle of its
    range. `forerun init --warm-start` takes them from an Optuna study."""
    sampler: SamplerName = Field(
        "tpe",
        description=f"How trials are suggested. {_join_lines(SAMPLERS)}. docs/search.md compares "
        "them.",
    )
    parallelism: Count = 8
    """Maximum number of trials in flight, P: suggestion k uses only outcomes of 0 ... k-P."""
    num_startup: Count = 12
    """First trials, spread evenly over the ranges; then the sampler suggests."""
    pruner: Literal["none", "curve"] = "none"
    """curve: stops trials whose training losses cannot become the best; pays from about 40 trials.
    """
    max_extensions: Annotated[int, Field(ge=0, le=MAX_EXTENSIONS)] = 0
    """Times that search ranges may widen until the optimum is inside; 0: only a warning."""
    extension_trials: Annotated[int, Field(ge=1, le=MAX_TRIALS // MAX_EXTENSIONS)] = 8
    """Extra trials per widening; at least four for each end that moves."""
    num_replicates: Annotated[int, Field(ge=0, le=1000), _REPLICATES] = 0
    """Repeats of the best trials with other seeds, most where the choice is in doubt; 0, or at
    least 4."""
    tie_seeds: Annotated[int, Field(ge=0, le=1000), _SEVERAL] = 4
    """Seeds to compare searched values with conventional ones, which win unless they clearly lose;
    at least 2, or 0: no comparison, the search's values are used."""
    replay_winner: bool = False
    """Run the winning trial again on another worker, to catch one that computes wrongly."""
    seed: Seed = 0
    """Seed of the search, and of the trials' weights and data order."""

    @property
    def ranges(self) -> dict[str, Range]:
        """Ranges of the hyperparameters that every search varies, by name."""
        return {
            hyperparameter.name: getattr(self, hyperparameter.name)
            for hyperparameter in SET_BY["search"]
        }

    @property
    def user_axes(self) -> dict[str, UserAxis]:
        """Axes that the registry of hyperparameters does not know, by name."""
        axes = {
            name: given if isinstance(given, UserAxis) else UserAxis(range=given)
            for name, given in self.axes.items()
            if name not in HYPERPARAMETERS
        }
        lists = {
            name: values for name, values in self.choices.items() if name not in HYPERPARAMETERS
        }
        return axes | {
            name: UserAxis(values=values, scale="categorical") for name, values in lists.items()
        }

    def build_space(self, reaches: Callable[[str], bool]) -> SearchSpace:
        """Return the search space.

        Args:
            reaches: Returns whether the trainer gets a hyperparameter, given its name. Of `ranges`,
                only the hyperparameters that reach the trainer are searched.

        Raises:
            SpecError: A range is not valid.
        """
        user_axes = self.user_axes
        ranges = {name: range_ for name, range_ in self.ranges.items() if reaches(name)}
        ranges |= {
            name: given for name, given in self.axes.items() if not isinstance(given, UserAxis)
        }
        return build_search_space(
            ranges={name: given for name, given in ranges.items() if name not in user_axes},
            choices={name: given for name, given in self.choices.items() if name not in user_axes},
            can_be_off=self.can_be_off,
            own=[axis.to_search_axis(name) for name, axis in user_axes.items()],
        )
