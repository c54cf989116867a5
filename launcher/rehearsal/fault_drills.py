"""Drills that break a run while it trains: a rank killed or stuck, NaN, a spike, a scheduler's signal, a full disk."""

from __future__ import annotations

import dataclasses
import os
import statistics

from launcher.base import chronicle, metrics
from launcher.base.checkpoint_folders import CHECKPOINTS, Refused, complete_folders
from launcher.base.policy import SpikePolicy
from launcher.base.watchdog import FLOOR_SECONDS
from launcher.rehearsal.faults import Fault, consumed, fired, spike_nats
from launcher.rehearsal.registry import DrillResult, judged, skipped
from launcher.rehearsal.stage import Stage
from launcher.trainer import checkpoints, rollback
from proxies.core.canon import Json
from proxies.core.failures import cause_in

BETWEEN_SAVES, AFTER_SAVE = 10, 9
"""Updates made before a fault: between two checkpoints, past the warmup; one after a checkpoint that has one before."""
WINDOW_STEPS, PATIENCE_STEPS, ROLLBACK_STEPS = 8, 2, 3
"""As many as the copy's 16 steps leave room for, or fewer where the config says so."""
LEAST_RISE_NATS, THRESHOLD = 0.02, 1e-3
_CONTROL = "control-keep-data"


def killed_rank(stage: Stage) -> DrillResult:
    """A rank killed between gradients and update: the job is started again, and its weights end the same."""
    fault = Fault(kind="kill", step=BETWEEN_SAVES)
    return _restarted(stage, "killed_rank", fault, FLOOR_SECONDS, "a rank was killed (SIGKILL)")


def hang(stage: Stage) -> DrillResult:
    """A rank that stands still: the supervisor notices, kills the job, starts it again."""
    seconds = stage.hang_seconds
    what = f"a rank stood still; after {seconds:g} s without a step the job was killed"
    return _restarted(stage, "hang", Fault(kind="hang", step=BETWEEN_SAVES), seconds, what)


def _restarted(stage: Stage, name: str, fault: Fault, hang_seconds: float, what: str) -> DrillResult:
    run = stage.fresh(name.replace("_", "-"))
    outcome = stage.run(run, fault, max_restarts=1, hang_seconds=hang_seconds)
    struck, before = fired(stage.path(run), fault.kind).exists(), f"{what} before update {fault.step + 1}"
    seen: dict[str, Json] = {
        "event": outcome.event, "num_restarts": outcome.num_restarts, "struck": struck,
        "struck_before_update": fault.step + 1,
    }  # fmt: skip
    if outcome.event != "finished":
        return judged(name, False, f"{before}; the run {outcome.event}: {outcome.reason}", seen)
    apart = stage.apart(stage.reference(), run)
    seen["num_tensors_differing"] = apart.num_differing
    said = f"{before}, {outcome.num_restarts} restart; at the end {apart.told}"
    return judged(name, struck and outcome.num_restarts == 1 and apart.bitwise, said, seen)


def nan(stage: Stage) -> DrillResult:
    """A forward pass that gives NaN: stopped before the update, the last checkpoint as it was."""
    run = stage.fresh("nan")
    outcome = stage.run(run, Fault(kind="nan", step=AFTER_SAVE))
    newest, whole = _newest(stage, run)
    same = bool(newest) and stage.apart(stage.reference(), run, newest).bitwise
    trained = max(stage.losses(run), default=0)
    return judged(
        "nan", (outcome.event, outcome.exit_code) == ("aborted", 3) and trained == AFTER_SAVE and whole and same,
        f"NaN in the forward pass of update {AFTER_SAVE + 1}: {outcome.event}, exit {outcome.exit_code}, {trained} "
        f"updates made; the checkpoint of step {newest} is "
        + ("whole and bitwise the uninterrupted run's" if whole and same else "damaged"),
        {"event": outcome.event, "exit_code": outcome.exit_code, "num_updates": trained, "newest_checkpoint": newest},
    )  # fmt: skip


def sigterm(stage: Stage) -> DrillResult:
    """A scheduler's SIGTERM: saved at once, exit 130, and resumed from there."""
    run = stage.fresh("sigterm")
    outcome = stage.run(run, Fault(kind="sigterm", step=AFTER_SAVE, supervisor_pid=os.getpid()))
    newest, whole = _newest(stage, run)
    bitwise = _resumes(stage, run, whole)
    saved = whole and newest == outcome.step and newest > AFTER_SAVE
    return judged(
        "sigterm", (outcome.event, outcome.exit_code) == ("interrupted", 130) and saved and bitwise,
        f"SIGTERM at update {AFTER_SAVE + 1}: {outcome.event}, exit {outcome.exit_code}, saved after step {newest}; "
        f"resumed, {_same_end(bitwise)}",
        {"event": outcome.event, "exit_code": outcome.exit_code, "saved_after_step": newest,
         "resumed_bitwise": bitwise},
    )  # fmt: skip


