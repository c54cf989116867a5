"""Checks of keys that depend on each other, which single keys of a plan cannot show. Each problem
names its key, its value, and what it must be.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Sequence
from functools import partial

from forerun._launcher.main_run.estimates import reference_tables
from forerun._launcher.study.plan.axes import UserAxis
from forerun._launcher.study.plan.plan import ClusterSection, Plan
from forerun._launcher.study.plan.proxy_problems import (
    find_optimizer_problems,
    find_proxy_problems,
    list_refusals,
)
from forerun._launcher.study.plan.search import SearchSection
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS, get_hyperparameter
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.programs import PLACEHOLDERS
from forerun._scaling_fits.laws.forms import FORMS
from forerun._sweeps.search.pruning import list_rungs

MIN_RUNGS = 6
"""Minimum number of rungs of a ladder."""
MAX_VALUES = 100
"""Maximum number of values in a list of `[transfer]` or `[ladder]`. With more, `validate` would be
slow: it takes about 0.02 s to count the runs of one width.
"""


def find_plan_problems(plan: Plan) -> list[str]:
    """Return all problems of a plan whose keys are valid one by one."""
    # Count the grids only if their lists are not too long already.
    if problems := [*_find_length_problems(plan)] or [*_find_grid_problems(plan)]:
        return problems  # the other checks would take too long
    problems = [
        *_find_width_problems(plan),
        *find_optimizer_problems(plan),
        *find_proxy_problems(plan),
        *_find_cluster_problems(plan.cluster),
        *_find_gpu_problems(plan.launch.gpu),
        *_find_transfer_problems(plan),
    ]
    if any(problem.startswith("proxy.command: ") for problem in problems):
        return problems  # the other checks need a valid command
    return [
        *problems,
        *_find_search_problems(plan),
        *_find_pruner_problems(plan),
        *_find_ladder_problems(plan),
    ]


def _find_length_problems(plan: Plan) -> Iterator[str]:
    """Yield lists of sizes that are longer than a study could run."""
    for section in ("transfer", "ladder"):
        for key, value in getattr(plan, section):
            if isinstance(value, tuple) and len(value) > MAX_VALUES:
                yield (
                    f"{section}.{key} has {format_counted(len(value), 'value')}: must be at most "
                    f"{MAX_VALUES}"
                )


MAX_GRID_RUNS = 10_000
"""Maximum number of runs of one grid of sizes, values, and seeds. `validate` takes 10 s of CPU time
to count 15,000 runs.
"""


def _find_grid_problems(plan: Plan) -> Iterator[str]:
    """Yield grids of sizes, values, and seeds that are too large to be run, or to be counted in
    seconds.
    """
    transfer, ladder = plan.transfer, plan.ladder
    num_rates = max(len(transfer.offsets_octaves), len(transfer.narrow_offsets_octaves))
    grids = {
        "transfer.num_seeds": {
            "widths": len(transfer.widths),
            "rates": num_rates,
            "seeds": transfer.num_seeds,
        },
        "transfer.control_num_seeds": {
            "widths": len(transfer.control_widths),
            "rates": len(transfer.control_offsets_octaves),
            "seeds": transfer.control_num_seeds,
        },
        "transfer.axis_num_seeds": {
            "sizes": len(transfer.durations) + len(plan.tested_depths) + len(transfer.batches),
            "rates": num_rates,
            "seeds": transfer.axis_num_seeds,
        },
        "transfer.check_num_seeds": {
            "sizes": max(len(transfer.check_widths), len(transfer.check_depths)),
            "seeds": transfer.check_num_seeds,
        },
        "ladder.num_seeds": {
            "shapes": len(plan.ladder_sizes),
            "durations": len(ladder.num_steps),
            "seeds": ladder.num_seeds,
        },
    }
    for key, factors in grids.items():
        num_runs = math.prod(factors.values())
        if num_runs > MAX_GRID_RUNS:
            product = " x ".join(f"{number:,} {name}" for name, number in factors.items())
            yield f"{key}: {product} are {num_runs:,} runs: must be at most {MAX_GRID_RUNS:,}"


def _find_gpu_problems(name: str) -> Iterator[str]:
    """Yield a problem if the main run's accelerator is not in the table of `forerun estimate`."""
    try:
        reference_tables.look_up_gpu(name or "H100")
    except reference_tables.UnknownNameError as error:
        yield f"launch.gpu: {error}"


def _find_width_problems(plan: Plan) -> Iterator[str]:
    """Yield widths that do not give a valid shape."""
    widths = {
        "proxy.base_width": (plan.proxy.base_width,),
        "transfer.widths": plan.transfer.widths,
        "transfer.hyperparameter_widths": plan.transfer.hyperparameter_widths,
        "transfer.control_widths": plan.transfer.control_widths,
        "transfer.check_widths": () if plan.proxy.command else plan.transfer.check_widths,
        "ladder.widths": plan.ladder.widths,
    }
    for name, values in widths.items():
        for width in values:
            yield from list_refusals(name, partial(plan.build_shape, width, vocab_size=2))


