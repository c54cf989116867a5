"""Checks of keys that depend on each other, which single keys of a plan cannot show. Each problem
names its key, its value, and what it must be.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from launcher.base import reference
from launcher.plan.axes import OwnAxis
from launcher.plan.plan import ClusterSection, Plan
from launcher.plan.search import SearchSection
from launcher.plan.sections import DEFAULT_OPTIMIZER, ProxySection
from proxies.core.checks import SpecError
from proxies.core.hyperparameters import (
    HYPERPARAMETERS,
    LEARNING_RATE,
    SET_BY,
    Hparams,
    hyperparameter_named,
)
from proxies.core.notation import counted
from proxies.core.optimizers import RECIPES, has_hyperparameter, list_recipes_with
from proxies.core.powers import Ratios
from proxies.core.programs import PLACEHOLDERS, Factory, placeholders_in, template_problems
from proxies.core.rules import decay_problems
from scaling_fits.laws.forms import SHAPES
from sweeps.search.pruning import rungs

MIN_RUNGS = 6
MAX_VALUES = 100
"""Maximum number of values in a list of `[transfer]` or `[ladder]`; counting the runs of one of its
widths takes about 0.02 s.
"""
_SIZES = {"duration": "durations", "batch": "batches", "depth": "depths"}
"""Key of `[transfer]` that holds the sizes of an axis."""
_BY_SHAPE = " or ".join(
    f'proxy.optimizer = "{recipe.name}"' for recipe in RECIPES.values() if recipe.rates_by_shape
)


def problems_of(plan: Plan) -> list[str]:
    """Return all problems of a plan whose keys are valid one by one."""
    if problems := [*_length_problems(plan)] or [*_grid_problems(plan)]:
        return problems  # the other checks would take too long
    problems = [
        *_width_problems(plan),
        *_optimizer_problems(plan),
        *_proxy_problems(plan),
        *_cluster_problems(plan.cluster),
        *_gpu_problems(plan.launch.gpu),
        *_transfer_problems(plan),
    ]
    if any(problem.startswith("proxy.command: ") for problem in problems):
        return problems  # the other checks need a valid command
    return [*problems, *_search_problems(plan), *_pruner_problems(plan), *_ladder_problems(plan)]


def _length_problems(plan: Plan) -> Iterator[str]:
    """Yield lists of sizes that are longer than a study could run."""
    for section in ("transfer", "ladder"):
        for key, value in getattr(plan, section):
            if isinstance(value, tuple) and len(value) > MAX_VALUES:
                yield (
                    f"{section}.{key} has {counted(len(value), 'value')}: must be at most "
                    f"{MAX_VALUES}"
                )


MAX_GRID_RUNS = 10_000
"""Maximum number of runs of one grid of sizes, values, and seeds. Counting 15,000 of them takes
`validate` 10 s of CPU time.
"""


def _grid_problems(plan: Plan) -> Iterator[str]:
    """Yield grids of sizes, values, and seeds that are too large to be run, or to be counted in
    seconds.
    """
    transfer, ladder = plan.transfer, plan.ladder
    num_rates = max(len(transfer.offsets_octaves), len(transfer.narrow_offsets_octaves))
    num_depths = len(ladder.depths) or 1
    grids: dict[str, tuple[tuple[int, str], ...]] = {
        "transfer.num_seeds": (
            (len(transfer.widths), "widths"),
            (num_rates, "rates"),
            (transfer.num_seeds, "seeds"),
        ),
        "transfer.control_num_seeds": (
            (len(transfer.control_widths), "widths"),
            (len(transfer.control_offsets_octaves), "rates"),
            (transfer.control_num_seeds, "seeds"),
        ),
        "transfer.axis_num_seeds": (
            (len(transfer.durations) + len(plan.tested_depths) + len(transfer.batches), "sizes"),
            (num_rates, "rates"),
            (transfer.axis_num_seeds, "seeds"),
        ),
        "transfer.check_num_seeds": (
            (max(len(transfer.check_widths), len(transfer.check_depths)), "sizes"),
            (transfer.check_num_seeds, "seeds"),
        ),
        "ladder.num_seeds": (
            (len(ladder.widths) * num_depths, "shapes"),
            (len(ladder.num_steps), "durations"),
            (ladder.num_seeds, "seeds"),
        ),
    }
    for key, factors in grids.items():
        num_runs = math.prod(number for number, _ in factors)
        if num_runs > MAX_GRID_RUNS:
            product = " x ".join(f"{number:,} {name}" for number, name in factors)
            yield f"{key}: {product} are {num_runs:,} runs: must be at most {MAX_GRID_RUNS:,}"


def _gpu_problems(name: str) -> Iterator[str]:
    """Yield a problem if an estimate does not know the main run's accelerator."""
    try:
        reference.gpu(name or "H100")
    except reference.UnknownNameError as error:
        yield f"launch.gpu: {error}"


