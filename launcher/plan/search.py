"""Section `[search]` of a plan: what is searched, how, and how long; and what does not hold together in it.

Imports pydantic and nothing heavier.
"""

from __future__ import annotations

import math
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, field_serializer
from pydantic_core import PydanticCustomError

from launcher.plan.keys import AnyAxis, CanBeOff, Count, MoreAxis, Positive, Range, Section, Seed, with_ranges
from proxies.core.checks import SpecError
from proxies.core.hyperparameters import CAN_BE_OFF, HYPERPARAMETERS, SET_BY
from proxies.core.spec import MAX_SEED
from scaling_fits.compute.published_laws import published
from sweeps.search.pruning import RETIRED, RULES, rungs
from sweeps.search.samplers import SAMPLERS
from sweeps.search.space import SearchSpace, search_space

if TYPE_CHECKING:
    from collections.abc import Mapping

    from launcher.plan.plan import Plan
    from sweeps.search.pruning import Rule
    from sweeps.search.samplers import Sampler


def _still_there(value: object) -> object:
    if value in RETIRED:
        raise PydanticCustomError("retired", "'curve', which took its place, or 'none'")
    return value


if TYPE_CHECKING:
    SamplerName = str
    PrunerName = str
else:  # the registries' names: nowhere else are they spelled out
    SamplerName = Literal[tuple(SAMPLERS)]
    PrunerName = Annotated[Literal[tuple(RULES)], BeforeValidator(_still_there)]
LAW = "law:"
WARM_TRIALS = 3
"""Best trials that a warm start takes from a study."""
LEAST_REPLICATES = 4
"""Two trials twice: less compares nothing."""


def _lines(registry: Mapping[str, Sampler] | Mapping[str, Rule]) -> str:
    """What each entry is, as one sentence."""
    return "; ".join(f"{name}: {entry.line}" for name, entry in registry.items())


@with_ranges
class _Ranges(Section):
    """How many trials, and between what values: ranges that the registry declares come last."""

    num_trials: Count = Field(24, description="Trials in all.")
    learning_rate: Range = Field((2.0**-9, 2.0**-3), description="Lowest and highest peak learning rate.")


class SearchSection(_Ranges):
    """Optuna's search at the base width."""

    axes: dict[MoreAxis, Range] = Field(
        {},
        description="What else is searched, as { name = [lowest, highest] }; the rest is [proxy]'s.",
    )
    choices: dict[AnyAxis, Annotated[tuple[Positive, ...], Field(min_length=2)]] = Field(
        {}, description="Axes of a few values in place of a range, as { name = [value, value, value] }."
    )
    can_be_off: tuple[CanBeOff, ...] = Field(
        (), description=f"What a trial may also do without: {', '.join(CAN_BE_OFF)}."
    )
    sampler: SamplerName = Field(
        "tpe", description=f"How points are suggested. {_lines(SAMPLERS)}. docs/search.md compares them."
    )
    grid: dict[AnyAxis, Annotated[int, Field(ge=1, le=10**4)]] = Field(
        {},
        description="Of the grid: how many values each axis has, as { learning_rate = 8 }; else its middle.",
    )
    parallelism: Count = Field(
        8, description="Most trials in flight, P: suggestion k uses outcomes of 0 ... k-P alone."
    )
    num_startup: Count = Field(12, description="Trials spread evenly before TPE, GP or CMA-ES begins.")
    pruner: PrunerName = Field(
        "none",
        description=f"Gives trials up on their way, by their training losses. {_lines(RULES)}. `curve` pays from some "
        "40 trials on.",
    )
    warm_start: tuple[str, ...] = Field(
        (),
        description='First points: other studies\' folders, relative to this file, "law:StepLaw", "law:DeepSeek LLM".',
    )
    max_extensions: Annotated[int, Field(ge=0, le=100)] = Field(
        0, description="How often a range whose end the best trials are near may grow; 0: it is only said."
    )
    extension_trials: Count = Field(8, description="Further trials each time; four at least for each end that moves.")
    num_replicates: Annotated[int, Field(ge=0, le=1000)] = Field(
        0,
        description="Runs of the best trials with other seeds, most where the choice is in doubt; 0, or 4 at least.",
    )
    tie_seeds: Annotated[int, Field(ge=0, le=1000)] = Field(
        4,
        description="Seeds that compare searched values with conventional ones, which win unless they clearly lose; "
        "at least 2; 0: no such runs, and the search's values are used.",
    )
    num_replays: Annotated[int, Field(ge=0, le=1000)] = Field(
        0,
        description="Trials run again on another worker to catch one that computes wrongly: the winner, others by lot.",
    )
    seed: Seed = Field(0, description="Of the search, and of the trials' weights and data order.")

    @field_serializer("warm_start", when_used="json")
    def _names(self, entries: tuple[str, ...]) -> list[str]:
        """Without the way there: a study goes on where the folders it began from have moved."""
        return [entry if entry.startswith(LAW) else PurePath(entry).name for entry in entries]

    @property
    def ranges(self) -> dict[str, Range]:
        """Of what every search varies, by name."""
        return {one.name: getattr(self, one.name) for one in SET_BY["search"]}

    @property
    def space(self) -> SearchSpace:
        """What the search varies. Raises SpecError for what is no range."""
        ranges: dict[str, Range] = {**self.ranges, **self.axes}
        choices = {str(name): values for name, values in self.choices.items()}
        grid = {str(name): number for name, number in self.grid.items()}
        return search_space(ranges=ranges, choices=choices, can_be_off=self.can_be_off, grid=grid)