def _find_cluster_problems(cluster: ClusterSection) -> Iterator[str]:
    if cluster.address and cluster.backend != "ray":
        yield f'cluster.address = {cluster.address!r} needs cluster.backend = "ray"'
    if cluster.max_usd and not (cluster.usd_per_device_hour or cluster.usd_per_device_hour_by_kind):
        yield (
            f"cluster.max_usd = {cluster.max_usd}: needs cluster.usd_per_device_hour, or "
            "usd_per_device_hour_by_kind"
        )


def _find_transfer_problems(plan: Plan) -> Iterator[str]:
    """Yield axes without the base or without a second size, sizes that no run can have, and values
    without octaves.
    """
    transfer, proxy, multiple = plan.transfer, plan.proxy, plan.model.seq_len * plan.batch_stages
    for name, widths in (
        ("widths", transfer.widths),
        ("hyperparameter_widths", plan.hyperparameter_widths),
    ):
        if proxy.base_width not in widths:
            yield (
                f"transfer.{name} = {list(widths)}: must contain proxy.base_width = "
                f"{proxy.base_width}, whose optimum is transferred"
            )
    axes: dict[str, tuple[str, Sequence[float], float]] = {
        "duration": ("durations", transfer.durations, 1.0),
        "batch": ("batches", transfer.batches, 1.0),
        "depth": ("depths", plan.tested_depths, plan.model.num_layers),
    }
    for key, values, base in axes.values():
        if values and (base not in values or len(values) < 2):
            yield (
                f"transfer.{key} = {list(values)}: must contain {base:g}, the proxies' own, and at "
                "least one more"
            )
    for ratio in transfer.batches:
        batch = ratio * proxy.batch_tokens
        if proxy.batch_tokens % multiple == 0 and batch % multiple:
            yield (
                f"transfer.batches: {ratio:g} times proxy.batch_tokens = {batch:g}: must be a "
                f"multiple of {multiple}"
            )
    for ratio in (*transfer.durations, *(1 / ratio for ratio in transfer.batches)):
        if round(ratio * proxy.num_steps) < max(1, plan.batch_stages - 1):
            yield f"transfer: a run of {ratio * proxy.num_steps:.3g} steps is too short"
    steps = [round(ratio * proxy.num_steps) for ratio in transfer.durations]
    if len(set(steps)) < len(steps):
        yield (
            f"transfer.durations = {list(transfer.durations)}: as steps {steps}, must not repeat "
            "a value"
        )
    if (tokens := plan.target.batch_tokens) % multiple:
        yield f"target.batch_tokens = {tokens}: must be a multiple of {multiple} tokens"
    for name, over in transfer.hyperparameters.items():
        for axis in over:
            key, values, _ = axes.get(axis, ("widths", transfer.widths, 0.0))
            if not values:
                yield f"transfer.hyperparameters.{name}: over {axis}, and transfer.{key} is empty"
        is_searched = name in plan.search.axes or name in plan.search.choices
        if proxy.hyperparameters.get(name) == 0 and not is_searched:
            yield (
                f"transfer.hyperparameters.{name}: is tested by factors of 2, so proxy.{name} "
                "must not be 0"
            )


def _find_search_problems(plan: Plan) -> list[str]:
    """Check single axes. If these are valid, check all axes together, the points of the warm start,
    and whether a user's command gets every searched hyperparameter.
    """
    search = plan.search
    if problems := [*_find_name_problems(plan), *_find_axis_problems(search)]:
        return problems
    if refused := list_refusals("search", lambda: plan.space):
        return refused
    return [*_find_warm_start_problems(plan)] + [
        f"proxy.command lacks {{{get_hyperparameter(name).placeholder_name}}}: the search varies "
        f"{name}; name it, or do not search it"
        for name in dict.fromkeys([*search.axes, *search.choices, *search.can_be_off])
        if plan.command is not None and not plan.is_passed_to_trainer(name)
    ]