def _width_problems(plan: Plan) -> Iterator[str]:
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
            yield from _refusals(name, partial(plan.shape, width, vocab_size=2))


def _refusals(where: str, make: Callable[[], object]) -> list[str]:
    """Return the problems for which a record refuses its values, with the key that it is made
    from.
    """
    try:
        make()
    except SpecError as error:
        return [f"{where}: {problem}" for problem in error.problems]
    return []


def _optimizer_problems(plan: Plan) -> Iterator[str]:
    """Yield keys that belong to another optimizer, or that a user's own trainer does not get."""
    proxy, search = plan.proxy, plan.search
    if proxy.command and proxy.optimizer != DEFAULT_OPTIMIZER:
        yield (
            f"proxy.optimizer = {proxy.optimizer!r}: your own trainer (proxy.command) brings its "
            "own optimizer"
        )
    chosen, by_shape = proxy.rules.model_dump(), RECIPES[proxy.optimizer].rates_by_shape
    for name in ("muon_rate", "muon_width_power"):
        if not by_shape and chosen[name] not in (None, "none", 0.0):
            yield f"proxy.rules.{name} = {chosen[name]!r}: only with {_BY_SHAPE}"
    if by_shape and chosen["muon_rate"] == "none":
        yield f"proxy.rules.muon_rate = 'none': must be a rule with {_BY_SHAPE}"
    places: dict[str, Iterable[str]] = {
        "search.axes": search.axes,
        "search.choices": search.choices,
        "transfer.hyperparameters": plan.transfer.hyperparameters,
    }
    named = [
        (f"{place}.{name}", name)
        for place, names in places.items()
        for name in names
        if name in HYPERPARAMETERS
    ]
    named += [
        (f"proxy.{one.name}", one.name)
        for one in SET_BY["proxy"]
        if getattr(proxy, one.name) != one.default
    ]
    for key, name in named:
        if not has_hyperparameter(proxy.optimizer, name):
            other = "; a placeholder of your own must have another name" if proxy.command else ""
            others = " or ".join(f'"{recipe}"' for recipe in list_recipes_with(name))
            yield f"{key}: only with proxy.optimizer = {others}{other}"