def search_problems(plan: Plan) -> list[str]:
    """Everything about `[search]` that does not hold together."""
    search = plan.search
    problems = _axis_problems(search)
    if not problems:
        problems += _space_problems(plan, search)
    return problems + _warm_problems(search) + _budget_problems(search) + _pruner_problems(plan, search)


def _axis_problems(search: SearchSection) -> list[str]:
    """Of single axes."""
    ranges = {**search.ranges, **{f"axes.{name}": ends for name, ends in search.axes.items()}}
    problems = [
        f"search.{key} = [{low}, {high}]: the lower end first" for key, (low, high) in ranges.items() if low > high
    ]
    problems += [
        f"search.axes.{name} = [{low}, {high}]: must be below {below:g}"
        for name, (low, high) in search.axes.items()
        if (below := HYPERPARAMETERS[name].below) is not None and high >= below
    ]
    for name, values in search.choices.items():
        if len(set(values)) < len(values):
            problems.append(f"search.choices.{name} = {list(values)}: each value once")
        if (below := HYPERPARAMETERS[name].below) is not None and max(values) >= below:
            problems.append(f"search.choices.{name} = {list(values)}: must be below {below:g}")
        if name in search.axes:
            problems.append(f"search.choices.{name}: search.axes has a range for it: one or the other")
    searched = {*search.ranges, *search.axes, *search.choices}
    problems += [
        f"search.can_be_off: {name} is not searched: give search.axes.{name} a range for where it is on"
        for name in dict.fromkeys(search.can_be_off)
        if name not in searched
    ]
    if len(set(search.can_be_off)) < len(search.can_be_off):
        problems.append(f"search.can_be_off = {list(search.can_be_off)}: each once")
    return problems


def _space_problems(plan: Plan, search: SearchSection) -> list[str]:
    """Of all axes together: what the sampler can do with them, and the trainer."""
    try:
        space = search.space
    except SpecError as error:
        return [f"search: {problem}" for problem in error.problems]
    problems = []
    sampler = SAMPLERS[search.sampler]
    if sampler.ranges_only and (search.can_be_off or search.choices):
        others = " and ".join(name for name, one in SAMPLERS.items() if one.learns and not one.ranges_only)
        problems.append(
            f"search.sampler = {sampler.name!r}: it knows ranges alone, neither search.choices nor search.can_be_off: "
            f"{others} know them"
        )
    if sum(not axis.fixed for axis in space.axes) < sampler.least_axes:
        problems.append(f"search.sampler = {sampler.name!r}: at least {sampler.least_axes} axes must vary")
    problems += _grid_problems(search, space)
    command = plan.command
    varied = [
        HYPERPARAMETERS[axis.name].told_as
        for axis in space.axes
        if axis.can_be_off or (not axis.fixed and (axis.choices or axis.name not in search.ranges))
    ]
    if command is not None:
        problems += [
            f"proxy.command lacks {{{name}}}: the search varies it; name it, or do not search it"
            for name in varied
            if not command.reaches(name)
        ]
    return problems


