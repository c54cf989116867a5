"""The drill about a spike of the loss, of a config whose trainer may go back before one by itself."""

from __future__ import annotations

import dataclasses
import statistics

from launcher.base import chronicle, metrics
from launcher.base.policy import SpikePolicy
from launcher.rehearsal.plants import Plant, spike_nats
from launcher.rehearsal.recording import consumed
from launcher.rehearsal.results import DrillResult, judged
from launcher.rehearsal.stage import Stage
from launcher.trainer import rollback
from proxies.core.canon import Json

STRUCK_STEP = 9
"""The spike's first: one after a checkpoint, with a checkpoint from before the one that is gone back to."""
WINDOW_STEPS, PATIENCE_STEPS, ROLLBACK_STEPS = 8, 2, 3
"""As many as the copy's 16 steps leave room for, or fewer where the config says so."""
LEAST_RISE_NATS, THRESHOLD = 0.02, 1e-3
_CONTROL = "control-keep-data"


def spike(stage: Stage) -> DrillResult:
    """Data on which the loss spikes: gone back before it, as much skipped as frozen, recorded, trained to the end."""
    frozen = stage.real.spikes
    limit = "one rollback as frozen, recorded; the same run before it, no skipped window in it; the control is noticed"
    if not frozen.max_rollbacks:
        return DrillResult(
            name="spike", outcome="skipped", seen={}, limit=limit, needed=False,
            said="the frozen policy leaves spikes to people: launch.spike_rollbacks is 0",
            advice="nothing, if that is meant; else plan with launch.spike_rollbacks, and freeze again",
        )  # fmt: skip
    small = _with_policy(stage, _scaled(stage))
    run, control = stage.fresh("spike"), stage.fresh(_CONTROL)
    struck = Plant(fault="spike", step=STRUCK_STEP)
    small.run_in_turn({control: (struck, Plant(fault="keep_data")), run: (struck,)})
    problems = _problems(small, run)
    reach_steps = frozen.rollback_steps + frozen.patience_steps
    if frozen.skip_batches < reach_steps:
        problems.append(
            f"the frozen policy goes back {reach_steps} steps from where it speaks and skips {frozen.skip_batches} "
            "batches: the real run would come upon the spike's data again"
        )
    noticed = stage.ended(control) and bool(_problems(small, control))
    if not noticed:
        problems.append("a run that goes back and skips nothing was not told from this one: the drill sees nothing")
    went = rollback.read(stage.path(run), small.decision.digest)
    seen: dict[str, Json] = {
        "num_rollbacks": len(went), "spike_nats": spike_nats(small.decision), "control_noticed": noticed,
        "to_step": went[0].to_step if went else None,
        "skipped_sequences": went[0].skipped_sequences if went else None,
    }  # fmt: skip
    return judged(
        "spike", not problems,
        "; ".join(problems[:4]) or f"{went[0].reason}: went back to step {went[0].to_step}, skipped "
        f"{frozen.skip_batches} batches as frozen and ended; one that skips nothing is told from it",
        seen=seen, limit=limit,
        advice="a spike would not be answered as frozen: see rollbacks.json and chronicle.jsonl in the run's folder, "
        "or plan with launch.spike_rollbacks = 0",
    )  # fmt: skip


def _scaled(stage: Stage) -> SpikePolicy:
    """The policy in the copy's few steps: what is skipped, how often, and the clip as frozen; its limit half way from
    where the uninterrupted run is to the spike.
    """
    losses, frozen = stage.losses(stage.reference()), stage.decision.spikes
    level = statistics.median(losses[step + 1] for step in range(STRUCK_STEP - WINDOW_STEPS, STRUCK_STEP))
    return dataclasses.replace(
        frozen, window_steps=WINDOW_STEPS, patience_steps=min(PATIENCE_STEPS, frozen.patience_steps),
        rollback_steps=min(ROLLBACK_STEPS, frozen.rollback_steps), threshold=THRESHOLD,
        least_nats=max(LEAST_RISE_NATS, (spike_nats(stage.decision) - level) / 2),
    )  # fmt: skip


def _with_policy(stage: Stage, policy: SpikePolicy) -> Stage:
    """The stage of the copy with this policy: a config of its own, which trains the same until it goes back."""
    decision = dataclasses.replace(stage.decision, spikes=policy)
    return dataclasses.replace(stage, scaled=dataclasses.replace(stage.scaled, decision=decision))


def _problems(stage: Stage, run: str) -> list[str]:
    """Where a run is not the one that the policy asks for, by this module's own count."""
    decision, policy, folder = stage.decision, stage.decision.spikes, stage.path(run)
    schedule, batch = decision.learning_rate.schedule, decision.batch_tokens // decision.shape.seq_len
    problems = [] if stage.ended(run) else [f"the run did not end: {_reason(stage, run)}"]
    to_step = max(0, STRUCK_STEP - policy.rollback_steps)
    first, _ = schedule.sequences(to_step, batch)
    skipped = schedule.sequences(to_step + policy.skip_batches, batch)[0] - first
    wanted = [(STRUCK_STEP + policy.patience_steps - 1, to_step, skipped, decision.clip_norm)]
    found = [(back.at_step, back.to_step, back.skipped_sequences, back.clip_norm)
             for back in rollback.read(folder, decision.digest)]  # fmt: skip
    if found != wanted:
        problems.append(f"rollbacks (at, to, sequences skipped, clip) {found}: {wanted} is wanted")
    told = (
        sum(entry.kind == "rolled_back" for entry in chronicle.entries(folder)),
        sum(line.get("event") == "rolled_back" for line in metrics.read(folder)),
    )
    if told != (1, 1):
        problems.append(f"told of {told[0]} times in the chronicle, {told[1]} in the metrics: once each is wanted")
    losses, before = stage.losses(run), stage.losses(stage.reference())
    if other := [step for step in range(1, to_step + 1) if losses.get(step) != before[step]]:
        problems.append(f"before the rollback, steps {other} are not the uninterrupted run's")
    drawn = consumed(folder)
    for step in range(schedule.num_steps):
        start, count = schedule.sequences(step, batch)
        start += skipped if step >= to_step else 0
        if sorted(drawn.get(step, {})) != list(range(start, start + count)):
            problems.append(f"update {step + 1} did not use the {count} windows from place {start} on")
    return problems


def _reason(stage: Stage, run: str) -> str:
    ending = metrics.read_ending(stage.path(run))
    return "its job died, see torchrun.log" if ending is None else f"{ending.event}: {ending.reason}"