def _proxy_problems(plan: Plan) -> list[str]:
    """Check `[proxy]`, and what it asks of `[model]`, `[data]` and `[launch]`."""
    proxy = plan.proxy
    made: dict[str, Callable[[], object]] = {
        "proxy.rules": lambda: plan.parametrization,
        "proxy": lambda: plan.numerics("proxy"),
        "proxy.command": lambda: plan.command,
        "proxy.factory": lambda: (
            proxy.factory and Factory(target=proxy.factory, source_sha256="0" * 64)
        ),
        "proxy.dimensions": lambda: Factory(
            target="module:build",
            source_sha256="0" * 64,
            dimensions=tuple(proxy.dimensions.items()),
        ),
    }
    problems = [problem for where, make in made.items() for problem in _refusals(where, make)]
    if proxy.factory and proxy.command:
        problems.append("proxy.factory and proxy.command: give one of them")
    if proxy.describe:
        problems += [
            f"proxy.describe: {said}"
            for said in template_problems(proxy.describe, tuple(plan.search.own))
        ]
        problems += [
            f"proxy.describe: {{{name}}}: it is asked before any run, and has no folder of one"
            for name in sorted({"run_dir", "run_json"} & placeholders_in(proxy.describe))
        ]
        problems += (
            [] if proxy.command else ["proxy.describe: only for your own trainer (proxy.command)"]
        )
        problems += (
            [] if "width" in placeholders_in(proxy.describe) else ["proxy.describe lacks {width}"]
        )
    if proxy.factory:
        problems += [
            f"launch.{name} = {degree}: must be 1 with proxy.factory: forerun's trainer, which "
            "trains your own model, "
            "is data parallel"
            for name in ("tensor", "pipeline", "context")
            if (degree := getattr(plan.launch, name)) != 1
        ]
    if proxy.dimensions and not proxy.factory:
        problems.append("proxy.dimensions: only for your own model (proxy.factory)")
    problems += [] if problems else _decay_problems(plan)
    problems += [] if problems else _branch_problems(plan)
    problems += [*_batch_problems(plan), *_data_problems(plan)]
    problems += [] if problems else _told_problems(plan)
    if plan.launch.resume_arguments:
        known = tuple(plan.search.own)
        problems += [
            f"launch.resume_arguments: {said}"
            for said in template_problems(plan.launch.resume_arguments, known)
        ]
        problems += (
            []
            if proxy.command
            else ["launch.resume_arguments: only for your own trainer (proxy.command)"]
        )
    if plan.model.tied and not problems and plan.parametrization.output == "absorbed":
        problems.append(
            f"model.tied = true under {plan.parametrization}: a tied readout has no init and rate "
            "of its own to absorb "
            'the multiplier: proxy.rules = { output = "multiplier" }'
        )
    return problems


def _decay_problems(plan: Plan) -> list[str]:
    """Return a problem if weight decay would shrink a weight to zero or below in one step."""
    point = {LEARNING_RATE: plan.search.learning_rate[1]}
    if refused := _refusals("proxy", lambda: Hparams.at(point, plan.proxy.hyperparameters)):
        return refused
    hparams = Hparams.at(point, plan.proxy.hyperparameters)
    return [
        f"proxy.{problem}"
        for problem in decay_problems(
            plan.parametrization, RECIPES[plan.proxy.optimizer], Ratios(), hparams
        )
    ]


def _branch_problems(plan: Plan) -> list[str]:
    """Return values that depend on the duration, with which runs of several durations cannot share
    a stable phase.
    """
    proxy = plan.proxy
    if proxy.schedule != "wsd" and proxy.decay_shape != "linear":
        return [f'proxy.decay_shape = {proxy.decay_shape!r}: only with proxy.schedule = "wsd"']
    if not proxy.decay_branches:
        return []
    own = [
        name for name, axis in plan.search.own.items() if axis.powers.batch or axis.powers.duration
    ]
    cases = {
        f'proxy.schedule = {proxy.schedule!r}: must be "wsd"': proxy.schedule != "wsd",
        "proxy.command: your trainer's state cannot be branched from; leave decay_branches out": bool(  # noqa: E501
            proxy.command
        ),
        f"proxy.batch_warmup_fraction = {proxy.batch_warmup_fraction}: must be 0": proxy.batch_warmup_fraction  # noqa: E501
        != 0,
        f"{plan.parametrization} scales with batch or duration: choose proxy.rules without that": plan.parametrization.needs_tokens,  # noqa: E501
        f"search.axes: {', '.join(own)} must not follow batch or duration": bool(own),
    }
    return [f"proxy.decay_branches = true with {case}" for case, holds in cases.items() if holds]


