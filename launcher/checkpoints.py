"""Checkpoints of the main run: complete or not there, hashed file by file, newest good one first.

A checkpoint is written as `step-00000020.part`, its manifest (the sha256 of every file) last, and renamed to
`step-00000020` when all of it is on disk. It is hashed again before it is loaded; one that does not match is renamed
`.corrupt`, kept for inspection, and the one before it is used. State: weights, optimizer moments, step and digest; the
data order and the schedule are functions of the step.

The tensors are read with torch's restricted unpickler, but the index file `.metadata` of torch.distributed.checkpoint
is a plain pickle of torch's: before torch opens it, its hash is checked, which tells accident, and the names that it
would call are held against a short list (`checkpoint_index`), which stops a forger's.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from launcher.checkpoint_index import check_index
from proxies import canon

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1
_COMPLETE = re.compile(r"step-(\d{8})")


class CheckpointError(ValueError):
    """Checkpoints that this run must not go on from."""


class CorruptError(CheckpointError):
    """There are checkpoints, and none of them is whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint holds, written last."""

    schema_version: int
    digest: str
    """Of the launch config it belongs to."""
    step: int
    """Optimizer steps done."""
    files: dict[str, str]
    """Name -> sha256."""


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint after `step` optimizer steps lies."""
    return root / f"step-{step:08d}"


def part_of(root: Path, step: int) -> Path:
    """Where that checkpoint lies until it is complete."""
    return folder_of(root, step).with_suffix(".part")


def write_tensors(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Every rank writes its part of weights and moments into `folder`; collective."""
    weights, moments = get_state_dict(model, optimizer)
    save({"model": weights, "optimizer": moments}, checkpoint_id=folder)


def read_tensors(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and moments, resharded where the number of ranks changed; collective.

    Raises:
        IndexRefusedError: see `check_index`.
    """
    check_index(folder)
    weights, moments = get_state_dict(model, optimizer)
    # Filled in place.
    load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def begin(root: Path, step: int) -> Path:
    """The empty folder to write a checkpoint into; what an interrupted save left is removed. One rank only."""
    root.mkdir(parents=True, exist_ok=True)
    for left_over in root.glob("*.part"):
        shutil.rmtree(left_over)
    part = part_of(root, step)
    part.mkdir()
    return part


def complete(part: Path, *, digest: str, step: int, keep: int) -> Path:
    """Make the written folder a checkpoint, then delete the oldest beyond `keep`. One rank only."""
    names = sorted(file.name for file in part.iterdir())
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        digest=digest,
        step=step,
        files={name: canon.file_sha256(part / name) for name in names},
    )
    content = canon.to_json(manifest)
    canon.write_atomic(part / MANIFEST, canon.pretty({"manifest": content, "sha256": canon.content_id(content)}))
    final = part.with_suffix("")
    part.rename(final)
    canon.sync_folder(final.parent)
    for old in _complete_folders(final.parent)[max(keep, 1) :]:
        # Renamed first: a deletion that is cut short must not leave half a checkpoint under a good name.
        shutil.rmtree(old.rename(old.with_suffix(".part")))
    return final


def newest_good(root: Path, digest: str, warn: list[str]) -> Manifest | None:
    """The newest checkpoint whose every file has its hash, or None where there never was one. One rank only.

    A newer one that is not whole is renamed `.corrupt`, and `warn` is told.

    Raises:
        CorruptError: there are checkpoints, none of them good.
        CheckpointError: the newest good one is of another launch config.
    """
    for folder in _complete_folders(root):
        manifest, problems = _verify(folder)
        if manifest is None:
            kept = _quarantine(folder)
            warn.append(f"checkpoint {folder.name} is corrupt ({'; '.join(problems)}): kept as {kept.name}")
            continue
        if manifest.digest != digest:
            raise CheckpointError(
                f"{folder} is of the launch config {manifest.digest[:16]}..., this is {digest[:16]}...: "
                "resume with that config, or start this one in another folder"
            )
        return manifest
    if corrupt := sorted(folder.name for folder in root.glob("*.corrupt*")):
        raise CorruptError(
            f"{root} holds no good checkpoint, only {', '.join(corrupt)}: restore one from a backup, or move them "
            "away to start again from step 0"
        )
    return None


def _complete_folders(root: Path) -> list[Path]:
    """Newest first."""
    if not root.is_dir():
        return []
    return sorted((f for f in root.iterdir() if _COMPLETE.fullmatch(f.name)), reverse=True)


def _verify(folder: Path) -> tuple[Manifest | None, list[str]]:
    """The manifest if the checkpoint is whole, else what is wrong with it."""
    try:
        value = canon.parse((folder / MANIFEST).read_bytes())
        if not isinstance(value, dict) or canon.content_id(value.get("manifest")) != value.get("sha256"):
            return None, ["the manifest does not have its hash"]
        manifest = canon.decode(Manifest, value.get("manifest"))
    except OSError as error:
        return None, [f"{MANIFEST} cannot be read: {error.strerror}"]
    except canon.CanonError as error:
        return None, [f"{MANIFEST}: {error}"]
    problems = []
    if folder_of(folder.parent, manifest.step) != folder:
        problems.append(f"the manifest is of step {manifest.step}")
    for name, wanted in manifest.files.items():
        try:
            if canon.file_sha256(folder / name) != wanted:
                problems.append(f"{name} does not have its hash")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
    return (None if problems else manifest), problems


def _quarantine(folder: Path) -> Path:
    """Rename to the first free name."""
    target, number = folder.with_suffix(".corrupt"), 1
    while target.exists():
        number += 1
        target = folder.with_suffix(f".corrupt{number}")
    return folder.rename(target)
