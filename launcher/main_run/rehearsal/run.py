"""A rehearsal: the drills in order, and the attestation of their results."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import cast

import numpy as np
import torch

from forerun._launcher.main_run.checkpoint_folders import CheckpointError
from forerun._launcher.main_run.frozen.frozen import Decision, FrozenError
from forerun._launcher.main_run.frozen.launch_file import attest
from forerun._launcher.main_run.progress_output import WorkMeter
from forerun._launcher.main_run.rehearsal.registry import (
    DRILLS,
    HANG_SECONDS,
    USER_DRILLS,
    Drill,
    DrillResult,
    Observation,
    RehearsalAttestation,
)
from forerun._launcher.main_run.rehearsal.rehearsal_folder import (
    RehearsalFolder,
    UnexpectedEndError,
)
from forerun._launcher.main_run.rehearsal.scaled_config import build_full_copy, build_scaled_copy
from forerun._launcher.main_run.rehearsal.user_drills import UserRehearsal
from forerun._launcher.main_run.supervisor.hang_detector import FLOOR_SECONDS
from forerun._launcher.main_run.supervisor.user_launch import OwnLaunchError
from forerun._launcher.main_run.trainer import inputs
from forerun._proxies.core import canon
from forerun._proxies.core.canon import Json
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.plain_files import require_plain
from forerun._proxies.data.tokens import MANIFEST, SPLITS, Manifest, Shard, read_manifest
from forerun._proxies.external.command import CommandError
from forerun._sweeps.store.lock import LOCK_NAME

KIND = "rehearsal"
SCRATCH = "rehearsal"
NUM_TOKENS = 200_000
"""Number of tokens of each source's split in the cut of a corpus."""


# ---- Setting up ----


def set_up_rehearsal(
    frozen_dir: Path, decision: Decision, corpus: Path, *, full: bool, code_dir: Path | None = None
) -> RehearsalFolder:
    """Set up a rehearsal in the folder of a config: remove what an earlier rehearsal left, write a
    small part of the corpus (the cut), and build the copy that the drills train.

    Args:
        frozen_dir: Folder of the config.
        decision: The config.
        corpus: Folder of the corpus.
        full: Whether the real shape is trained instead of a small copy.
        code_dir: Folder of a user's own model; None for the working directory.

    Raises:
        FrozenError: The embedded trainer does not train this config, the corpus is another one, or
            this machine is too small for the real shape.
        DataError: There is no corpus, or the config's shares of sources do not fit it.
        FactoryError, FactoryChangedError: See `forerun._launcher.main_run.trainer.model_builder`.
    """
    problems = inputs.find_reasons_to_refuse(decision)
    if problems:
        problems.append("only what the embedded trainer trains can be rehearsed here")
    ranks, gpus = decision.parallelism.num_ranks, torch.cuda.device_count()
    if full and gpus < ranks and (gpus or ranks > 1):
        problems.append(
            f"the real shape is for {format_counted(ranks, 'rank')}, this machine has "
            f"{format_counted(gpus, 'GPU')}: without --full a scaled-down copy is rehearsed"
        )
    weights, manifest = dict(decision.data.weights), read_manifest(corpus)
    if weights:
        manifest = manifest.reweight(weights)
    if manifest.data_id != decision.data.data_id:
        expected = decision.data.data_id[:16]
        problems.append(f"the corpus has data_id {manifest.data_id[:16]}..., must be {expected}...")
    if problems:
        raise FrozenError("rehearsal", problems)
    scratch, code_dir = frozen_dir / SCRATCH, code_dir or Path()
    for path in scratch.iterdir() if scratch.is_dir() else ():
        if path.name != LOCK_NAME:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    cut = cut_corpus(corpus, manifest, scratch / "corpus")
    spec = None
    if full:
        copy = build_full_copy(decision, cut)
    else:
        copy, spec = build_scaled_copy(decision, cut, code_dir)
    return RehearsalFolder(
        real=decision,
        decision=copy,
        spec=spec,
        folder=scratch,
        corpus=scratch / "corpus",
        frozen_dir=frozen_dir,
        code_dir=code_dir,
        hang_seconds=FLOOR_SECONDS if full else HANG_SECONDS,
    )