def _told_problems(plan: Plan) -> Iterator[str]:
    """Yield values that a study varies or sets but its own trainer does not get."""
    command = plan.command
    if command is None:
        return
    plain = ProxySection()
    told = [
        (name, f"the trainer does not get proxy.{name} = {getattr(plan.proxy, name)!r}")
        for name in (*plain.hyperparameters, "schedule", "decay_shape", "final_fraction")
        if getattr(plan.proxy, name) != getattr(plain, name)
    ]
    if plan.proxy.batch_warmup_fraction:
        sentence = (
            "the trainer does not get proxy.batch_warmup_fraction = "
            f"{plan.proxy.batch_warmup_fraction}"
        )
        told.append(("batch_warmup_steps", sentence))
    yield from (
        f"proxy.command lacks {{{name}}}: {sentence}"
        for name, sentence in told
        if not command.reaches(name)
    )
    for name in (
        "rules",
        "dtype",
        "compiled",
        "matmul_precision",
        "microbatch_tokens",
        "activation_checkpointing",
    ):
        if getattr(plan.proxy, name) not in (getattr(plain, name), "auto") and not command.reaches(
            "run_json"
        ):
            key = f"proxy.{name}"
            yield (
                f"{key} is set, and only {{run_json}} passes it to a trainer: name that, or "
                f"leave {key} out"
            )
    if "{data}" in plan.proxy.command and not plan.data.path:
        yield "proxy.command names {data}, and data.path is empty: there is no corpus folder"


def _batch_problems(plan: Plan) -> Iterator[str]:
    """Yield batches that are not whole sequences, or do not split evenly."""
    proxy, seq_len, stages = plan.proxy, plan.model.seq_len, plan.batch_stages
    smallest, whole = proxy.batch_tokens // stages, stages * seq_len
    micro = proxy.microbatch_tokens or smallest
    ranks = plan.launch.data_parallel_shard * plan.launch.data_parallel_replicate
    ours = not (proxy.command or proxy.factory)
    target, rest = divmod(plan.target_batch_tokens, whole)
    if proxy.batch_tokens % whole:
        times = f" times proxy.batch_warmup_stages = {stages}" if stages > 1 else ""
        yield (
            f"proxy.batch_tokens = {proxy.batch_tokens}: must be a multiple of model.seq_len = "
            f"{seq_len}{times}"
        )
    elif micro % seq_len or smallest % micro:
        yield (
            f"proxy.microbatch_tokens = {micro}: must be whole sequences of {seq_len} tokens and "
            "divide "
            f"{smallest}, the smallest batch"
        )
    elif ours and smallest // seq_len % ranks:
        yield (
            f"launch: {ranks} ranks do not divide the {counted(smallest // seq_len, 'sequence')} "
            "of a batch"
        )
    elif ours and not rest and target % ranks:
        yield (
            f"target.batch_tokens: {ranks} ranks do not divide the {counted(target, 'sequence')} "
            "of a batch"
        )
    shortest = min(proxy.num_steps, *plan.ladder.num_steps)
    if stages - 1 > shortest:
        yield (
            f"proxy.batch_warmup_stages = {stages}: must be at most {shortest + 1}, the shortest "
            "run's steps + 1"
        )


def _data_problems(plan: Plan) -> Iterator[str]:
    data = plan.data
    if data.path:
        for name, value in (("data.external", data.external), ("data.vocab_size", data.vocab_size)):
            if value:
                yield f'{name} = {value!r}: only for data without a corpus (data.path = "")'
    elif not plan.proxy.command:
        yield 'data.path = "": must be a corpus folder (only proxy.command may bring its own data)'
    else:
        if not data.external:
            yield 'data.external = "": must be a name for the data of your own trainer'
        if data.vocab_size < 2:
            yield f"data.vocab_size = {data.vocab_size}: must be at least 2"
        if data.weights:
            yield "data.weights: must be empty, only a corpus has sources"


def _cluster_problems(cluster: ClusterSection) -> Iterator[str]:
    if cluster.address and cluster.backend != "ray":
        yield f'cluster.address = {cluster.address!r} needs cluster.backend = "ray"'
    if cluster.max_usd and not (cluster.usd_per_device_hour or cluster.usd_per_device_hour_by_kind):
        yield (
            f"cluster.max_usd = {cluster.max_usd}: needs cluster.usd_per_device_hour, or "
            "usd_per_device_hour_by_kind"
        )


