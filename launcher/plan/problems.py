"""What single keys of a plan cannot show: keys that do not go together. Each problem names its key, its value and what
is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from launcher.plan.plan import Plan
from launcher.plan.search import SearchSection
from launcher.plan.sections import ProxySection
from proxies.core.checks import SpecError
from proxies.core.hyperparameters import HYPERPARAMETERS, LEARNING_RATE, Hparams
from proxies.core.powers import Ratios
from proxies.core.programs import Factory
from proxies.core.rules import decay_problems
from sweeps.search.pruning import rungs

MIN_RUNGS = 6


def problems_of(plan: Plan) -> list[str]:
    """Everything that does not hold together, at once."""
    problems = _width_problems(plan) + _proxy_problems(plan) + _cluster_problems(plan)
    problems += _transfer_problems(plan)
    if any(problem.startswith("proxy.command: ") for problem in problems):
        return problems  # the others ask what the command can be told
    return problems + _search_problems(plan) + _ladder_problems(plan)


def _width_problems(plan: Plan) -> list[str]:
    """Every width gives a whole shape."""
    problems: list[str] = []
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
            problems += [f"{name}: {problem}" for problem in _refusals(partial(plan.shape, width, vocab_size=2))]
    return problems


def _proxy_problems(plan: Plan) -> list[str]:
    """Check `[proxy]`, and what it asks of `[model]`, `[data]` and `[launch]`."""
    proxy = plan.proxy
    made: dict[str, Callable[[], object]] = {
        "proxy.rules": lambda: plan.parametrization,
        "proxy": lambda: plan.numerics("proxy"),
        "proxy.command": lambda: plan.command,
        "proxy.factory": lambda: proxy.factory and Factory(target=proxy.factory, source_sha256="0" * 64),
    }
    problems = [f"{where}: {problem}" for where, make in made.items() for problem in _refusals(make)]
    if proxy.factory and proxy.command:
        problems.append("proxy.factory and proxy.command: one or the other")
    problems += [] if problems else _decay_problems(plan)
    problems += _batch_problems(plan) + _data_problems(plan)
    problems += [] if problems else _told_problems(plan)
    if plan.model.tied and not problems and plan.parametrization.output == "absorbed":
        problems.append(
            f"model.tied = true under {plan.parametrization}: a tied readout has no init and rate of its own to absorb "
            'the multiplier: proxy.rules = { output = "multiplier" }'
        )
    return problems


def _refusals(make: Callable[[], object]) -> list[str]:
    try:
        make()
    except SpecError as error:
        return list(error.problems)
    return []


def _decay_problems(plan: Plan) -> list[str]:
    """A step must leave something of a weight."""
    try:
        hparams = Hparams.at({LEARNING_RATE: plan.search.learning_rate[1]}, plan.proxy.hyperparameters)
    except SpecError as error:
        return [f"proxy: {problem}" for problem in error.problems]
    return [f"proxy.{problem}" for problem in decay_problems(plan.parametrization, Ratios(), hparams)]


def _told_problems(plan: Plan) -> list[str]:
    """What a study varies or sets, its own trainer must be told."""
    command = plan.command
    if command is None:
        return []
    told = [
        (HYPERPARAMETERS[name].told_as, f"search.{name} varies it; name it, or set both ends alike")
        for name, (low, high) in plan.search.ranges.items()
        if low != high
    ]
    plain = ProxySection()
    told += [
        (name, f"the trainer is not told proxy.{name} = {getattr(plan.proxy, name)!r}")
        for name in (*plain.hyperparameters, "schedule", "final_fraction")
        if getattr(plan.proxy, name) != getattr(plain, name)
    ]
    if plan.proxy.batch_warmup_fraction:
        said = f"the trainer is not told proxy.batch_warmup_fraction = {plan.proxy.batch_warmup_fraction}"
        told.append(("batch_warmup_steps", said))
    problems = [f"proxy.command lacks {{{name}}}: {said}" for name, said in told if not command.reaches(name)]
    changed = [
        f"proxy.{name}"
        for name in ("rules", "dtype", "compiled", "matmul_precision", "microbatch_tokens", "activation_checkpointing")
        if getattr(plan.proxy, name) not in (getattr(plain, name), "auto")
    ]
    problems += [
        f"{name} is set, and only {{run_json}} tells a trainer of it: name that, or leave {name} alone"
        for name in changed
        if not command.reaches("run_json")
    ]
    if "{data}" in plan.proxy.command and not plan.data.path:
        problems.append("proxy.command names {data}, and data.path is empty: there is no corpus folder")
    return problems


def _batch_problems(plan: Plan) -> list[str]:
    """Batches are whole sequences, and split evenly."""
    proxy, seq_len, stages = plan.proxy, plan.model.seq_len, plan.batch_stages
    smallest = proxy.batch_tokens // stages
    problems = []
    if proxy.batch_tokens % (stages * seq_len):
        said = f" times proxy.batch_warmup_stages = {stages}" if stages > 1 else ""
        problems.append(f"proxy.batch_tokens = {proxy.batch_tokens}: no multiple of model.seq_len = {seq_len}{said}")
    micro = proxy.microbatch_tokens or smallest
    if not problems and (micro % seq_len or smallest % micro):
        problems.append(
            f"proxy.microbatch_tokens = {micro}: whole sequences of {seq_len} tokens that divide {smallest}, the "
            "smallest batch, are wanted"
        )
    ranks = plan.launch.data_parallel_shard * plan.launch.data_parallel_replicate
    ours = not (proxy.command or proxy.factory)
    if ours and not problems and smallest // seq_len % ranks:
        problems.append(f"launch: {ranks} ranks do not divide the {smallest // seq_len} sequences of a batch")
    target = plan.target_batch_tokens // stages // seq_len
    whole = plan.target_batch_tokens % (stages * seq_len) == 0
    if ours and not problems and whole and target % ranks:
        problems.append(f"target.batch_tokens: {ranks} ranks do not divide the {target} sequences of a batch")
    shortest = min(proxy.num_steps, *plan.ladder.num_steps)
    if stages - 1 > shortest:
        problems.append(f"proxy.batch_warmup_stages = {stages}: more than the {shortest} steps of the shortest run")
    return problems


def _data_problems(plan: Plan) -> list[str]:
    data = plan.data
    if data.path:
        known = {"data.external": data.external, "data.vocab_size": data.vocab_size}
        return [
            f'{name} = {value!r}: for data without a corpus (data.path = "")' for name, value in known.items() if value
        ]
    if not plan.proxy.command:
        return ['data.path = "": a corpus folder is wanted (only proxy.command may bring its own data)']
    problems = [] if data.external else ['data.external = "": a name for the data of your own trainer is wanted']
    problems += [] if data.vocab_size >= 2 else [f"data.vocab_size = {data.vocab_size}: 2 or more is wanted"]
    return problems + (["data.weights: only a corpus has sources"] if data.weights else [])


def _cluster_problems(plan: Plan) -> list[str]:
    cluster = plan.cluster
    problems = []
    if cluster.address and cluster.backend != "ray":
        problems.append(f'cluster.address = {cluster.address!r} wants cluster.backend = "ray"')
    if cluster.max_usd and not cluster.usd_per_device_hour:
        problems.append(f"cluster.max_usd = {cluster.max_usd}: cluster.usd_per_device_hour is wanted with it")
    return problems


def _transfer_problems(plan: Plan) -> list[str]:
    """Every axis has the base and something else on it, in runs that can be made; every value has octaves."""
    transfer, proxy = plan.transfer, plan.proxy
    problems = [
        f"transfer.{name} = {list(widths)}: must hold proxy.base_width = {proxy.base_width}, whose optimum is the one "
        "transferred"
        for name, widths in (("widths", transfer.widths), ("hyperparameter_widths", plan.hyperparameter_widths))
        if proxy.base_width not in widths
    ]
    axes: dict[str, tuple[Sequence[float], float]] = {
        "durations": (transfer.durations, 1.0),
        "batches": (transfer.batches, 1.0),
        "depths": (transfer.depths, plan.model.num_layers),
    }
    problems += [
        f"transfer.{name} = {list(values)}: must hold {base:g}, the proxies' own, and at least one more"
        for name, (values, base) in axes.items()
        if values and (base not in values or len(values) < 2)
    ]
    whole = plan.model.seq_len * plan.batch_stages
    for ratio in transfer.batches:
        batch = ratio * proxy.batch_tokens
        if proxy.batch_tokens % whole == 0 and batch % whole:
            problems.append(
                f"transfer.batches: {ratio:g} times proxy.batch_tokens = {batch:g} tokens, no multiple of {whole}"
            )
    problems += [
        f"transfer: a run of {ratio * proxy.num_steps:.3g} steps is too short"
        for ratio in (*transfer.durations, *(1 / ratio for ratio in transfer.batches))
        if round(ratio * proxy.num_steps) < max(1, plan.batch_stages - 1)
    ]
    steps = [round(ratio * proxy.num_steps) for ratio in transfer.durations]
    if len(set(steps)) < len(steps):
        problems.append(
            f"transfer.durations = {list(transfer.durations)}: of {proxy.num_steps} steps, {steps}: each once"
        )
    if plan.target.batch_tokens % whole:
        problems.append(f"target.batch_tokens = {plan.target.batch_tokens}: no multiple of {whole} tokens")
    values = plan.proxy.hyperparameters
    for name, over in transfer.hyperparameters.items():
        problems += [
            f"transfer.hyperparameters.{name}: over {axis}, and transfer.{sizes} is empty"
            for axis, sizes in (("depth", "depths"), ("batch", "batches"), ("duration", "durations"))
            if axis in over and not axes[sizes][0]
        ]
        if values.get(name) == 0 and name not in {*plan.search.axes, *plan.search.choices}:
            problems.append(f"transfer.hyperparameters.{name}: tested by factors of 2, and proxy.{name} is 0")
    return problems


def _search_problems(plan: Plan) -> list[str]:
    search = plan.search
    problems = _axis_problems(search)
    if not problems:
        problems += _space_problems(plan, search)
    return problems + _pruner_problems(plan, search)


def _axis_problems(search: SearchSection) -> list[str]:
    """Check single axes."""
    ends = {f"axes.{name}": (name, list(ends)) for name, ends in search.axes.items()}
    ends |= {f"choices.{name}": (name, list(values)) for name, values in search.choices.items()}
    problems = [
        f"search.{key} = {values}: must be below {below:g}"
        for key, (name, values) in ends.items()
        if (below := HYPERPARAMETERS[name].below) is not None and max(values) >= below
    ]
    problems += [
        f"search.choices.{name}: search.axes has a range for it: one or the other"
        for name in search.choices
        if name in search.axes
    ]
    return problems + [
        f"search.can_be_off: {name} is not searched: give search.axes.{name} a range for where it is on"
        for name in search.can_be_off
        if name not in {*search.ranges, *search.axes, *search.choices}
    ]


def _space_problems(plan: Plan, search: SearchSection) -> list[str]:
    """Check all axes together: what the sampler and the trainer can do with them."""
    try:
        space = search.space
    except SpecError as error:
        return [f"search: {problem}" for problem in error.problems]
    command = plan.command
    varied = [
        HYPERPARAMETERS[axis.name].told_as
        for axis in space.axes
        if axis.can_be_off or (not axis.fixed and (axis.choices or axis.name not in search.ranges))
    ]
    return [
        f"proxy.command lacks {{{name}}}: the search varies it; name it, or do not search it"
        for name in varied
        if command is not None and not command.reaches(name)
    ]


def _pruner_problems(plan: Plan, search: SearchSection) -> list[str]:
    """Where no trial could ever be looked at, or compared with another."""
    if search.pruner == "none":
        return []
    said, steps = f"search.pruner = {search.pruner!r}", plan.proxy.num_steps
    problems = []
    if plan.command:
        problems.append(f"{said}: a command trains by itself, and cannot be looked at: 'none' is wanted")
    if not rungs(steps):
        problems.append(f"{said}: proxy.num_steps = {steps} leaves no step at which to look: 'none', or more steps")
    return problems


def _ladder_problems(plan: Plan) -> list[str]:
    ladder, whole = plan.ladder, plan.model.seq_len * plan.batch_stages
    num_rungs = len(ladder.widths) * len(ladder.num_steps)
    problems = []
    if len(ladder.widths) < 2 or len(ladder.num_steps) < 2 or num_rungs < MIN_RUNGS:
        problems.append(
            f"ladder: {len(ladder.widths)} widths, {len(ladder.num_steps)} durations, {num_rungs} rungs: "
            f"a law has five parameters, so at least 2 of each and {MIN_RUNGS} rungs are wanted"
        )
    if ladder.batch_tokens % whole:
        problems.append(f"ladder.batch_tokens = {ladder.batch_tokens}: no multiple of {whole} tokens")
    return problems
