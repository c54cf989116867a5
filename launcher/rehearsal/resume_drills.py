"""Drills that compare a run with another: a proxy's, or itself cut and resumed, or begun from
damaged checkpoints.
"""

from __future__ import annotations

import math
from functools import partial

from launcher.base.run_files import CHECKPOINTS
from launcher.rehearsal.faults import Fault, FaultKind
from launcher.rehearsal.registry import CUTS, PROXY_NATS, DrillResult, judged
from launcher.rehearsal.stage import RehearsalFolder, checkpoint_folders, flip_a_bit
from proxies.core.canon import Json
from proxies.core.errors import ExitCode
from proxies.core.notation import counted, format_loss, format_significant
from proxies.data.tokens import TokenStore

CONTROLS: dict[FaultKind, str] = {
    "drop_moments": "moments dropped",
    "shift_batch": "data off by one batch",
}


def loss(stage: RehearsalFolder) -> DrillResult:
    """The copy's training and validation losses, compared with those of the same run in the
    proxies' own engine.
    """
    losses, validated = stage.losses(stage.reference()), stage.validation_loss(stage.reference())
    first, last = losses[1], losses[max(losses)]
    at_init, falls = math.log(stage.decision.shape.vocab_size), last < first
    seen: dict[str, Json] = {
        "first_nats": first,
        "last_nats": last,
        "ln_vocabulary_nats": at_init,
        "validation_nats": validated,
    }
    fell = (
        f"the loss goes from {format_loss(first)} to {format_loss(last)} nats in "
        f"{counted(len(losses), 'step')}"
    )
    if stage.scaled.spec is None:
        near = abs(first - at_init) <= 1.0 and abs(validated - last) <= 1.0
        said = (
            f"{fell}, the validation loss is {format_loss(validated)}; ln(vocabulary) is "
            f"{format_loss(at_init)}"
        )
        return judged("loss", near and falls, said, seen)
    proxy, proxy_validated = _proxy_losses(stage)
    limit = PROXY_NATS[stage.decision.precision]
    worst = max(
        (abs(losses[step] - proxy.get(step, math.inf)) for step in losses), default=math.inf
    )
    apart = abs(validated - proxy_validated)
    seen |= {"worst_apart_nats": worst, "validation_apart_nats": apart, "num_steps": len(losses)}
    return judged(
        "loss",
        worst <= limit and apart <= limit and falls and len(losses) == stage.num_steps,
        f"{fell}, within {format_significant(worst, 1)} nats of the same run in the proxies' "
        "engine at every step, "
        "the validation loss "
        f"({format_loss(validated)} nats) within {format_significant(apart, 1)}",
        seen,
    )


def _proxy_losses(stage: RehearsalFolder) -> tuple[dict[int, float], float]:
    """Step -> training loss of the copy's spec as a proxy, and its validation loss at the end
    (infinite if none).
    """
    from proxies.external.factory import build_model
    from proxies.training.solo import Solo

    assert stage.scaled.spec is not None
    build = partial(build_model, folder=stage.code_dir)
    solo = Solo(TokenStore(stage.corpus), device="cpu" if stage.on_cpu else None, build=build)
    solo.admit(0, stage.scaled.spec)
    while not (ended := solo.advance(stage.num_steps)):
        pass
    ((_, result, curve),) = ended
    validated = math.inf if result.loss_nats is None else result.loss_nats
    return dict(zip(curve.steps, curve.train_loss_nats, strict=True)), validated


def resume(stage: RehearsalFolder) -> DrillResult:
    """Cut and resumed, a run ends bitwise as the uninterrupted one; resumed wrongly, it does
    not.
    """
    run, reference = stage.cut(), stage.reference()
    apart = stage.apart(reference, run)
    seen: dict[str, Json] = {"cuts": [*CUTS], "num_tensors_differing": apart.num_differing}
    unnoticed = []
    for fault, what in CONTROLS.items():
        control = stage.forked(run, CUTS[-1], f"control-{fault.replace('_', '-')}")
        stage.run(control, Fault(kind=fault, step=CUTS[-1]))
        wrong = stage.apart(reference, control) if stage.ended(control) else None
        seen[f"control_{fault}"] = None if wrong is None else wrong.weights_share
        if wrong is None or wrong.bitwise:
            unnoticed.append(what)
    controls = f"resumed with {', '.join(CONTROLS.values())}, it differs each time, as it must"
    if unnoticed:
        controls = f"but resumed with {', '.join(unnoticed)} the end is the same, or none: no proof"
    said = (
        f"cut after steps {', '.join(map(str, CUTS))} and resumed in new processes: "
        f"{apart.told}; {controls}"
    )
    return judged("resume", apart.bitwise and not unnoticed, said, seen)


def corrupt_newest(stage: RehearsalFolder) -> DrillResult:
    """One bit of the newest checkpoint flipped: the one before it is taken, and the weights end the
    same.
    """
    run = stage.forked(stage.reference(), _last_cut(stage), "corrupt-newest")
    *_, before, newest = checkpoint_folders(stage.path(run))
    file = flip_a_bit(newest)
    outcome = stage.run(run)
    kept = [path.name for path in (stage.path(run) / CHECKPOINTS).glob("*.corrupt*")]
    first = min(stage.losses(run), default=0)
    seen: dict[str, Json] = {
        "flipped_in": f"{newest.name}/{file}",
        "resumed_after_step": first - 1,
        "kept": [*kept],
    }
    flipped = f"one bit flipped in {newest.name}/{file}"
    if outcome.event != "finished":
        return judged(
            "corrupt_newest", False, f"{flipped}: {outcome.event}: {outcome.reason}", seen
        )
    apart = stage.apart(stage.reference(), run)
    holds = apart.bitwise and first - 1 == int(before.name.removeprefix("step-")) and bool(kept)
    said = f"{flipped}: resumed after step {first - 1}, {len(kept)} set aside; {apart.told}"
    return judged("corrupt_newest", holds, said, seen)


def corrupt_all(stage: RehearsalFolder) -> DrillResult:
    """One bit of every checkpoint flipped: refused in words, nothing trained, nothing deleted."""
    run = stage.forked(stage.reference(), _last_cut(stage), "corrupt-all")
    folders = checkpoint_folders(stage.path(run))
    for folder in folders:
        flip_a_bit(folder)
    outcome = stage.run(run)
    kept = list((stage.path(run) / CHECKPOINTS).glob("*.corrupt*"))
    named = all(folder.name in outcome.reason for folder in folders)
    refused = (outcome.event, outcome.exit_code) == ("refused", ExitCode.CORRUPT)
    return judged(
        "corrupt_all",
        refused and named and len(kept) == len(folders) and not stage.losses(run),
        f"one bit flipped in each of {counted(len(folders), 'checkpoint')}: {outcome.event}, exit "
        f"{outcome.exit_code}, "
        f"{len(kept)} set aside: {outcome.reason}",
        {
            "event": outcome.event,
            "exit_code": outcome.exit_code,
            "num_kept": len(kept),
            "all_named": named,
        },
    )


def _last_cut(stage: RehearsalFolder) -> int:
    """The last step but the end's at which the uninterrupted run saved."""
    return stage.num_steps - stage.decision.checkpointing.every_steps
