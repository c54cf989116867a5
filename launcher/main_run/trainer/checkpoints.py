"""Checkpoints of the main run: their tensors, their folders, and the choice of one to resume from.

A checkpoint is written to a folder `step-00000020.part`. The last file is the manifest, which has
the sha256 of every other file. Then the folder is renamed to `step-00000020`, so a checkpoint is
complete or absent. Before a run resumes from a checkpoint, its files are hashed again. A damaged
checkpoint is renamed to `.corrupt` and kept, and the run resumes from the one before it.

A checkpoint holds weights, optimizer moments, the step, the digest of the launch config, and the
state of callbacks. It needs no state of the data or of a random generator: the data order and the
schedule are functions of the step, and nothing is drawn at random while training.

The tensors are read with torch's restricted unpickler. The index file of
torch.distributed.checkpoint is a plain pickle, so `checkpoint_index` checks it first.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_map

from forerun._launcher.main_run.checkpoint_folders import (
    CheckpointError,
    CorruptError,
    RefusedCheckpoint,
    explain_expected_checkpoint,
    list_complete_checkpoints,
    name_checkpoint,
)
from forerun._launcher.main_run.trainer.checkpoint_index import INDEX, check_index
from forerun._proxies.core import canon
from forerun._proxies.core.plain_files import read_plain

_Value = TypeVar("_Value")

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The content of a checkpoint."""

    schema_version: int = SCHEMA_VERSION
    digest: str
    """Digest of the launch config of the run."""
    step: int
    """Number of optimizer steps done."""
    files: dict[str, str] = field(default_factory=dict)
    """Sha256 of each file, by name."""
    carried: dict[str, object] = field(default_factory=dict)
    """State of callbacks, as JSON, by name of the class."""
    num_rollbacks: int = 0
    """Number of rollbacks that the run had made by then."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _SignedManifest:
    """The content of the manifest's file."""

    manifest: Manifest
    sha256: str
    """Sha256 of the manifest's canonical JSON."""


