"""Drills about the same run in another way: cut and resumed, from damaged checkpoints, on fewer and more ranks."""

from __future__ import annotations

from launcher.base.checkpoint_folders import CHECKPOINTS
from launcher.rehearsal.faults import Fault, FaultKind
from launcher.rehearsal.registry import CUTS, LOSS_NATS, WEIGHTS_SHARE, DrillResult, judged, skipped
from launcher.rehearsal.stage import TO_ONE_RANK, Stage, checkpoint_folders, flip_a_bit
from proxies.core.canon import Json

CONTROLS: dict[FaultKind, str] = {
    "other_seed": "data of another seed",
    "drop_moments": "moments dropped",
    "shift_batch": "data off by one batch",
}
EXIT_CORRUPT = 5
FROM_ONE_RANK = "from-one-rank"
_OF_THE_COPY = ("one device need not hold the real shape: this is for the scaled-down copy", "hold it without --full")


def resume(stage: Stage) -> DrillResult:
    """Cut at three points and resumed, a run ends bitwise as the uninterrupted one; resumed wrongly, it does not."""
    run, reference = stage.cut_thrice(), stage.reference()
    apart = stage.apart(reference, run)
    seen: dict[str, Json] = {"cuts": [*CUTS], "num_tensors_differing": apart.num_differing}
    controls_of = {fault: f"control-{fault.replace('_', '-')}" for fault in CONTROLS}
    stage.run_in_turn({
        stage.forked(run, CUTS[-1], control): (Fault(kind=fault, step=CUTS[-1]),)
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
    said = f"cut after steps {', '.join(map(str, CUTS))} and resumed in new processes: {apart.told}; {controls}"
    return judged("resume", apart.bitwise and not unnoticed, said, seen)


def corrupt_newest(stage: Stage) -> DrillResult:
    """One bit of the newest checkpoint flipped: the one before it is taken, and the weights end the same."""
    run = stage.forked(stage.reference(), _last_cut(stage), "corrupt-newest")
    *_, before, newest = checkpoint_folders(stage.path(run))
    file = flip_a_bit(newest)
    outcome = stage.run(run)
    kept = [path.name for path in (stage.path(run) / CHECKPOINTS).glob("*.corrupt*")]
    first = min(stage.losses(run), default=0)
    seen: dict[str, Json] = {"flipped_in": f"{newest.name}/{file}", "resumed_after_step": first - 1, "kept": [*kept]}
    flipped = f"one bit flipped in {newest.name}/{file}"
    if outcome.event != "finished":
        return judged("corrupt_newest", False, f"{flipped}: {outcome.event}: {outcome.reason}", seen)
    apart = stage.apart(stage.reference(), run)
    holds = apart.bitwise and first - 1 == int(before.name.removeprefix("step-")) and bool(kept)
    said = f"{flipped}: resumed after step {first - 1}, {len(kept)} set aside; {apart.told}"
    return judged("corrupt_newest", holds, said, seen)


def corrupt_all(stage: Stage) -> DrillResult:
    """One bit of every checkpoint flipped: refused in words, nothing trained, nothing deleted."""
    run = stage.forked(stage.reference(), _last_cut(stage), "corrupt-all")
    folders = checkpoint_folders(stage.path(run))
    for folder in folders:
        flip_a_bit(folder)
    outcome = stage.run(run)
    kept = list((stage.path(run) / CHECKPOINTS).glob("*.corrupt*"))
    named = all(folder.name in outcome.reason for folder in folders)
    refused = (outcome.event, outcome.exit_code) == ("refused", EXIT_CORRUPT)
    return judged(
        "corrupt_all", refused and named and len(kept) == len(folders) and not stage.losses(run),
        f"one bit flipped in each of {len(folders)} checkpoints: {outcome.event}, exit {outcome.exit_code}, "
        f"{len(kept)} kept aside: {outcome.reason}",
        {"event": outcome.event, "exit_code": outcome.exit_code, "num_kept": len(kept), "all_named": named},
    )  # fmt: skip


def _last_cut(stage: Stage) -> int:
    """The last step but the end's at which the uninterrupted run saved."""
    return stage.num_steps - stage.decision.checkpointing.every_steps


def two_ranks(stage: Stage) -> DrillResult:
    """One batch on two ranks is one batch on one rank, but for the order of sums; and twice on two, bit by bit."""
    if stage.scaled.kind == "full":
        return skipped("two_ranks", *_OF_THE_COPY)
    two, one, again = stage.losses(stage.reference()), stage.losses(stage.one_rank()), stage.losses(stage.cut_thrice())
    first = abs(two[1] - one[1])
    worst = max(abs(two[step] - one[step]) for step in two)
    repeated = sum(two[step] == again.get(step) for step in two)
    bitwise = "bitwise" if first == 0 else f"within {first:.1g} nats, no more than rounding"
    ranks = stage.decision.parallelism.num_ranks
    return judged(
        "two_ranks", worst <= LOSS_NATS[stage.decision.precision] and repeated == len(two) == len(one),
        f"the first batch on {ranks} ranks and on one: the same loss {bitwise}; over {len(two)} steps within "
        f"{worst:.1g} nats; done twice on {ranks} ranks, {repeated} of {len(two)} losses are bitwise equal",
        {"first_loss_apart_nats": first, "worst_loss_apart_nats": worst, "num_repeated_bitwise": repeated},
    )  # fmt: skip


def world_size(stage: Stage) -> DrillResult:
    """A run that resumes with other ranks than it began with stays the same run, up to rounding."""
    if stage.scaled.kind == "full":
        return skipped("world_size", *_OF_THE_COPY)
    own, at, precision = stage.decision.parallelism.num_ranks, stage.forked_at, stage.decision.precision
    seen: dict[str, Json] = {}
    texts, holds = [], True
    changes = ((stage.reference(), TO_ONE_RANK, own, 1), (stage.one_rank(), FROM_ONE_RANK, 1, own))
    for source, run, before, ranks_then in changes:
        if run == FROM_ONE_RANK or not stage.ended(run):
            outcome = stage.run(stage.forked(source, at, run), num_ranks=ranks_then)
            if outcome.event != "finished":
                holds = False
                texts.append(f"{before} to {ranks_then} ranks: {outcome.event}: {outcome.reason}")
                continue
        theirs, mine = stage.losses(source), stage.losses(run)
        worst = max(abs(theirs[step] - mine[step]) for step in mine)
        apart = stage.apart(source, run)
        seen[f"{before}_to_{ranks_then}"] = {"loss_apart_nats": worst, "weights_apart_share": apart.weights_share}
        near = worst <= LOSS_NATS[precision] and apart.weights_share <= WEIGHTS_SHARE[precision]
        holds = holds and near and min(mine) == at + 1
        texts.append(
            f"{before} to {ranks_then} ranks after step {at}: losses within {worst:.1g} nats, weights within "
            f"{apart.weights_share:.1g} of their norm"
        )
    return judged("world_size", holds, "; ".join(texts), seen)