def cut_corpus(corpus: Path, manifest: Manifest, out: Path) -> Manifest:
    """Write the first tokens of every source and split of a corpus into `out`.

    Every start of a run reads and hashes its whole corpus, which may take hours for the real one.

    Args:
        corpus: Folder of the corpus.
        manifest: Its manifest, with the shares of its sources in the run.
        out: Folder of the cut.

    Returns:
        The manifest of the cut.

    Raises:
        OSError: A shard cannot be read, or the cut cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    sources = []
    for number, source in enumerate(manifest.sources):
        shards = {
            split: tuple(
                _cut_shard(corpus / shard.file, out / f"{number}-{split}.bin", manifest.dtype)
                for shard in getattr(source, split)[:1]
            )
            for split in SPLITS
        }
        sources.append(
            dataclasses.replace(source, train=shards["train"], validation=shards["validation"])
        )
    # The tokenizer's file is not copied: a trainer does not read it.
    cut = dataclasses.replace(manifest, sources=tuple(sources), tokenizer="unnamed")
    canon.write_atomic(out / MANIFEST, canon.to_pretty_json(cut))
    return cut


def _cut_shard(shard: Path, out: Path, dtype: str) -> Shard:
    """Write the first tokens of a shard as a shard of its own."""
    require_plain(shard)
    ids = np.fromfile(shard, dtype=np.dtype(dtype).newbyteorder("<"), count=NUM_TOKENS)
    ids.tofile(out)
    return Shard(
        file=out.name, num_tokens=len(ids), max_id=int(ids.max()), sha256=canon.hash_file(out)
    )


# ---- Running ----


def rehearse(
    rehearsal: RehearsalFolder | UserRehearsal, only: Collection[str] = ()
) -> RehearsalAttestation:
    """Run the drills and write the attestation. The runs' folders are kept only if a drill failed.

    Args:
        rehearsal: The rehearsal that was set up.
        only: Names of drills. If there are any, only these run, and no attestation is written.

    Raises:
        KeyboardInterrupt: The user ended it.
        OSError: The folder of the config is not writable.
    """
    drills = USER_DRILLS if isinstance(rehearsal, UserRehearsal) else DRILLS
    names = [name for name in drills if not only or name in only]
    results = []
    with WorkMeter("rehearsal", len(names)) as meter:
        for name in names:
            results.append(_run_drill(rehearsal, drills[name]))
            meter.add(1, f"{name}: {results[-1].outcome}")
    failed = any(result.outcome == "failed" for result in results)
    attestation = RehearsalAttestation(
        outcome="failed" if failed else "passed",
        copy={**rehearsal.describe_copy()},
        machine={**describe_machine()},
        drills=tuple(results),
        seconds=round(sum(result.seconds for result in results), 1),
    )
    if not only:
        body = cast(dict[str, Json], canon.to_json(attestation))
        attest(rehearsal.frozen_dir, KIND, rehearsal.real.digest, body)
    if not failed:
        shutil.rmtree(rehearsal.folder)
    return attestation


def describe_machine() -> dict[str, Json]:
    """Return the machine and the versions with which the drills ran."""
    gpus: list[Json] = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    return {
        "gpus": gpus,
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "forerun")},
    }


def _run_drill(rehearsal: RehearsalFolder | UserRehearsal, drill: Drill) -> DrillResult:
    """Run a drill. The drill fails if one of its runs ends so that it cannot continue."""
    began, limit, advice = time.monotonic(), drill.limit, drill.advice
    try:
        observation = drill.run(rehearsal)
    except (UnexpectedEndError, CheckpointError, OwnLaunchError, CommandError) as error:
        observation = Observation(False, str(error))
        limit = "the drill runs to its end"
        advice = (
            f"see torchrun.log or log.txt in the folders of {rehearsal.folder} for the ranks' own "
            "messages"
        )
    return DrillResult(
        name=drill.name,
        outcome="passed" if observation.passed else "failed",
        said=observation.sentence,
        seen={**observation.seen},
        limit=limit,
        advice="" if observation.passed else advice,
        seconds=round(time.monotonic() - began, 1),
    )
