"""Drills about numbers: the live groups and rates, the first losses beside a proxy's, and the time of a step."""

from __future__ import annotations

import math
import statistics

import torch

from launcher.frozen.attestations import path_of, read_attestation
from launcher.frozen.frozen import Decision, TamperedError, learning_rate_of
from launcher.rehearsal.recording import live_rates
from launcher.rehearsal.results import DrillResult, judged
from launcher.rehearsal.stage import Stage
from launcher.trainer import assembly
from proxies.core.canon import Json
from proxies.core.schedule import Schedule, lr_table
from proxies.core.spec import Dtype
from proxies.data.tokens import TokenStore
from proxies.model.decoder import Decoder
from proxies.model.optimizer import set_rates

PROXY_NATS: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 0.1}
"""That the proxies' engine may be away at a step: it sums in another order, and casts to bfloat16 elsewhere."""
SLOWEST_FACTOR = 1.25
"""Of the estimate's step, beyond its own interval."""


def told_steps(schedule: Schedule) -> dict[str, int]:
    """The steps of a schedule that are looked at, by name."""
    last = schedule.num_steps - 1
    return {"start": 0, "warmup_end": min(max(0, schedule.warmup_steps - 1), last), "middle": last // 2, "end": last}


def echo(stage: Stage) -> DrillResult:
    """The optimizer of the real model has the frozen numbers, at the start, the warmup's end, the middle, the end."""
    problems, rates = _real_groups(stage.real)
    live, own = live_rates(stage.path(stage.reference())), stage.decision
    table = lr_table(own.learning_rate.schedule)
    num_equal = 0
    for step in range(stage.num_steps):
        wanted = [group.learning_rate * table[step] for group in own.groups]
        num_equal += live.get(step) == wanted
        if live.get(step) != wanted:
            problems.append(f"update {step + 1} of the copy ran at the rates {live.get(step)}, frozen are {wanted}")
    steps = told_steps(stage.real.learning_rate.schedule)
    names = ", ".join(f"{name.replace('_', ' ')} (step {step})" for name, step in steps.items())
    return judged(
        "echo", not problems,
        "; ".join(problems[:4]) or f"{len(stage.real.groups)} groups of the real model's own optimizer (built without "
        f"memory) hold the frozen numbers at {names}; in the run itself, at each of {num_equal} updates",
        seen={"num_groups": len(stage.real.groups), "rates": rates, "num_updates_equal": num_equal},
        limit="equal, to the last bit",
        advice="the trainer would run other numbers than were frozen: freeze again with this version",
    )  # fmt: skip


def _real_groups(decision: Decision) -> tuple[list[str], dict[str, Json]]:
    """Where the real model's own groups differ from the frozen numbers; and the rates of each group by step."""
    problems = []
    if learning_rate_of(decision.learning_rate.schedule) != decision.learning_rate:
        problems.append("this version's table of learning rates is not the frozen one")
    model = Decoder(decision.shape, device="meta")
    optimizer = assembly.build_optimizer(model, decision.groups)
    table, rates = lr_table(decision.learning_rate.schedule), dict[str, Json]()
    for name, step in told_steps(decision.learning_rate.schedule).items():
        set_rates(optimizer, decision.groups, table[step])
        problems += [f"step {step}: {p}" for p in assembly.mismatches(model, optimizer, decision.groups, table[step])]
        rates[name] = [float(group["lr"]) for group in optimizer.param_groups]
    return problems, rates


def loss(stage: Stage) -> DrillResult:
    """The copy's training losses and its validation loss beside those of the same run in the proxies' own engine."""
    losses, validated = stage.losses(stage.reference()), stage.validation_loss(stage.reference())
    first, last = losses[1], losses[max(losses)]
    at_init, falls = math.log(stage.decision.shape.vocab_size), last < first
    seen: dict[str, Json] = {
        "first_nats": first, "last_nats": last, "ln_vocabulary_nats": at_init, "validation_nats": validated,
    }  # fmt: skip
    fell = f"the loss goes from {first:.3f} to {last:.3f} nats in {len(losses)} steps"
    advice = "the trainer does not train what the proxies trained: compare weights, forward multipliers and data"
    if stage.scaled.spec is None:
        near = abs(first - at_init) <= 1.0 and abs(validated - last) <= 1.0
        return judged(
            "loss", near and falls,
            f"{fell}, of validation it is {validated:.3f}; ln of the vocabulary is {at_init:.3f}", seen=seen,
            advice=advice,
            limit="first within 1 nat of ln(vocabulary), last below first, validation within 1 nat of the last: of the "
            "real shape no proxy was trained",
        )  # fmt: skip
    proxy, proxy_validated = _proxy_losses(stage)
    limit = PROXY_NATS[stage.decision.precision]
    worst = max((abs(losses[step] - proxy.get(step, math.inf)) for step in losses), default=math.inf)
    apart = abs(validated - proxy_validated)
    seen |= {"worst_apart_nats": worst, "validation_apart_nats": apart, "num_steps": len(losses)}
    return judged(
        "loss", worst <= limit and apart <= limit and falls and len(losses) == stage.num_steps,
        f"{fell}, at every step within {worst:.1g} nats of the same run in the proxies' engine, the validation loss "
        f"({validated:.3f} nats) within {apart:.1g}", seen=seen,
        limit=f"within {limit:g} nats of the proxy at every step and in validation, and falling", advice=advice,
    )  # fmt: skip


def _proxy_losses(stage: Stage) -> tuple[dict[int, float], float]:
    """Step -> training loss of the copy's spec as a proxy, and its validation loss at the end (infinite if none)."""
    from proxies.training.solo import Solo

    assert stage.scaled.spec is not None
    solo = Solo(TokenStore(stage.corpus), device="cpu" if stage.on_cpu else None)
    solo.admit(0, stage.scaled.spec)
    while not (ended := solo.advance(stage.num_steps)):
        pass
    ((_, result, curve),) = ended
    validated = math.inf if result.loss_nats is None else result.loss_nats
    return dict(zip(curve.steps, curve.train_loss_nats, strict=True)), validated


def budget(stage: Stage) -> DrillResult:
    """The time of a real step beside the estimate's; of a copy, or on a CPU, there is nothing to compare."""
    frozen_dir = stage.frozen_dir
    seconds = stage.step_seconds(stage.reference())
    median = statistics.median(seconds[len(seconds) // 2 :])
    seen: dict[str, Json] = {"step_seconds": median}
    limit = f"at most {SLOWEST_FACTOR:g} times the slow end of the estimate"
    command = f"forerun rehearse {frozen_dir} --full"
    if stage.scaled.kind != "full" or not torch.cuda.is_available():
        return DrillResult(
            name="budget", outcome="skipped", needed=False, seen={**seen}, limit=limit,
            said=f"a step of the copy takes {median:.3g} s here: not comparable with the real run's",
            advice=f"on the machine of the main run: forerun estimate {frozen_dir}, then {command}",
        )  # fmt: skip
    try:
        body = read_attestation(path_of(frozen_dir, "estimate"), stage.real.digest)
        slow = _slow_end(body)
    except (TamperedError, KeyError, TypeError, ValueError):
        return DrillResult(
            name="budget", outcome="skipped", needed=False, seen={**seen}, limit=limit,
            said=f"a step takes {median:.3g} s, and there is no estimate beside the config",
            advice=f"forerun estimate {frozen_dir} --gpu NAME, then {command}",
        )  # fmt: skip
    hours = median * stage.real.learning_rate.schedule.num_steps / 3600
    seen |= {"estimate_slow_seconds": slow, "whole_run_hours": hours}
    return judged(
        "budget", median <= SLOWEST_FACTOR * slow,
        f"a step takes {median:.3g} s, the estimate's slow end is {slow:.3g} s; all steps take {hours:,.1f} h",
        seen=seen, limit=limit, advice="the run will take longer, and cost more, than was planned: estimate it anew",
    )  # fmt: skip


def _slow_end(body: dict[str, Json]) -> float:
    """Seconds of the estimate's slowest step."""
    main = body["main_run"]
    step = main["step_seconds"] if isinstance(main, dict) else None
    if not isinstance(step, dict):
        raise ValueError("no step_seconds")
    ends = step["interval"]
    slow = ends[1] if isinstance(ends, list) else step["value"]
    return float(str(slow))
