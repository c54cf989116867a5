"""A rehearsal: the drills in order, one after the other, and the attestation that signs what they found.

What has been found is kept drill by drill, so that one that was interrupted resumes where it was, as long as copy,
machine and code are the same; one that came to its end begins anew.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import platform
import shutil
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from launcher.base.talk import Meter
from launcher.base.watchdog import FLOOR_SECONDS
from launcher.frozen.attestations import CheckOutcome, attest, path_of, read_attestation
from launcher.frozen.frozen import Decision, FrozenError
from launcher.rehearsal.corpus import cut_corpus
from launcher.rehearsal.registry import DRILLS, Attested, DrillResult
from launcher.rehearsal.scaled import Scaled, full_copy, scaled_copy
from launcher.rehearsal.stage import Stage, UnexpectedEndError
from launcher.trainer import assembly
from launcher.trainer.checkpoint_index import IndexRefusedError
from launcher.trainer.checkpoints import CheckpointError
from proxies.core import canon
from proxies.core.canon import Json
from sweeps.store.lock import LOCK_NAME

KIND = "rehearsal"
SCRATCH, PROGRESS_FILE = "rehearsal", "progress.json"

_ROOMS = ("launcher", "proxies", "sweeps")
"""Whose code a run of the trainer and its supervisor is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """Of an unfinished rehearsal."""

    key: str
    results: tuple[DrillResult, ...]


def set_up(frozen_dir: Path, decision: Decision, corpus: Path, *, full: bool) -> Stage:
    """The stage beside a config: the cut corpus and the copy.

    Raises:
        FrozenError: the embedded trainer does not train this config, or this machine does not hold its real shape.
        DataError: there is no corpus, or it is not one.
    """
    if problems := assembly.unfit(decision):
        raise FrozenError("rehearsal", [*problems, "only what the embedded trainer trains can be rehearsed here"])
    if full and (short := _too_few(decision)):
        raise FrozenError("rehearsal --full", [short])
    scratch = frozen_dir / SCRATCH
    kept = _read(scratch)
    cut = cut_corpus(corpus, dict(decision.data.weights), scratch / "corpus")
    scaled = full_copy(_on(decision, cut.data_id)) if full else scaled_copy(decision, cut)
    scaled = dataclasses.replace(scaled, stands_for=decision.digest)
    if kept is None or kept.key != _key(scaled):
        for other in scratch.iterdir():
            if other.name not in ("corpus", LOCK_NAME):
                shutil.rmtree(other) if other.is_dir() else other.unlink()
    stage = Stage(
        real=decision, scaled=scaled, folder=scratch, corpus=scratch / "corpus", cut=cut, real_corpus=corpus,
        frozen_dir=frozen_dir,
    )  # fmt: skip
    return dataclasses.replace(stage, hang_seconds=FLOOR_SECONDS) if full else stage


def rehearse(stage: Stage, only: Collection[str] = ()) -> Attested:
    """Run the drills (those of `only`, if any), write the attestation, and leave the folder of a failed one to look at.

    Drills of `only` are held anew; what an earlier rehearsal of the same copy on this machine says of the others stays.

    Raises:
        KeyboardInterrupt: the user ended it; the same call resumes.
        OSError: nothing can be written beside the config.
    """
    names = [name for name in DRILLS if not only or name in only]
    kept = _read(stage.folder)
    found = {result.name: result for result in kept.results} if kept is not None else {}
    with Meter("rehearsal", sum(DRILLS[name].num_starts for name in names)) as meter:
        for name in names:
            if name not in found:
                found[name] = _held(stage, name)
                _keep(stage, tuple(found.values()))
            meter.add(DRILLS[name].num_starts, f"{name}: {found[name].outcome}")
    held = {**(_earlier(stage) if only else {}), **found}
    results = tuple(held[name] for name in DRILLS if name in held)
    found_all = Attested(
        outcome=_outcome(results), not_asked_for=tuple(name for name in DRILLS if name not in held),
        copy={**stage.scaled.told()}, machine={**machine()}, drills=results,
        seconds=round(sum(result.seconds for result in results), 1),
    )  # fmt: skip
    attest(stage.frozen_dir, KIND, stage.real.digest, cast(dict[str, Json], canon.to_json(found_all)))
    if found_all.outcome == "failed":
        (stage.folder / PROGRESS_FILE).unlink()  # the runs stay, to be looked at; the next rehearsal begins anew
    else:
        shutil.rmtree(stage.folder)
    return found_all


def _earlier(stage: Stage) -> dict[str, DrillResult]:
    """What the attestation there is says of the same copy on the same machine."""
    path = path_of(stage.frozen_dir, KIND)
    try:
        before = canon.decode(Attested, read_attestation(path, stage.real.digest))
    except ValueError:  # none, or none to trust
        return {}
    same = before.copy == stage.scaled.told() and before.machine == machine()
    return {drill.name: drill for drill in before.drills} if same else {}


def machine() -> dict[str, Json]:
    """Where the drills took place, and with which code."""
    gpus: list[Json] = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    return {
        "gpus": gpus, "machine": platform.machine(), "system": platform.system(), "python": platform.python_version(),
        "torch": str(torch.__version__), "forerun": importlib.metadata.version("forerun"),
        "code_sha256": _code_sha256(),
    }  # fmt: skip


@functools.cache
def _code_sha256() -> str:
    """Of what was rehearsed, which a version number need not tell from what a lab made of it."""
    house = Path(assembly.__file__).parents[2]
    files = sorted(path for room in _ROOMS for path in (house / room).rglob("*.py"))
    return canon.content_id({str(path.relative_to(house)): canon.file_sha256(path) for path in files})


def _held(stage: Stage, name: str) -> DrillResult:
    began = time.monotonic()
    try:
        result = DRILLS[name].hold(stage)
    except (UnexpectedEndError, CheckpointError, IndexRefusedError) as error:
        result = DrillResult(
            name=name, outcome="failed", said=str(error), seen={}, limit="the drill takes place",
            advice=f"torchrun.log in the folders of {stage.folder} has the ranks' own words",
        )  # fmt: skip
    return dataclasses.replace(result, seconds=round(time.monotonic() - began, 1))


def _outcome(results: Sequence[DrillResult]) -> CheckOutcome:
    if any(result.outcome == "failed" for result in results):
        return "failed"
    return "cannot_tell" if any(r.outcome == "skipped" and r.needed for r in results) else "passed"


def _on(decision: Decision, data_id: str) -> Decision:
    """The config on the cut, whose shares are its own."""
    return dataclasses.replace(decision, data=dataclasses.replace(decision.data, data_id=data_id, weights=()))


def _too_few(decision: Decision) -> str:
    """Why the real shape cannot be trained here."""
    ranks, gpus = decision.parallelism.num_ranks, torch.cuda.device_count()
    if gpus >= ranks or (not gpus and ranks == 1):
        return ""
    return (
        f"the real shape is for {ranks} ranks, this machine has {gpus} GPUs: without --full a scaled-down copy is "
        "rehearsed"
    )


def _key(scaled: Scaled) -> str:
    return canon.content_id({"copy": scaled.told(), "machine": machine()})


def _keep(stage: Stage, results: tuple[DrillResult, ...]) -> None:
    canon.write_atomic(stage.folder / PROGRESS_FILE, canon.pretty(_Kept(key=_key(stage.scaled), results=results)))


def _read(scratch: Path) -> _Kept | None:
    """What an interrupted rehearsal left."""
    try:
        return canon.decode(_Kept, canon.parse((scratch / PROGRESS_FILE).read_bytes()))
    except (OSError, ValueError):
        return None
