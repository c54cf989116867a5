"""Section `[search]` of a plan: what is searched, how, and for how many trials. Imports pydantic
and nothing heavier.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Discriminator, Field, Tag

from launcher.plan.axes import OwnAxis
from launcher.plan.keys import (
    ONCE,
    AnyAxis,
    CanBeOff,
    Count,
    MoreAxis,
    Positive,
    Range,
    Section,
    Seed,
    must,
    with_ranges,
)
from proxies.core.hyperparameters import CAN_BE_OFF, HYPERPARAMETERS, SET_BY
from sweeps.search.samplers import SAMPLERS
from sweeps.search.space import SearchSpace, search_space

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sweeps.search.samplers import Sampler


if TYPE_CHECKING:
    SamplerName = str
else:  # the registry is the only place that lists the names
    SamplerName = Literal[tuple(SAMPLERS)]


def _get_form(value: object) -> str:
    return WRITTEN_AS[isinstance(value, (dict, OwnAxis))]


MOST_TRIALS, MOST_EXTENSIONS = 10**6, 100
"""Maximum number of trials and of extensions. An estimate lists them all, so a typing error must
not exhaust the machine's memory."""
WRITTEN_AS = ("axis-range", "axis-table")
"""Tags of the two forms of an axis, which pydantic adds to the path of a problem."""
RangeOrAxis = Annotated[
    Annotated[Range, Tag(WRITTEN_AS[0])] | Annotated[OwnAxis, Tag(WRITTEN_AS[1])],
    Discriminator(_get_form),
]
_REPLICATES = must(
    lambda number: number not in (1, 2, 3), "must be 0, or at least 4: two trials, twice each"
)
_SEVERAL = must(lambda number: number != 1, "must be 0, or at least 2: one seed shows no noise")


def _join_lines(registry: Mapping[str, Sampler]) -> str:
    """Return one sentence per entry of a registry, joined."""
    return "; ".join(f"{name}: {entry.line}" for name, entry in registry.items())


@with_ranges
class _Ranges(Section):
    """The number of trials and the ranges. Ranges that the registry declares come last."""

    num_trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)] = Field(
        24, description="Number of trials."
    )
    learning_rate: Range = Field(
        (2.0**-9, 2.0**-3), description="Lowest and highest peak learning rate."
    )


class SearchSection(_Ranges):
    """The hyperparameter search at the base width, by Optuna."""

    axes: dict[MoreAxis, RangeOrAxis] = Field(
        {},
        description="Other hyperparameters to search, as { name = [lowest, highest] }; the rest "
        "are [proxy]'s. With "
        "code of your own also any name that it knows, whose scale is log, linear, integer or "
        "categorical, and which "
        "may grow as powers of width, depth, batch, duration: { expert_lr = { range = [1e-3, 0.1], "
        "width = -1.0 } }.",
    )
    choices: dict[AnyAxis, Annotated[tuple[Positive, ...], Field(min_length=2), ONCE]] = Field(
        {},
        description="Hyperparameters searched over a list, not a range, as { name = [value, value] "
        "}.",
    )
    can_be_off: Annotated[tuple[CanBeOff, ...], ONCE] = Field(
        (),
        description="Searched hyperparameters that a trial may also turn off: any of "
        f"{', '.join(CAN_BE_OFF)}.",
    )
    warm_start: tuple[dict[AnyAxis, Annotated[float, Field(ge=0, allow_inf_nan=False)]], ...] = (
        Field(
            (),
            description="Points of the first trials, as [{ name = value }]; a name left out is in "
            "the middle of its range. `forerun init --warm-start` takes them from an Optuna study.",
        )
    )
    sampler: SamplerName = Field(
        "tpe",
        description=f"How trials are suggested. {_join_lines(SAMPLERS)}. docs/search.md compares "
        "them.",
    )
    parallelism: Count = Field(
        8, description="Most trials in flight, P: suggestion k uses only outcomes of 0 ... k-P."
    )
    num_startup: Count = Field(
        12, description="First trials, spread evenly over the ranges; then the sampler suggests."
    )
    pruner: Literal["none", "curve"] = Field(
        "none",
        description="curve: stops trials whose training losses cannot become the best; pays from "
        "about 40 trials.",
    )
    max_extensions: Annotated[int, Field(ge=0, le=MOST_EXTENSIONS)] = Field(
        0,
        description="How often search ranges may widen until the optimum is inside; 0: only a "
        "warning.",
    )
    extension_trials: Annotated[int, Field(ge=1, le=MOST_TRIALS // MOST_EXTENSIONS)] = Field(
        8, description="Extra trials per widening; at least four for each end that moves."
    )
    num_replicates: Annotated[int, Field(ge=0, le=1000), _REPLICATES] = Field(
        0,
        description="Repeats of the best trials with other seeds, most where the choice is in "
        "doubt; 0, or at least 4.",
    )
    tie_seeds: Annotated[int, Field(ge=0, le=1000), _SEVERAL] = Field(
        4,
        description="Seeds to compare searched values with conventional ones, which win unless "
        "they clearly lose; "
        "at least 2, or 0: no comparison, the search's values are used.",
    )
    replay_winner: bool = Field(
        False,
        description="Run the winning trial again on another worker, to catch one that computes "
        "wrongly.",
    )
    seed: Seed = Field(
        0, description="Seed of the search, and of the trials' weights and data order."
    )

    @property
    def ranges(self) -> dict[str, Range]:
        """Ranges of the hyperparameters that every search varies, by name."""
        return {
            hyperparameter.name: getattr(self, hyperparameter.name)
            for hyperparameter in SET_BY["search"]
        }

    @property
    def own(self) -> dict[str, OwnAxis]:
        """Axes that the registry of hyperparameters does not know, by name."""
        axes = {
            name: given if isinstance(given, OwnAxis) else OwnAxis(range=given)
            for name, given in self.axes.items()
            if name not in HYPERPARAMETERS
        }
        lists = {
            name: values for name, values in self.choices.items() if name not in HYPERPARAMETERS
        }
        return axes | {
            name: OwnAxis(values=values, scale="categorical") for name, values in lists.items()
        }

    def space(self, reaches: Callable[[str], bool]) -> SearchSpace:
        """Return the search space: of `ranges`, only those that reach the trainer.

        Raises:
            SpecError: A range is not valid.
        """
        ranges = {name: range_ for name, range_ in self.ranges.items() if reaches(name)}
        ranges |= {
            name: given for name, given in self.axes.items() if not isinstance(given, OwnAxis)
        }
        own = self.own
        return search_space(
            ranges={name: range_ for name, range_ in ranges.items() if name not in own},
            choices={name: values for name, values in self.choices.items() if name not in own},
            can_be_off=self.can_be_off,
            own=[axis.searched(name) for name, axis in own.items()],
        )
