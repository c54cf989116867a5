"""Checks of section `[proxy]`, and of the keys of other sections that must fit it. Each problem
names its key, its value, and what it must be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from forerun._launcher.study.plan.plan import Plan
from forerun._launcher.study.plan.sections import DEFAULT_OPTIMIZER, ProxySection
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS, LEARNING_RATE, SET_BY, Hparams
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.optimizers import RECIPES, has_hyperparameter, list_recipes_with
from forerun._proxies.core.powers import Ratios
from forerun._proxies.core.programs import Factory, find_placeholders, find_template_problems
from forerun._proxies.core.rules import find_decay_problems

_BY_SHAPE = " or ".join(
    f'proxy.optimizer = "{recipe.name}"' for recipe in RECIPES.values() if recipe.rates_by_shape
)


def list_refusals(where: str, make: Callable[[], object]) -> list[str]:
    """Return the problems that `make` raises as a `SpecError`, each after the key `where`."""
    try:
        make()
    except SpecError as error:
        return [f"{where}: {problem}" for problem in error.problems]
    return []


def find_optimizer_problems(plan: Plan) -> Iterator[str]:
    """Yield keys that belong to another optimizer, or that a user's own trainer does not get."""
    proxy, search = plan.proxy, plan.search
    if proxy.command and proxy.optimizer != DEFAULT_OPTIMIZER:
        yield (
            f"proxy.optimizer = {proxy.optimizer!r}: your own trainer (proxy.command) brings its "
            "own optimizer"
        )
    by_shape = RECIPES[proxy.optimizer].rates_by_shape
    for name in ("muon_rate", "muon_width_power"):
        value = proxy.rules.model_dump()[name]
        if not by_shape and value not in (None, "none", 0.0):
            yield f"proxy.rules.{name} = {value!r}: only with {_BY_SHAPE}"
        if by_shape and value == "none":
            yield f"proxy.rules.{name} = 'none': must be a rule with {_BY_SHAPE}"
    places: dict[str, Iterable[str]] = {
        "search.axes": search.axes,
        "search.choices": search.choices,
        "transfer.hyperparameters": plan.transfer.hyperparameters,
        "proxy": [key.name for key in SET_BY["proxy"] if getattr(proxy, key.name) != key.default],
    }
    unknown = [
        (f"{place}.{name}", name)
        for place, names in places.items()
        for name in names
        if name in HYPERPARAMETERS and not has_hyperparameter(proxy.optimizer, name)
    ]
    for key, name in unknown:
        advice = "; a placeholder of your own must have another name" if proxy.command else ""
        recipes = " or ".join(f'"{recipe}"' for recipe in list_recipes_with(name))
        yield f"{key}: only with proxy.optimizer = {recipes}{advice}"


def find_proxy_problems(plan: Plan) -> list[str]:
    """Return the problems of section `[proxy]`, and of other keys that do not fit it."""
    problems = [*_find_refused_records(plan), *_find_user_code_problems(plan)]
    # These checks need valid records.
    problems += [] if problems else _find_decay_problems(plan)
    problems += [] if problems else _find_branch_problems(plan)
    problems += [*_find_batch_problems(plan), *_find_data_problems(plan)]
    problems += [] if problems else _find_unpassed_values(plan)
    if plan.launch.resume_arguments:
        problems += _check_template(plan, "launch.resume_arguments", plan.launch.resume_arguments)
    if plan.model.tied and not problems and plan.parametrization.output == "absorbed":
        problems.append(
            f"model.tied = true under {plan.parametrization}: a tied readout has no init and rate "
            'of its own to absorb the multiplier: proxy.rules = { output = "multiplier" }'
        )
    return problems


def _find_refused_records(plan: Plan) -> Iterator[str]:
    """Yield the problems of the records that are made from `[proxy]`. The hash of a factory's
    source is not known yet, so it is zeros here.
    """
    proxy = plan.proxy
    dimensions = tuple(proxy.dimensions.items())
    makers: dict[str, Callable[[], object]] = {
        "proxy.rules": lambda: plan.parametrization,
        "proxy": lambda: plan.build_numerics("proxy"),
        "proxy.command": lambda: plan.command,
        "proxy.factory": lambda: (
            proxy.factory and Factory(target=proxy.factory, source_sha256="0" * 64)
        ),
        "proxy.dimensions": lambda: Factory(
            target="module:build", source_sha256="0" * 64, dimensions=dimensions
        ),
    }
    for where, make in makers.items():
        yield from list_refusals(where, make)


def _check_template(plan: Plan, key: str, template: str) -> list[str]:
    """Return the problems of a command line with placeholders, which only a user's own trainer
    has.
    """
    problems = find_template_problems(template, tuple(plan.search.user_axes))
    if not plan.proxy.command:
        problems = [*problems, "only for your own trainer (proxy.command)"]
    return [f"{key}: {problem}" for problem in problems]


def _find_user_code_problems(plan: Plan) -> Iterator[str]:
    """Yield problems with the keys of a user's own model or trainer."""
    proxy = plan.proxy
    if proxy.factory and proxy.command:
        yield "proxy.factory and proxy.command: give one of them"
    if proxy.describe:
        yield from _check_template(plan, "proxy.describe", proxy.describe)
        placeholders = find_placeholders(proxy.describe)
        for name in sorted({"run_dir", "run_json"} & placeholders):
            yield (
                f"proxy.describe: {{{name}}}: not allowed, because the command is called before "
                "any run has a folder"
            )
        if "width" not in placeholders:
            yield "proxy.describe lacks {width}"
    for name in ("tensor", "pipeline", "context") if proxy.factory else ():
        if (degree := getattr(plan.launch, name)) != 1:
            yield (
                f"launch.{name} = {degree}: must be 1 with proxy.factory: forerun's trainer, which "
                "trains your own model, is data parallel"
            )
    if proxy.dimensions and not proxy.factory:
        yield "proxy.dimensions: only for your own model (proxy.factory)"


