"""Drills about resuming: cut and gone on, with what must not go unnoticed; and checkpoints that are damaged."""

from __future__ import annotations

from launcher.base.checkpoint_folders import CHECKPOINTS
from launcher.rehearsal.plants import Fault, Plant
from launcher.rehearsal.results import DrillResult, judged
from launcher.rehearsal.stage import CUTS, Stage, checkpoint_folders, flip_a_bit
from launcher.supervisor.launch import LaunchOutcome
from proxies.core.canon import Json

CONTROLS: dict[Fault, str] = {
    "other_seed": "data of another seed",
    "drop_moments": "moments dropped",
    "shift_batch": "data off by one batch",
}
EXIT_CORRUPT = 5


def resume(stage: Stage) -> DrillResult:
    """Cut at three points and gone on, a run ends bitwise as the uninterrupted one; resumed wrongly, it does not."""
    run, reference = stage.cut_thrice(), stage.reference()
    apart = stage.apart(reference, run)
    seen: dict[str, Json] = {"cuts": [*CUTS], "num_tensors_differing": apart.num_differing}
    controls_of = {fault: f"control-{fault.replace('_', '-')}" for fault in CONTROLS}
    stage.run_in_turn({
        stage.forked(run, CUTS[-1], control): (Plant(fault=fault, step=CUTS[-1]),)
        for fault, control in controls_of.items()
    })  # fmt: skip
    unnoticed = []
    for fault, what in CONTROLS.items():
        control = controls_of[fault]
        wrong = stage.apart(reference, control) if stage.ended(control) else None
        seen[f"control_{fault}"] = None if wrong is None else wrong.weights_share
        if wrong is None or wrong.bitwise:
            unnoticed.append(what)
    controls = f"resumed with {', '.join(CONTROLS.values())}: differs each time, as it must"
    if unnoticed:
        controls = f"but resumed with {', '.join(unnoticed)} it ends the same, or not at all: the drill sees nothing"
    return judged(
        "resume", apart.bitwise and not unnoticed,
        f"cut after steps {', '.join(map(str, CUTS))} and gone on in new processes: {apart.told}; {controls}",
        seen=seen, limit="bitwise; every control differs",
        advice="a resumed run is another run: look at what of weights, moments, step and data order is not restored",
    )  # fmt: skip


def corrupt_newest(stage: Stage) -> DrillResult:
    """One bit of the newest checkpoint flipped: the one before it is taken, and the weights end the same."""
    run = stage.forked(stage.reference(), _last_cut(stage), "corrupt-newest")
    *_, before, newest = checkpoint_folders(stage.path(run))
    file = flip_a_bit(newest)
    outcome = stage.run(run)
    kept = [path.name for path in (stage.path(run) / CHECKPOINTS).glob("*.corrupt*")]
    first = min(stage.losses(run), default=0)
    seen: dict[str, Json] = {"flipped_in": f"{newest.name}/{file}", "resumed_after_step": first - 1, "kept": [*kept]}
    limit = f"resumes after {before.name}, keeps the damaged one aside, ends bitwise as the uninterrupted run"
    advice = "a damaged checkpoint is loaded, or stops the run: checkpoints must be hashed before they are read"
    if outcome.event != "finished":
        return judged("corrupt_newest", False, f"one bit flipped in {newest.name}: {outcome.event}: {outcome.reason}",
                      seen=seen, limit=limit, advice=advice)  # fmt: skip
    apart = stage.apart(stage.reference(), run)
    holds = apart.bitwise and first - 1 == int(before.name.removeprefix("step-")) and bool(kept)
    return judged(
        "corrupt_newest", holds,
        f"one bit flipped in {newest.name}/{file}: went on after step {first - 1}, {len(kept)} set aside; {apart.told}",
        seen=seen, limit=limit, advice=advice,
    )  # fmt: skip


def corrupt_all(stage: Stage) -> DrillResult:
    """One bit of every checkpoint flipped: refused in words, nothing trained, nothing deleted."""
    run = stage.forked(stage.reference(), _last_cut(stage), "corrupt-all")
    folders = checkpoint_folders(stage.path(run))
    for folder in folders:
        flip_a_bit(folder)
    outcome = stage.run(run)
    kept = list((stage.path(run) / CHECKPOINTS).glob("*.corrupt*"))
    named = all(folder.name in outcome.reason for folder in folders)
    return judged(
        "corrupt_all",
        _refused(outcome) and named and len(kept) == len(folders) and not stage.losses(run),
        f"one bit flipped in each of {len(folders)} checkpoints: {outcome.event}, exit {outcome.exit_code}, "
        f"{len(kept)} kept aside: {outcome.reason}",
        seen={"event": outcome.event, "exit_code": outcome.exit_code, "num_kept": len(kept), "all_named": named},
        limit=f"refused with exit {EXIT_CORRUPT}, every checkpoint named and kept",
        advice="without a good checkpoint the run begins anew or goes on from a bad one: it must refuse",
    )  # fmt: skip


def _refused(outcome: LaunchOutcome) -> bool:
    return outcome.event == "refused" and outcome.exit_code == EXIT_CORRUPT


def _last_cut(stage: Stage) -> int:
    """The last step but the end's at which the uninterrupted run saved."""
    return stage.num_steps - stage.decision.checkpointing.every_steps