def get_checkpoint_folder(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` optimizer steps."""
    return root / name_checkpoint(step)


# ---- Tensors ----


def stage_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copy this rank's weights and moments to the host's memory, and return them; collective."""
    weights, moments = get_state_dict(model, optimizer)

    def copy(value: Any) -> Any:
        return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value

    return cast(dict[str, Any], tree_map(copy, {"model": weights, "optimizer": moments}))


def write_tensors(
    folder: Path, state: dict[str, Any], group: dist.ProcessGroup | None = None
) -> dict[str, str]:
    """Write this rank's part of a staged state into `folder`; collective over `group`.

    Returns:
        Sha256 of each file that this rank wrote, by name. Rank 0's files include the index.

    Raises:
        CheckpointError: A rank could not write; raised on all of them.
        OSError: This rank cannot read what it wrote.
    """
    # The state is in the host's memory. If a GPU is visible, torch's writer would wait every few
    # tensors for the kernels that the training has launched. The device of a new thread is the
    # first GPU, so all ranks would also open contexts on that GPU.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    try:
        save(state, checkpoint_id=folder, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        causes = {f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items()}
        raise CheckpointError("; ".join(sorted(causes))) from error
    rank = dist.get_rank(group)
    files = [*folder.glob(f"__{rank}_*"), *([folder / INDEX] if rank == 0 else [])]
    return {file.name: canon.hash_file(file) for file in files}


def read_tensors(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and moments, resharded if the number of ranks changed; collective.

    Raises:
        CorruptError: See `check_index`.
    """
    check_index(folder)
    weights, moments = get_state_dict(model, optimizer)
    # The tensors are those of model and optimizer, so this fills them in place. Only the learning
    # rates of the saved groups are used: their other entries choose kernels of another device.
    load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    saved_groups = cast(list[dict[str, Any]], moments["param_groups"])
    for group, saved_group in zip(optimizer.param_groups, saved_groups, strict=True):
        group["lr"] = saved_group["lr"]


def read_saved_tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint, unsharded, by its name.

    Raises:
        CorruptError: See `check_index`.
    """
    check_index(folder)
    entries = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there is no process group
        load(dict(tensors), checkpoint_id=folder, no_dist=True)
    return tensors


# ---- Folders: begun, completed, removed; one rank only ----


def begin(root: Path, step: int) -> Path:
    """Create the empty folder in which a checkpoint is written, and remove what an interrupted save
    left.
    """
    canon.make_folder(root)
    for left_over in root.glob("*.part"):
        shutil.rmtree(left_over)
    part = get_checkpoint_folder(root, step).with_suffix(".part")
    part.mkdir()
    return part


def complete(part: Path, manifest: Manifest, *, keep: int, reach_steps: int = 0) -> Path:
    """Complete the checkpoint in a written folder, and delete those that are no longer kept.

    Args:
        part: Folder that `begin` made, with all files except the manifest.
        manifest: Content of the checkpoint.
        keep: See `choose_kept_steps`.
        reach_steps: See `choose_kept_steps`.

    Returns:
        The checkpoint's final folder.
    """
    signed = _SignedManifest(manifest=manifest, sha256=canon.compute_content_id(manifest))
    canon.write_atomic(part / MANIFEST, canon.to_pretty_json(signed))
    final = part.with_suffix("")
    part.rename(final)
    canon.sync_folder(final.parent)
    folders = list_complete_checkpoints(final.parent)
    for step in folders.keys() - choose_kept_steps(list(folders), keep, reach_steps):
        _discard(folders[step])
    return final


def choose_kept_steps(steps: list[int], keep: int, reach_steps: int) -> set[int]:
    """Return the steps whose checkpoints are kept.

    These are the newest `keep` steps. A run that may roll back by itself also keeps one step that
    lies at least `reach_steps` back, and the next newer step, which will replace it. So the oldest
    kept step lies between `reach_steps` and twice as many steps back.

    Args:
        steps: Steps of all complete checkpoints, newest first.
        keep: Number of newest checkpoints to keep; less than one counts as one.
        reach_steps: Steps by which a rollback may go back; 0 if the run never does.
    """
    kept = set(steps[: max(keep, 1)])
    if reach_steps:
        old = [step for step in steps if step <= steps[0] - reach_steps]
        kept |= {*old[:1], steps[-len(old) - 1]}
    return kept


def _discard(folder: Path) -> None:
    # Rename first: an interrupted deletion must not leave half a checkpoint under a final name.
    shutil.rmtree(folder.rename(folder.with_suffix(".part")))


# ---- Finding the checkpoint to resume from; one rank only ----


def find_newest_good(
    root: Path,
    digest: str,
    report: Callable[[RefusedCheckpoint], object] = lambda _: None,
    *,
    usable: Callable[[Manifest], bool] = lambda _: True,
    may_begin: bool = True,
) -> Manifest | None:
    """Return the newest usable checkpoint whose files all have their hashes; None to begin at
    step 0.

    Args:
        root: Folder of the run's checkpoints.
        digest: Digest of the run's launch config.
        report: Called with each checkpoint that is skipped. Damaged checkpoints are renamed
            `.corrupt`. Unusable checkpoints are deleted once another one, or step 0, is chosen.
        usable: Returns whether a checkpoint belongs to the run as it is now.
        may_begin: Whether a run that has saved checkpoints may begin at step 0 if none is usable.

    Raises:
        CorruptError: There are damaged checkpoints, and no good one.
        CheckpointError: A checkpoint belongs to another launch config or cannot be read, or there
            is no usable checkpoint although the run must not begin at step 0.
    """
    unusable: dict[int, Path] = {}
    manifest = None
    for step, folder in list_complete_checkpoints(root).items():
        try:
            candidate = _read_manifest(folder)
            check_digest(folder, candidate.digest, digest)
            if not usable(candidate):
                unusable[step] = folder
                continue
            _check_files(folder, candidate)
            check_index(folder)
            manifest = candidate
            break
        except CorruptError as error:
            text = f"checkpoint {folder.name} is corrupt ({error}): kept as {_quarantine(folder)}"
            report(RefusedCheckpoint(step=step, text=text, corrupt=True))
    if manifest is None:
        _refuse_to_begin(root, digest, [*unusable.values()], may_begin)
    for step, folder in unusable.items():
        text = f"checkpoint {folder.name} is of the part that a rollback undid: deleted"
        report(RefusedCheckpoint(step=step, text=text, corrupt=False))
        _discard(folder)
    return manifest


def _refuse_to_begin(root: Path, digest: str, unusable: list[Path], may_begin: bool) -> None:
    """Raise the error of a run that has no good checkpoint and must not begin at step 0."""
    run_dir, corrupt = root.parent, sorted(folder.name for folder in root.glob("*.corrupt*"))
    if corrupt:
        problem = f"no good checkpoint, only {', '.join(corrupt)}"
    elif may_begin:
        return
    elif unusable:
        names = ", ".join(sorted(folder.name for folder in unusable))
        problem = f"no checkpoint old enough to go back to, only {names}"
    elif evidence := explain_expected_checkpoint(run_dir, digest):
        problem = f"no checkpoint, although {evidence}"
    else:
        return
    raise (CorruptError if corrupt else CheckpointError)(
        f"{root} holds {problem}: restore one from a backup, or move {run_dir} away to begin "
        "at step 0"
    )


def check_checkpoint(folder: Path, digest: str) -> Manifest:
    """Check every file of a checkpoint by its hash, and return the manifest.

    Raises:
        CheckpointError: The checkpoint is damaged, or belongs to another launch config.
    """
    try:
        manifest = _read_manifest(folder)
        _check_files(folder, manifest)
    except CorruptError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    check_digest(folder, manifest.digest, digest)
    return manifest


def check_digest(path: Path, recorded: str, digest: str) -> None:
    """Check that a file or folder of a run belongs to the launch config `digest`.

    Raises:
        CheckpointError: It belongs to the launch config with the digest `recorded`.
    """
    if recorded != digest:
        raise CheckpointError(
            f"{path} belongs to the launch config {recorded[:16]}..., this one is "
            f"{digest[:16]}...: resume with that config, or start this one in another folder"
        )


def _read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder, after a check of its hash and its step."""
    try:
        content = canon.parse(_read(folder / MANIFEST, read_plain))
        signed = canon.decode(_SignedManifest, content)
    except canon.CanonError as error:
        raise CorruptError(f"{MANIFEST}: {error}") from error
    if canon.compute_content_id(signed.manifest) != signed.sha256:
        raise CorruptError("the manifest does not match its hash")
    if get_checkpoint_folder(folder.parent, signed.manifest.step) != folder:
        raise CorruptError(f"the manifest is for step {signed.manifest.step}")
    return signed.manifest


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Check that every file has its hash."""
    for name, sha256 in manifest.files.items():
        if _read(folder / name, canon.hash_file) != sha256:
            raise CorruptError(f"{name} does not match its hash")


def _read(path: Path, read: Callable[[Path], _Value]) -> _Value:
    """Read a file of a checkpoint.

    Raises:
        CorruptError: The file is missing, so the checkpoint is damaged.
        CheckpointError: The file cannot be read, for example because of a stale handle or a failing
            disk. That says nothing about its content.
    """
    try:
        return read(path)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise CorruptError(f"{path.name} is missing: {error.strerror}") from error
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}); no checkpoint was changed. Try again when "
            f"the disk answers, or move {path.parent} away to resume from the one before"
        ) from error


def _quarantine(folder: Path) -> str:
    """Rename a damaged checkpoint to the first free name, and return that name."""
    target, number = folder.with_suffix(".corrupt"), 1
    while target.exists():
        number += 1
        target = folder.with_suffix(f".corrupt{number}")
    return folder.rename(target).name
