"""A rehearsal: the drills in order, one after the other, and the attestation that signs what they
found.
"""

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
from numpy.typing import NDArray

from launcher.base.talk import Meter
from launcher.base.watchdog import FLOOR_SECONDS
from launcher.frozen.frozen import Decision, FrozenError
from launcher.frozen.launch_file import attest
from launcher.rehearsal.own_drills import OwnRehearsal
from launcher.rehearsal.registry import DRILLS, OWN_DRILLS, Drill, DrillResult, RehearsalAttestation
from launcher.rehearsal.scaled_config import full_copy, scaled_copy
from launcher.rehearsal.stage import RehearsalFolder, UnexpectedEndError
from launcher.supervisor.own_launch import OwnLaunchError
from launcher.trainer import assembly
from launcher.trainer.checkpoints import CheckpointError, IndexRefusedError
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.notation import counted
from proxies.core.plain_files import require_plain
from proxies.data.tokens import MANIFEST, SPLITS, Manifest, Shard, read_manifest
from proxies.external.command import CommandError
from sweeps.store.lock import LOCK_NAME

# A cut of a corpus for the drills: of every source and split the first tokens and the last, as
# shards of their own.
#
# Every start of a run reads its corpus through; of the real one that may take hours.

NUM_TOKENS = 100_000
"""At either end of a source's split."""


def cut_corpus(corpus: Path, weights: dict[str, float], out: Path) -> Manifest:
    """Write the cut of `corpus` into `out`, its sources in the shares of `weights`, if there are
    any.

    Raises:
        DataError: there is no corpus, or the weights do not fit it.
        OSError: a shard cannot be read, or `out` not written.
    """
    stored = read_manifest(corpus)
    manifest = stored.reweighted(weights) if weights else stored
    out.mkdir(parents=True, exist_ok=True)
    sources = []
    for number, source in enumerate(manifest.sources):
        shards = {
            split: tuple(
                _write(out / f"source-{number}-{split}-{end}.bin", ids)
                for end, ids in enumerate(_ends(corpus, getattr(source, split), manifest.dtype))
            )
            for split in SPLITS
        }
        sources.append(
            dataclasses.replace(source, train=shards["train"], validation=shards["validation"])
        )
    # The tokenizer's file stays behind: a trainer does not read it.
    cut = dataclasses.replace(manifest, sources=tuple(sources), tokenizer="unnamed")
    canon.write_atomic(out / MANIFEST, canon.pretty(cut))
    return cut


def _read_ids(path: Path, dtype: str, first: int, num_tokens: int) -> NDArray[np.integer]:
    """Some ids of a shard, as its file has them."""
    kind = np.dtype(dtype).newbyteorder("<")
    require_plain(path)
    return np.fromfile(path, dtype=kind, count=num_tokens, offset=first * kind.itemsize)


def _ends(corpus: Path, shards: tuple[Shard, ...], dtype: str) -> list[NDArray[np.integer]]:
    """The first tokens of the first shard and the last of the last; all of a split's only shard
    where it is short.
    """
    if not shards:
        return []
    first, last = shards[0], shards[-1]
    if first is last and first.num_tokens <= 2 * NUM_TOKENS:
        return [_read_ids(corpus / first.file, dtype, 0, first.num_tokens)]
    start = max(0, last.num_tokens - NUM_TOKENS)
    head = _read_ids(corpus / first.file, dtype, 0, min(NUM_TOKENS, first.num_tokens))
    return [head, _read_ids(corpus / last.file, dtype, start, last.num_tokens - start)]


def _write(path: Path, ids: NDArray[np.integer]) -> Shard:
    ids.tofile(path)
    return Shard(
        file=path.name, num_tokens=len(ids), max_id=int(ids.max()), sha256=canon.file_sha256(path)
    )


KIND = "rehearsal"
SCRATCH = "rehearsal"


