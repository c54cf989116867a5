"""Drills that compare the uninterrupted run of the copy with another run.

The other run is the same run in the proxies' engine, the cut run (stopped and resumed), or a run
that begins from damaged checkpoints.
"""

from __future__ import annotations

import math
from functools import partial

from forerun._launcher.main_run.checkpoint_folders import CHECKPOINTS, list_complete_checkpoints
from forerun._launcher.main_run.rehearsal.faults import Fault, FaultKind
from forerun._launcher.main_run.rehearsal.registry import CUTS, PROXY_NATS, Observation
from forerun._launcher.main_run.rehearsal.rehearsal_folder import (
    RehearsalFolder,
    flip_a_bit,
    is_finished,
    read_losses,
    read_validation_loss,
)
from forerun._proxies.core.canon import Json
from forerun._proxies.core.errors import ExitCode
from forerun._proxies.core.notation import format_counted, format_loss, format_significant
from forerun._proxies.core.spec import RunSpec
from forerun._proxies.data.tokens import TokenStore

FULL_SHAPE_NATS = 1.0
"""Maximum distance of the first loss from ln(vocabulary), and of the validation loss from the last
training loss, for the real shape. It has no proxy, so only gross faults are found."""
CONTROLS: dict[FaultKind, str] = {
    "drop_moments": "moments dropped",
    "shift_batch": "data off by one batch",
}
"""Wrong ways to resume. Each must change the result, or else the comparison proves nothing."""


def compare_loss(rehearsal: RehearsalFolder) -> Observation:
    """Compare the copy's training and validation losses with those of the same run as a proxy."""
    reference = rehearsal.train_reference()
    losses, validated = read_losses(reference), read_validation_loss(reference)
    first, last = losses[1], losses[max(losses)]
    initial = math.log(rehearsal.decision.shape.vocab_size)
    seen: dict[str, Json] = {
        "first_nats": first,
        "last_nats": last,
        "ln_vocabulary_nats": initial,
        "validation_nats": validated,
    }
    sentence = (
        f"the loss goes from {format_loss(first)} to {format_loss(last)} nats in "
        f"{format_counted(len(losses), 'step')}"
    )
    if rehearsal.spec is None:  # the full shape has no proxy
        is_near = abs(first - initial) <= FULL_SHAPE_NATS
        is_near &= abs(validated - last) <= FULL_SHAPE_NATS
        sentence += (
            f", the validation loss is {format_loss(validated)}; ln(vocabulary) is "
            f"{format_loss(initial)}"
        )
        return Observation(is_near and last < first, sentence, seen)
    proxy, proxy_validated = _train_proxy(rehearsal, rehearsal.spec)
    limit = PROXY_NATS[rehearsal.decision.precision]
    worst = max(abs(loss - proxy.get(step, math.inf)) for step, loss in losses.items())
    difference = abs(validated - proxy_validated)
    seen |= {
        "worst_apart_nats": worst,
        "validation_apart_nats": difference,
        "num_steps": len(losses),
    }
    is_near = worst <= limit and difference <= limit and len(losses) == rehearsal.num_steps
    sentence += (
        f", within {format_significant(worst, 1)} nats of the same run in the proxies' engine at "
        f"every step, the validation loss ({format_loss(validated)} nats) within "
        f"{format_significant(difference, 1)}"
    )
    return Observation(is_near and last < first, sentence, seen)


def _train_proxy(rehearsal: RehearsalFolder, spec: RunSpec) -> tuple[dict[int, float], float]:
    """Train the spec as a proxy; return the training losses by step, and the validation loss, which
    is infinite if the run did not end.
    """
    from forerun._proxies.external.factory import build_model
    from forerun._proxies.training.single_trial import SingleTrialEngine

    build = partial(build_model, folder=rehearsal.code_dir)
    engine = SingleTrialEngine(
        TokenStore(rehearsal.corpus), device="cpu" if rehearsal.on_cpu else None, build=build
    )
    engine.admit(0, spec)
    while not (ended_trials := engine.advance(rehearsal.num_steps)):
        pass
    ((_, result, curve),) = ended_trials
    validated = math.inf if result.loss_nats is None else result.loss_nats
    return dict(zip(curve.steps, curve.train_loss_nats, strict=True)), validated


