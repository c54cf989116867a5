"""Drills about numbers: the live groups and rates, the first losses beside a proxy's, and the time of a step."""

from __future__ import annotations

import math
import statistics

import torch

from launcher.frozen.attestations import path_of, read_attestation
from launcher.frozen.frozen import Decision, TamperedError, learning_rate_of
from launcher.rehearsal.faults import live_rates
from launcher.rehearsal.registry import PROXY_NATS, SLOWEST_FACTOR, DrillResult, judged, skipped
from launcher.rehearsal.stage import Stage
from launcher.trainer import assembly
from proxies.core.canon import Json
from proxies.core.schedule import Schedule, lr_table
from proxies.data.tokens import TokenStore
from proxies.model.decoder import Decoder
from proxies.model.optimizer import set_rates


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
        {"num_groups": len(stage.real.groups), "rates": rates, "num_updates_equal": num_equal},
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
    if stage.scaled.spec is None:
        near = abs(first - at_init) <= 1.0 and abs(validated - last) <= 1.0
        said = f"{fell}, of validation it is {validated:.3f}; ln of the vocabulary is {at_init:.3f}"
        return judged("loss", near and falls, said, seen)
    proxy, proxy_validated = _proxy_losses(stage)
    limit = PROXY_NATS[stage.decision.precision]
    worst = max((abs(losses[step] - proxy.get(step, math.inf)) for step in losses), default=math.inf)
    apart = abs(validated - proxy_validated)
    seen |= {"worst_apart_nats": worst, "validation_apart_nats": apart, "num_steps": len(losses)}
    return judged(
        "loss", worst <= limit and apart <= limit and falls and len(losses) == stage.num_steps,
        f"{fell}, at every step within {worst:.1g} nats of the same run in the proxies' engine, the validation loss "
        f"({validated:.3f} nats) within {apart:.1g}", seen,
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
    command = f"forerun rehearse {frozen_dir} --full"
    if stage.scaled.kind != "full" or not torch.cuda.is_available():
        said = f"a step of the copy takes {median:.3g} s here: not comparable with the real run's"
        advice = f"on the machine of the main run: forerun estimate {frozen_dir}, then {command}"
        return skipped("budget", said, advice, seen)
    try:
        body = read_attestation(path_of(frozen_dir, "estimate"), stage.real.digest)
        slow = _slow_end(body)
    except (TamperedError, KeyError, TypeError, ValueError):
        said = f"a step takes {median:.3g} s, and there is no estimate beside the config"
        return skipped("budget", said, f"forerun estimate {frozen_dir} --gpu NAME, then {command}", seen)
    hours = median * stage.real.learning_rate.schedule.num_steps / 3600
    seen |= {"estimate_slow_seconds": slow, "whole_run_hours": hours}
    said = f"a step takes {median:.3g} s, the estimate's slow end is {slow:.3g} s; all steps take {hours:,.1f} h"
    return judged("budget", median <= SLOWEST_FACTOR * slow, said, seen)


def _slow_end(body: dict[str, Json]) -> float:
    """Seconds of the estimate's slowest step."""
    main = body["main_run"]
    step = main["step_seconds"] if isinstance(main, dict) else None
    if not isinstance(step, dict):
        raise ValueError("no step_seconds")
    ends = step["interval"]
    slow = ends[1] if isinstance(ends, list) else step["value"]
    return float(str(slow))