def _grid_problems(search: SearchSection, space: SearchSpace) -> list[str]:
    if not SAMPLERS[search.sampler].on_grid:
        return ["search.grid: search.sampler = 'grid' is wanted for it"] if search.grid else []
    problems = [f"search.grid.{name}: it is not searched" for name in search.grid if name not in space.names]
    problems += [f"search.grid.{name}: search.choices has its values" for name in search.grid if name in search.choices]
    size = math.prod(len(axis.grid()) for axis in space.axes)
    if search.num_trials > size:
        shown = " x ".join(f"{len(axis.grid())} of {axis.name}" for axis in space.axes if len(axis.grid()) > 1)
        problems.append(
            f"search.num_trials = {search.num_trials}: the grid has {size} points ({shown or 'one value on each axis'})"
        )
    if search.warm_start:
        problems.append("search.warm_start: a grid has its own points: another sampler is wanted")
    return problems


def _pruner_problems(plan: Plan, search: SearchSection) -> list[str]:
    """Where no trial could ever be looked at, or held against another."""
    if not RULES[search.pruner].shares:
        return []
    said, steps = f"search.pruner = {search.pruner!r}", plan.proxy.num_steps
    problems = (
        [f"{said}: a command trains by itself, and cannot be looked at: 'none' is wanted"] if plan.command else []
    )
    if not rungs(search.pruner, steps):
        problems.append(f"{said}: proxy.num_steps = {steps} leaves no step at which to look: 'none', or more steps")
    seen = search.num_startup + search.parallelism - 1
    if search.num_trials <= seen:
        problems.append(
            f"{said}: search.num_trials = {search.num_trials}: no trial could be given up: the first {seen} run whole "
            f"(search.num_startup = {search.num_startup}, and search.parallelism = {search.parallelism} less one): "
            "more trials, or 'none'"
        )
    return problems


def _warm_problems(search: SearchSection) -> list[str]:
    laws = [law.name for law in published("learning_rate")]
    problems = []
    for entry in search.warm_start:
        if entry.startswith(LAW) and entry.removeprefix(LAW) not in laws:
            known = ", ".join(f"{LAW}{name}" for name in laws)
            problems.append(f"search.warm_start: {entry!r} is no published law: {known}")
        if not entry.strip() or "\0" in entry:
            problems.append(f"search.warm_start: {entry!r} is no folder")
    if len(set(search.warm_start)) < len(search.warm_start):
        problems.append(f"search.warm_start = {list(search.warm_start)}: each once")
    most = sum(1 if entry.startswith(LAW) else WARM_TRIALS for entry in search.warm_start)
    if most > search.num_trials:
        problems.append(f"search.warm_start gives up to {most} points, search.num_trials = {search.num_trials}")
    return problems


def _budget_problems(search: SearchSection) -> list[str]:
    problems = []
    if 0 < search.num_replicates < LEAST_REPLICATES:
        problems.append(
            f"search.num_replicates = {search.num_replicates}: 0, or {LEAST_REPLICATES} and more, is wanted: fewer "
            "compare nothing"
        )
    if search.tie_seeds == 1:
        problems.append("search.tie_seeds = 1: must be 0, or at least 2: one seed tells no noise")
    if search.seed + max(search.num_replicates, search.tie_seeds) > MAX_SEED:
        problems.append(f"search.seed = {search.seed}: replicates count up from it, beyond {MAX_SEED}")
    return problems


def resolved(plan: Plan, folder: Path) -> Plan:
    """The plan with its warm starts' folders, which are relative to the plan's own, as they are from anywhere."""
    entries = plan.search.warm_start
    if not entries:
        return plan
    whole = tuple(entry if entry.startswith(LAW) else str((folder / entry).resolve()) for entry in entries)
    return plan.model_copy(update={"search": plan.search.model_copy(update={"warm_start": whole})})