def _transfer_problems(plan: Plan) -> Iterator[str]:
    """Yield axes without the base or without a second size, sizes that no run can have, and values
    without octaves.
    """
    transfer, proxy = plan.transfer, plan.proxy
    for name, widths in (
        ("widths", transfer.widths),
        ("hyperparameter_widths", plan.hyperparameter_widths),
    ):
        if proxy.base_width not in widths:
            yield (
                f"transfer.{name} = {list(widths)}: must contain proxy.base_width = "
                f"{proxy.base_width}, whose optimum "
                "is transferred"
            )
    axes: dict[str, tuple[Sequence[float], float]] = {
        "duration": (transfer.durations, 1.0),
        "batch": (transfer.batches, 1.0),
        "depth": (plan.tested_depths, plan.model.num_layers),
    }
    for axis, (values, base) in axes.items():
        if values and (base not in values or len(values) < 2):
            held = f"must contain {base:g}, the proxies' own, and at least one more"
            yield f"transfer.{_SIZES[axis]} = {list(values)}: {held}"
    whole = plan.model.seq_len * plan.batch_stages
    for ratio in transfer.batches:
        batch = ratio * proxy.batch_tokens
        if proxy.batch_tokens % whole == 0 and batch % whole:
            yield (
                f"transfer.batches: {ratio:g} times proxy.batch_tokens = {batch:g}: must be a "
                f"multiple of {whole}"
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
    if plan.target.batch_tokens % whole:
        yield (
            f"target.batch_tokens = {plan.target.batch_tokens}: must be a multiple of {whole} "
            "tokens"
        )
    for name, over in transfer.hyperparameters.items():
        for axis in over:
            if axis in axes and not axes[axis][0]:
                yield (
                    f"transfer.hyperparameters.{name}: over {axis}, and transfer.{_SIZES[axis]} "
                    "is empty"
                )
        if proxy.hyperparameters.get(name) == 0 and name not in {
            *plan.search.axes,
            *plan.search.choices,
        }:
            yield (
                f"transfer.hyperparameters.{name}: is tested by factors of 2, so proxy.{name} "
                "must not be 0"
            )


def _search_problems(plan: Plan) -> list[str]:
    """Check single axes; if these are valid, all axes together, and whether the trainer gets
    them.
    """
    search = plan.search
    if problems := [*_own_problems(plan), *_axis_problems(search)]:
        return problems
    if refused := _refusals("search", lambda: plan.space):
        return refused
    return [*_warm_start_problems(plan)] + [
        f"proxy.command lacks {{{hyperparameter_named(name).told_as}}}: the search varies {name}; "
        "name it, or do not "
        "search it"
        for name in dict.fromkeys([*search.axes, *search.choices, *search.can_be_off])
        if plan.command is not None and not plan.reaches(name)
    ]


def _own_problems(plan: Plan) -> Iterator[str]:
    """Yield names that the registry does not know, unless the user's own code can."""
    own = plan.search.own
    for name in own:
        near = difflib.get_close_matches(name, HYPERPARAMETERS, n=1)
        meant = f" (did you mean {near[0]}?)" if near else ""
        taken = next(
            (one.name for one in HYPERPARAMETERS.values() if name in (one.told_as, *one.aliases)),
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
                f"be one of {known}, "
                "or one of your own code's (proxy.command, proxy.factory)"
            )
    for name in plan.transfer.hyperparameters:
        if name in own and not own[name].tested:
            yield (
                f"transfer.hyperparameters.{name}: is tested in factors of 2, so its range must be "
                "above 0 and its "
                "scale not categorical"
            )
        elif name not in own and name not in HYPERPARAMETERS:
            near = difflib.get_close_matches(name, [*HYPERPARAMETERS, *own], n=1)
            meant = f": did you mean {near[0]}?" if near else ": it is not searched"
            yield f"transfer.hyperparameters.{name}: there is no such hyperparameter{meant}"


def _axis_problems(search: SearchSection) -> Iterator[str]:
    for name, given in search.axes.items():
        if name in HYPERPARAMETERS and isinstance(given, OwnAxis):
            yield (
                f"search.axes.{name}: forerun knows its scale and how it grows: must be [lowest, "
                "highest]"
            )
    for key, lists in (("axes", search.axes), ("choices", search.choices)):
        for name, values in lists.items():
            below = hyperparameter_named(name).below
            if below is not None and isinstance(values, tuple) and max(values) >= below:
                yield f"search.{key}.{name} = {list(values)}: must be below {below:g}"
    for name in search.choices:
        if name in search.axes:
            yield f"search.choices.{name}: search.axes has a range for it too: give one of them"
    for name in search.can_be_off:
        if name not in {*search.ranges, *search.axes, *search.choices}:
            yield (
                f"search.can_be_off: {name} is not searched: give search.axes.{name} a range for "
                "where it is on"
            )


def _warm_start_problems(plan: Plan) -> Iterator[str]:
    """Yield points that do not belong to this search."""
    search, axes = plan.search, {axis.name: axis for axis in plan.space.axes}
    if len(search.warm_start) > search.num_trials:
        number = f"search.warm_start: {counted(len(search.warm_start), 'point')}"
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
                yield f"{key}: must be {limits}{' or 0' * axes[name].can_be_off}"


def _pruner_problems(plan: Plan) -> Iterator[str]:
    """Yield reasons why no trial could ever be pruned."""
    if plan.search.pruner == "none":
        return
    key, steps = f"search.pruner = {plan.search.pruner!r}", plan.proxy.num_steps
    if plan.command:
        yield f"{key}: must be 'none', forerun cannot look into a running command"
    if not rungs(steps):
        yield (
            f"{key}: proxy.num_steps = {steps} leaves no step at which to look; use 'none' or "
            "more steps"
        )


def num_law_parameters(plan: Plan) -> int:
    """Return the number of parameters of the law that must be fitted; for `auto` and `compute`,
    those of the first form.
    """
    return next(
        shape.dim for form, shape in SHAPES.items() if plan.ladder.form in ("auto", "compute", form)
    )


def _ladder_problems(plan: Plan) -> Iterator[str]:
    ladder, whole = plan.ladder, plan.model.seq_len * plan.batch_stages
    num_rungs = sum(len(plan.ladder_depths(width)) for width in ladder.widths) * len(
        ladder.num_steps
    )
    size = num_law_parameters(plan)
    min_rungs = max(MIN_RUNGS, size if ladder.num_seeds > 1 else size + 1)
    if len(ladder.widths) < 2 or len(ladder.num_steps) < 2 or num_rungs < min_rungs:
        yield (
            f"ladder: {counted(len(ladder.widths), 'width')}, "
            f"{counted(len(ladder.num_steps), 'duration')}, "
            f"{counted(num_rungs, 'rung')}: the law (ladder.form = {ladder.form!r}) has "
            f"{counted(size, 'parameter')}, so there must be at least 2 of each and "
            f"{counted(min_rungs, 'rung')}; "
            "add to ladder.widths or ladder.num_steps"
        )
    if ladder.depths and ladder.width_per_layer:
        yield (
            f"ladder.width_per_layer = {ladder.width_per_layer:g}: ladder.depths is given too: "
            "give one of them"
        )
    rules = (
        None
        if plan.command or _refusals("", lambda: plan.parametrization)
        else plan.parametrization
    )
    if plan.scales_depth and rules is not None and rules.depth_alpha is None:
        yield (
            f"ladder: its depth varies, and {rules} has no depth rule to carry the learning rate: "
            "must be completep, "
            "completedp or umup, or proxy.rules = { depth_alpha = 1.0 }"
        )
    if plan.scales_depth and plan.command and not plan.command.reaches("num_layers"):
        yield "proxy.command lacks {num_layers}: the ladder's depth varies"
    if ladder.batch_tokens % whole:
        yield f"ladder.batch_tokens = {ladder.batch_tokens}: must be a multiple of {whole} tokens"