def _find_decay_problems(plan: Plan) -> list[str]:
    """Return a problem if weight decay would shrink a weight to zero or below in one step."""
    point, values = {LEARNING_RATE: plan.search.learning_rate[1]}, plan.proxy.hyperparameters
    if refused := list_refusals("proxy", lambda: Hparams.from_point(point, values)):
        return refused
    recipe, hparams = RECIPES[plan.proxy.optimizer], Hparams.from_point(point, values)
    return [
        f"proxy.{problem}"
        for problem in find_decay_problems(plan.parametrization, recipe, Ratios(), hparams)
    ]


def _find_branch_problems(plan: Plan) -> Iterator[str]:
    """Yield values that depend on the duration, with which runs of several durations cannot share
    a stable phase.
    """
    proxy = plan.proxy
    if proxy.schedule != "wsd" and proxy.decay_shape != "linear":
        yield f'proxy.decay_shape = {proxy.decay_shape!r}: only with proxy.schedule = "wsd"'
    elif proxy.decay_branches:
        with_branches = "proxy.decay_branches = true with"
        if proxy.schedule != "wsd":
            yield f'{with_branches} proxy.schedule = {proxy.schedule!r}: must be "wsd"'
        if proxy.command:
            yield (
                f"{with_branches} proxy.command: your trainer's state cannot be branched from; "
                "leave decay_branches out"
            )
        if proxy.batch_warmup_fraction:
            yield (
                f"{with_branches} proxy.batch_warmup_fraction = {proxy.batch_warmup_fraction}: "
                "must be 0"
            )
        if plan.parametrization.needs_tokens:
            yield (
                f"{with_branches} {plan.parametrization} scales with batch or duration: choose "
                "proxy.rules without that"
            )
        axes = plan.search.user_axes.items()
        if names := [name for name, axis in axes if axis.powers.batch or axis.powers.duration]:
            yield (
                f"{with_branches} search.axes: {', '.join(names)} must not follow batch or duration"
            )


def _find_unpassed_values(plan: Plan) -> Iterator[str]:
    """Yield values that the plan sets but a user's own trainer does not get."""
    command, proxy, defaults = plan.command, plan.proxy, ProxySection()
    if command is None:
        return
    changed = {
        name: value for name, value in proxy if value not in (getattr(defaults, name), "auto")
    }
    placeholders = {
        **{name: name for name in (*defaults.hyperparameters, "schedule", "decay_shape")},
        "final_fraction": "final_fraction",
        "batch_warmup_fraction": "batch_warmup_steps",
    }
    for name, placeholder in placeholders.items():
        if name in changed and not command.can_receive(placeholder):
            yield (
                f"proxy.command lacks {{{placeholder}}}: the trainer does not get proxy.{name} = "
                f"{changed[name]!r}"
            )
    in_run_json = {"rules", "dtype", "compiled", "matmul_precision"}
    in_run_json |= {"microbatch_tokens", "activation_checkpointing"}
    for name in changed if not command.can_receive("run_json") else ():
        if name in in_run_json:
            yield (
                f"proxy.{name} is set, and only {{run_json}} passes it to a trainer: name that, or "
                f"leave proxy.{name} out"
            )
    if "{data}" in proxy.command and not plan.data.path:
        yield "proxy.command names {data}, and data.path is empty: there is no corpus folder"


def _find_batch_problems(plan: Plan) -> Iterator[str]:
    """Yield batches that are not whole sequences, or do not split evenly."""
    proxy, seq_len, stages = plan.proxy, plan.model.seq_len, plan.batch_stages
    smallest, multiple = proxy.batch_tokens // stages, stages * seq_len
    micro = proxy.microbatch_tokens or smallest
    ranks = plan.launch.data_parallel_shard * plan.launch.data_parallel_replicate
    if proxy.command or proxy.factory:
        ranks = 1  # a user's own code divides its batches
    if proxy.batch_tokens % multiple:
        times = f" times proxy.batch_warmup_stages = {stages}" if stages > 1 else ""
        yield (
            f"proxy.batch_tokens = {proxy.batch_tokens}: must be a multiple of model.seq_len = "
            f"{seq_len}{times}"
        )
    elif micro % seq_len or smallest % micro:
        yield (
            f"proxy.microbatch_tokens = {micro}: must be whole sequences of {seq_len} tokens and "
            f"divide {smallest}, the smallest batch"
        )
    else:
        target = plan.target_batch_tokens
        num_target = 0 if target % multiple else target // multiple
        batches = {"launch": smallest // seq_len, "target.batch_tokens": num_target}
        for key, num_sequences in batches.items():
            if num_sequences % ranks:
                yield (
                    f"{key}: {ranks} ranks do not divide the "
                    f"{format_counted(num_sequences, 'sequence')} of a batch"
                )
                break
    shortest = min(proxy.num_steps, *plan.ladder.num_steps)
    if stages - 1 > shortest:
        yield (
            f"proxy.batch_warmup_stages = {stages}: must be at most {shortest + 1}, the shortest "
            "run's steps + 1"
        )


def _find_data_problems(plan: Plan) -> Iterator[str]:
    """Yield problems with the names of a corpus or of the trainer's own data."""
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
