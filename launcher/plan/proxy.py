"""What single keys of a plan cannot show about its proxies: parametrization, numerics, own code, own data."""

from __future__ import annotations

from collections.abc import Callable

from launcher.plan.plan import Plan
from launcher.plan.sections import ProxySection
from proxies.core.checks import SpecError
from proxies.core.hyperparameters import HYPERPARAMETERS, LEARNING_RATE, Hparams
from proxies.core.powers import Ratios
from proxies.core.programs import Factory
from proxies.core.rules import decay_problems


def proxy_problems(plan: Plan) -> list[str]:
    """Everything about `[proxy]`, and what it asks of `[model]` and `[data]`, that does not hold together."""
    proxy = plan.proxy
    problems = [
        problem
        for where, make in (
            ("proxy.rules", lambda: plan.parametrization),
            ("proxy", lambda: plan.numerics("proxy")),
            ("proxy.command", lambda: plan.command),
            ("proxy.factory", lambda: proxy.factory and Factory(target=proxy.factory, source_sha256="0" * 64)),
        )
        for problem in _problems(where, make)
    ]
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


def _problems(where: str, make: Callable[[], object]) -> list[str]:
    try:
        make()
    except SpecError as error:
        return [f"{where}: {problem}" for problem in error.problems]
    return []


def _told_problems(plan: Plan) -> list[str]:
    """What a study varies, its own trainer must be told."""
    command = plan.command
    if command is None:
        return []
    problems = [
        f"proxy.command lacks {{{told}}}: search.{name} varies it; name it, or set both ends alike"
        for name, (low, high) in plan.search.ranges.items()
        if low != high and not command.reaches(told := HYPERPARAMETERS[name].told_as)
    ]
    plain = ProxySection()
    set_here = {
        name: f"proxy.{name} = {getattr(plan.proxy, name)!r}"
        for name in (*plain.hyperparameters, "schedule", "final_fraction")
        if getattr(plan.proxy, name) != getattr(plain, name)
    }
    if plan.proxy.batch_warmup_fraction:
        set_here["batch_warmup_steps"] = f"proxy.batch_warmup_fraction = {plan.proxy.batch_warmup_fraction}"
    problems += [
        f"proxy.command lacks {{{name}}}: the trainer is not told {said}"
        for name, said in set_here.items()
        if not command.reaches(name)
    ]
    unsaid = {
        "proxy.rules": plan.proxy.rules != plain.rules, "proxy.dtype": plan.proxy.dtype != plain.dtype,
        "proxy.compiled": plan.proxy.compiled is True,
        "proxy.matmul_precision": plan.proxy.matmul_precision not in (plain.matmul_precision, "auto"),
        "proxy.microbatch_tokens": plan.proxy.microbatch_tokens > 0,
        "proxy.activation_checkpointing": plan.proxy.activation_checkpointing,
    }  # fmt: skip
    problems += [
        f"{name} is set, and only {{run_json}} tells a trainer of it: name that, or leave {name} alone"
        for name, here in unsaid.items()
        if here and not command.reaches("run_json")
    ]
    if "{data}" in plan.proxy.command and not plan.data.path:
        problems.append("proxy.command names {data}, and data.path is empty: there is no corpus folder")
    return problems


def _decay_problems(plan: Plan) -> list[str]:
    """A step must leave something of a weight."""
    try:
        hparams = Hparams.at({LEARNING_RATE: plan.search.learning_rate[1]}, plan.proxy.hyperparameters)
    except SpecError as error:
        return [f"proxy: {problem}" for problem in error.problems]
    return [f"proxy.{problem}" for problem in decay_problems(plan.parametrization, Ratios(), hparams)]


def _batch_problems(plan: Plan) -> list[str]:
    proxy, seq_len = plan.proxy, plan.model.seq_len
    stages = proxy.batch_warmup_stages if proxy.batch_warmup_fraction else 1
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
    if proxy.batch_warmup_fraction and stages - 1 > shortest:
        problems.append(f"proxy.batch_warmup_stages = {stages}: more than the {shortest} steps of the shortest run")
    return problems


def _data_problems(plan: Plan) -> list[str]:
    data, own = plan.data, bool(plan.proxy.command)
    if data.path:
        known = {"data.external": data.external, "data.vocab_size": data.vocab_size}
        return [
            f'{name} = {value!r}: for data without a corpus (data.path = "")' for name, value in known.items() if value
        ]
    if not own:
        return ['data.path = "": a corpus folder is wanted (only proxy.command may bring its own data)']
    problems = [] if data.external else ['data.external = "": a name for the data of your own trainer is wanted']
    problems += [] if data.vocab_size >= 2 else [f"data.vocab_size = {data.vocab_size}: 2 or more is wanted"]
    return problems + (["data.weights: only a corpus has sources"] if data.weights else [])