def disk_full(stage: Stage) -> DrillResult:
    """No room for a checkpoint: ends in words, the older one intact; with room again it resumes."""
    run = stage.fresh("disk-full")
    outcome = stage.run(run, Fault(kind="disk_full", step=AFTER_SAVE))
    found = cause_in(outcome.reason)
    told = found is not None and found[0] == "disk_full"
    newest, whole = _newest(stage, run)
    bitwise = _resumes(stage, run, whole)
    reason = outcome.reason.splitlines()[-1] if outcome.reason else "no word why"
    return judged(
        "disk_full", outcome.exit_code != 0 and told and bitwise,
        f"no room for the checkpoint after step {AFTER_SAVE + 1}: {outcome.event} ({reason}); the checkpoint of step "
        f"{newest} is {'whole' if whole else 'damaged'}; with room again, {_same_end(bitwise)}",
        {"event": outcome.event, "exit_code": outcome.exit_code, "newest_checkpoint": newest, "told": told,
         "resumed_bitwise": bitwise},
    )  # fmt: skip


def _newest(stage: Stage, run: str) -> tuple[int, bool]:
    """The newest checkpoint's step, and whether it is whole by its hashes; 0 where there is none."""
    newest = max(complete_folders(stage.path(run) / CHECKPOINTS), default=0)
    if not newest:
        return 0, False
    refused: list[Refused] = []
    try:
        found = checkpoints.newest_good(stage.path(run) / CHECKPOINTS, stage.decision.digest, refused)
    except checkpoints.CheckpointError:
        return newest, False
    return newest, found is not None and found.step == newest and not refused


def _resumes(stage: Stage, run: str, whole: bool) -> bool:
    """Whether the run, started again, ends bitwise as the uninterrupted one."""
    after = stage.run(run) if whole else None
    return after is not None and after.event == "finished" and stage.apart(stage.reference(), run).bitwise


def _same_end(bitwise: bool) -> str:
    return "it ends bitwise as the uninterrupted run" if bitwise else "it does not come to the same end"


def spike(stage: Stage) -> DrillResult:
    """Data on which the loss spikes: gone back before it, as much skipped as frozen, recorded, trained to the end."""
    frozen = stage.real.spikes
    if not frozen.max_rollbacks:
        said = "the frozen policy leaves spikes to people: launch.spike_rollbacks is 0"
        return skipped(
            "spike", said, "nothing, if that is meant; else plan with launch.spike_rollbacks, and freeze again"
        )
    small = _with_policy(stage, _scaled(stage))
    run, control = stage.fresh("spike"), stage.fresh(_CONTROL)
    fault = Fault(kind="spike", step=AFTER_SAVE)
    small.run_in_turn({control: (fault, Fault(kind="keep_data")), run: (fault,)})
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
    said = "; ".join(problems[:4]) or (
        f"{went[0].reason}: went back to step {went[0].to_step}, skipped {frozen.skip_batches} batches as frozen and "
        "ended; one that skips nothing is told from it"
    )
    return judged("spike", not problems, said, seen)


def _scaled(stage: Stage) -> SpikePolicy:
    """The policy in the copy's few steps: what is skipped, how often, and the clip as frozen; its limit half way from
    where the uninterrupted run is to the spike.
    """
    losses, frozen = stage.losses(stage.reference()), stage.decision.spikes
    level = statistics.median(losses[step + 1] for step in range(AFTER_SAVE - WINDOW_STEPS, AFTER_SAVE))
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
    to_step = max(0, AFTER_SAVE - policy.rollback_steps)
    first, _ = schedule.sequences(to_step, batch)
    skipped = schedule.sequences(to_step + policy.skip_batches, batch)[0] - first
    wanted = [(AFTER_SAVE + policy.patience_steps - 1, to_step, skipped, decision.clip_norm)]
    found = [(back.at_step, back.to_step, back.skipped_sequences, back.clip_norm)
             for back in rollback.read(folder, decision.digest)]  # fmt: skip
    if found != wanted:
        problems.append(f"rollbacks (at, to, sequences skipped, clip) {found}, must be {wanted}")
    told = (
        sum(entry.kind == "rolled_back" for entry in chronicle.entries(folder)),
        sum(line.get("event") == "rolled_back" for line in metrics.read(folder)),
    )
    if told != (1, 1):
        problems.append(f"told of {told[0]} times in the chronicle, {told[1]} in the metrics: must be once each")
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