def cut_and_resume(rehearsal: RehearsalFolder) -> Observation:
    """Compare the cut run with the uninterrupted run: the weights at the end must be the same.

    Controls, which resume in a wrong way (`CONTROLS`), must end with other weights.
    """
    run_dir, reference = rehearsal.train_cut_run(), rehearsal.train_reference()
    difference = rehearsal.compare(reference, run_dir)
    seen: dict[str, Json] = {"cuts": [*CUTS], "num_tensors_differing": difference.num_differing}
    unnoticed = []
    for fault, description in CONTROLS.items():
        control = rehearsal.fork_run(run_dir, CUTS[-1], f"control-{fault.replace('_', '-')}")
        rehearsal.run(control, Fault(kind=fault, step=CUTS[-1]))
        wrong = rehearsal.compare(reference, control) if is_finished(control) else None
        seen[f"control_{fault}"] = None if wrong is None else wrong.weights_share
        if wrong is None or wrong.bitwise:
            unnoticed.append(description)
    controls = f"resumed with {', '.join(CONTROLS.values())}, it differs each time, as it must"
    if unnoticed:
        controls = (
            f"but resumed with {', '.join(unnoticed)}, it ends with the same weights or not at "
            "all, so this proves nothing"
        )
    sentence = (
        f"cut after steps {', '.join(map(str, CUTS))} and resumed in new processes: "
        f"{difference.sentence}; {controls}"
    )
    return Observation(difference.bitwise and not unnoticed, sentence, seen)


def corrupt_newest(rehearsal: RehearsalFolder) -> Observation:
    """Flip a bit of the newest checkpoint; the run must resume from the checkpoint before it."""
    run_dir = rehearsal.fork_run(
        rehearsal.train_reference(), _find_last_save(rehearsal), "corrupt-newest"
    )
    # The newest checkpoint comes first.
    (_, newest), (step_before, _), *_ = list_complete_checkpoints(run_dir / CHECKPOINTS).items()
    file = f"{newest.name}/{flip_a_bit(newest)}"
    outcome = rehearsal.run(run_dir)
    kept = [path.name for path in (run_dir / CHECKPOINTS).glob("*.corrupt*")]
    resumed_after = min(read_losses(run_dir), default=0) - 1
    seen: dict[str, Json] = {
        "flipped_in": file,
        "resumed_after_step": resumed_after,
        "kept": [*kept],
    }
    sentence = f"one bit flipped in {file}"
    if outcome.event != "finished":
        sentence += f": {outcome.event}: {outcome.reason}"
        return Observation(False, sentence, seen)
    difference = rehearsal.compare(rehearsal.train_reference(), run_dir)
    sentence += f": resumed after step {resumed_after}, {len(kept)} set aside; "
    passed = difference.bitwise and resumed_after == step_before and bool(kept)
    return Observation(passed, sentence + difference.sentence, seen)


def corrupt_all(rehearsal: RehearsalFolder) -> Observation:
    """Flip a bit of every checkpoint; the run must refuse, train nothing, and delete nothing."""
    run_dir = rehearsal.fork_run(
        rehearsal.train_reference(), _find_last_save(rehearsal), "corrupt-all"
    )
    folders = list_complete_checkpoints(run_dir / CHECKPOINTS).values()
    for folder in folders:
        flip_a_bit(folder)
    outcome = rehearsal.run(run_dir)
    num_kept = len(list((run_dir / CHECKPOINTS).glob("*.corrupt*")))
    all_named = all(folder.name in outcome.reason for folder in folders)
    refused = (outcome.event, outcome.exit_code) == ("refused", ExitCode.CORRUPT)
    return Observation(
        refused and all_named and num_kept == len(folders) and not read_losses(run_dir),
        f"one bit flipped in each of {format_counted(len(folders), 'checkpoint')}: "
        f"{outcome.event}, exit {outcome.exit_code}, {num_kept} set aside: {outcome.reason}",
        {
            "event": outcome.event,
            "exit_code": outcome.exit_code,
            "num_kept": num_kept,
            "all_named": all_named,
        },
    )


def _find_last_save(rehearsal: RehearsalFolder) -> int:
    """Return the last step before the end at which the uninterrupted run saved."""
    return rehearsal.num_steps - rehearsal.decision.checkpointing.every_steps