def set_up(
    frozen_dir: Path, decision: Decision, corpus: Path, *, full: bool, code_dir: Path | None = None
) -> RehearsalFolder:
    """The stage beside a config: the cut corpus and the copy; what an earlier rehearsal left there
    goes.

    `code_dir` is the folder of a user's own model.

    Raises:
        FrozenError: the embedded trainer does not train this config, the corpus is another, or this
            machine does not hold the real shape.
        DataError: there is no corpus, or it is not one.
        FactoryError, FactoryChangedError: see `launcher.trainer.trained_model`.
    """
    if problems := assembly.unfit(decision):
        raise FrozenError(
            "rehearsal", [*problems, "only what the embedded trainer trains can be rehearsed here"]
        )
    if full and (short := _too_few(decision)):
        raise FrozenError("rehearsal --full", [short])
    weights, manifest = dict(decision.data.weights), read_manifest(corpus)
    data_id = (manifest.reweighted(weights) if weights else manifest).data_id
    if data_id != decision.data.data_id:
        raise FrozenError(
            "rehearsal",
            [f"the corpus has data_id {data_id[:16]}..., must be {decision.data.data_id[:16]}..."],
        )
    scratch = frozen_dir / SCRATCH
    if scratch.is_dir():
        for other in scratch.iterdir():
            if other.name != LOCK_NAME:
                shutil.rmtree(other) if other.is_dir() else other.unlink()
    cut = cut_corpus(corpus, weights, scratch / "corpus")
    scaled = full_copy(decision, cut) if full else scaled_copy(decision, cut, code_dir or Path())
    stage = RehearsalFolder(
        real=decision,
        scaled=scaled,
        folder=scratch,
        corpus=scratch / "corpus",
        frozen_dir=frozen_dir,
        code_dir=code_dir or Path(),
    )
    return dataclasses.replace(stage, hang_seconds=FLOOR_SECONDS) if full else stage


def rehearse(
    stage: RehearsalFolder | OwnRehearsal, only: Collection[str] = ()
) -> RehearsalAttestation:
    """Run the drills, write the attestation, and leave the folder of a failed one to look at.

    Those of `only`, if any, sign nothing: the attestation is of all of them.

    Raises:
        KeyboardInterrupt: the user ended it.
        OSError: nothing can be written beside the config.
    """
    drills = OWN_DRILLS if isinstance(stage, OwnRehearsal) else DRILLS
    names, results = [name for name in drills if not only or name in only], []
    with Meter("rehearsal", len(names)) as meter:
        for name in names:
            results.append(_held(stage, drills[name]))
            meter.add(1, f"{name}: {results[-1].outcome}")
    failed = any(result.outcome == "failed" for result in results)
    found = RehearsalAttestation(
        outcome="failed" if failed else "passed",
        copy={**stage.scaled.told()},
        machine={**machine()},
        drills=tuple(results),
        seconds=round(sum(result.seconds for result in results), 1),
    )
    if not only:
        attest(
            stage.frozen_dir, KIND, stage.real.digest, cast(dict[str, Json], canon.to_json(found))
        )
    if not failed:
        shutil.rmtree(stage.folder)
    return found


def machine() -> dict[str, Json]:
    """Where the drills took place, and with which code."""
    gpus: list[Json] = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    return {
        "gpus": gpus,
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("torch", "forerun")},
    }


def _held(stage: RehearsalFolder | OwnRehearsal, drill: Drill) -> DrillResult:
    began = time.monotonic()
    try:
        result = drill.hold(stage)
    except (
        UnexpectedEndError,
        CheckpointError,
        IndexRefusedError,
        OwnLaunchError,
        CommandError,
    ) as error:
        result = DrillResult(
            name=drill.name,
            outcome="failed",
            said=str(error),
            seen={},
            limit="the drill runs to its end",
            advice=f"see torchrun.log or log.txt in the folders of {stage.folder} for the ranks' "
            "own messages",
        )
    return dataclasses.replace(result, seconds=round(time.monotonic() - began, 1))


def _too_few(decision: Decision) -> str:
    """Why the real shape cannot be trained here."""
    ranks, gpus = decision.parallelism.num_ranks, torch.cuda.device_count()
    if gpus >= ranks or (not gpus and ranks == 1):
        return ""
    return (
        f"the real shape is for {counted(ranks, 'rank')}, this machine has {counted(gpus, 'GPU')}: "
        "without --full a "
        "scaled-down copy is rehearsed"
    )