def _find_name_problems(plan: Plan) -> Iterator[str]:
    """Yield names of axes that neither the registry nor the user's own code can know, and axes
    whose transfer cannot be tested.
    """
    user_axes = plan.search.user_axes
    for name in user_axes:
        near = difflib.get_close_matches(name, HYPERPARAMETERS, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        taken = next(
            (
                known.name
                for known in HYPERPARAMETERS.values()
                if name in (known.placeholder_name, *known.aliases)
            ),
            "",
        )
        if taken:
            yield f"search.axes.{name}: is another name of {taken}: use that"
        elif name in PLACEHOLDERS:
            yield f"search.axes.{name}: {{{name}}} stands for something else: {PLACEHOLDERS[name]}"
        elif not (plan.proxy.command or plan.proxy.factory):
            known = ", ".join(HYPERPARAMETERS)
            yield (
                f"search.axes.{name}: forerun's own model has no such hyperparameter{meant}: must "
                f"be one of {known}, or one of your own code's (proxy.command, proxy.factory)"
            )
    for name in plan.transfer.hyperparameters:
        if name in user_axes and not user_axes[name].is_testable:
            yield (
                f"transfer.hyperparameters.{name}: is tested in factors of 2, so its range must be "
                "above 0 and its scale not categorical"
            )
        elif name not in user_axes and name not in HYPERPARAMETERS:
            near = difflib.get_close_matches(name, [*HYPERPARAMETERS, *user_axes], n=1)
            meant = f": did you mean {near[0]}?" if near else ": it is not searched"
            yield f"transfer.hyperparameters.{name}: there is no such hyperparameter{meant}"


def _find_axis_problems(search: SearchSection) -> Iterator[str]:
    for name, given in search.axes.items():
        if name in HYPERPARAMETERS and isinstance(given, UserAxis):
            yield (
                f"search.axes.{name}: forerun knows its scale and how it grows: must be [lowest, "
                "highest]"
            )
    for key, lists in (("axes", search.axes), ("choices", search.choices)):
        for name, values in lists.items():
            below = get_hyperparameter(name).below
            if below is not None and isinstance(values, tuple) and max(values) >= below:
                yield f"search.{key}.{name} = {list(values)}: must be below {below:g}"
    for name in search.choices:
        if name in search.axes:
            yield f"search.choices.{name}: search.axes has a range for it too: give one of them"
    for name in search.can_be_off:
        if name not in {*search.ranges, *search.axes, *search.choices}:
            yield (
                f"search.can_be_off: {name} is not searched: add search.axes.{name}, the range of "
                "its values when it is on"
            )


def _find_warm_start_problems(plan: Plan) -> Iterator[str]:
    """Yield points of `search.warm_start` that do not lie in the search space."""
    search, axes = plan.search, {axis.name: axis for axis in plan.space.axes}
    if len(search.warm_start) > search.num_trials:
        number = f"search.warm_start: {format_counted(len(search.warm_start), 'point')}"
        yield f"{number}: must be at most search.num_trials = {search.num_trials}"
    for index, point in enumerate(search.warm_start):
        if point in search.warm_start[:index]:
            yield f"search.warm_start[{index}]: must not repeat a point"
        for name, value in point.items():
            key = f"search.warm_start[{index}].{name} = {value:g}"
            if name not in axes:
                yield f"{key}: it is not searched: must be one of {', '.join(axes)}"
            elif axes[name].nearest(value) != value:
                choices = axes[name].choices
                limits = f"one of {list(choices)}" if choices else f"in {list(axes[name].range)}"
                yield f"{key}: must be {limits}{' or 0' if axes[name].can_be_off else ''}"


def _find_pruner_problems(plan: Plan) -> Iterator[str]:
    """Yield reasons why no trial could ever be pruned."""
    if plan.search.pruner == "none":
        return
    key, steps = f"search.pruner = {plan.search.pruner!r}", plan.proxy.num_steps
    if plan.command:
        yield f"{key}: must be 'none', forerun cannot look into a running command"
    if not list_rungs(steps):
        yield (
            f"{key}: proxy.num_steps = {steps} leaves no step at which to look; use 'none' or "
            "more steps"
        )


def count_law_parameters(plan: Plan) -> int:
    """Return the number of parameters of the ladder's scaling law. For `auto` and `compute`, this
    is the number of the first form in `SHAPES`.
    """
    return next(
        spec.num_free
        for form, spec in FORMS.items()
        if plan.ladder.form in ("auto", "compute", form)
    )


def _find_ladder_problems(plan: Plan) -> Iterator[str]:
    ladder, multiple = plan.ladder, plan.model.seq_len * plan.batch_stages
    num_rungs = len(plan.ladder_sizes) * len(ladder.num_steps)
    size = count_law_parameters(plan)
    min_rungs = max(MIN_RUNGS, size if ladder.num_seeds > 1 else size + 1)
    if len(ladder.widths) < 2 or len(ladder.num_steps) < 2 or num_rungs < min_rungs:
        yield (
            f"ladder: {format_counted(len(ladder.widths), 'width')}, "
            f"{format_counted(len(ladder.num_steps), 'duration')}, "
            f"{format_counted(num_rungs, 'rung')}: the law (ladder.form = {ladder.form!r}) has "
            f"{format_counted(size, 'parameter')}, so there must be at least 2 of each and "
            f"{format_counted(min_rungs, 'rung')}; add to ladder.widths or ladder.num_steps"
        )
    if ladder.depths and ladder.width_per_layer:
        yield (
            f"ladder.width_per_layer = {ladder.width_per_layer:g}: ladder.depths is given too: "
            "give one of them"
        )
    rules = (
        None
        if plan.command or list_refusals("", lambda: plan.parametrization)
        else plan.parametrization
    )
    if plan.scales_depth and rules is not None and rules.depth_alpha is None:
        yield (
            f"ladder: its depth varies, and {rules} has no depth rule to carry the learning rate: "
            "must be completep, completedp or umup, or proxy.rules = { depth_alpha = 1.0 }"
        )
    if plan.scales_depth and plan.command and not plan.command.can_receive("num_layers"):
        yield "proxy.command lacks {num_layers}: the ladder's depth varies"
    if ladder.batch_tokens % multiple:
        tokens = ladder.batch_tokens
        yield f"ladder.batch_tokens = {tokens}: must be a multiple of {multiple} tokens"
