"""Checkpoints of the main run: complete or not there, hashed file by file, newest good one first.

A checkpoint is written as `step-00000020.part`, its manifest (the sha256 of every file) last, and
renamed to `step-00000020` when all of it is on disk. It is hashed again before it is loaded; one
that does not match is renamed `.corrupt`, kept for inspection, and the one before it is used.
State: weights, optimizer moments, step, digest, and what hooks carry on; the data order and the
schedule are functions of the step, and nothing draws at random on the way.

The tensors are read with torch's restricted unpickler, but the index file `.metadata` of
torch.distributed.checkpoint is a plain pickle of torch's: before torch opens it, its hash is
checked, which tells accident, and the names that it would call are looked up in a short list
(`checkpoint_index`), which stops a forger's.
"""

from __future__ import annotations

import pickletools
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from launcher.base.run_files import RefusedCheckpoint, complete_folders, name_checkpoint
from proxies.core import canon
from proxies.core.errors import ExitCode, InputError
from proxies.core.plain_files import open_plain, read_plain

# The index of a torch checkpoint, `.metadata`, looked at before torch opens it: it is a pickle, and
# a pickle may call anything. Its instructions are read, never carried out, and the names that it
# would call are looked up in a list.
#
# Python's `pickletools` gives the instructions. A name is either spelled out (GLOBAL) or the two
# texts pushed last (STACK_GLOBAL), themselves or from the memo; all that is not plainly that is
# refused.

INDEX = ".metadata"
_OWN = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
    "collections": ("OrderedDict",),
    "torch": ("Size",),
}
_REFUSED = {
    "INST",
    "OBJ",
    "EXT1",
    "EXT2",
    "EXT4",
    "PERSID",
    "BINPERSID",
    "PUT",
    "BINPUT",
    "LONG_BINPUT",
}
"""What Python's own pickler does not write for such an index."""
_NO_EFFECT = {"MEMOIZE", "FRAME", "PROTO"}
"""On the stack of what is being built."""
_FROM_MEMO = {"GET", "BINGET", "LONG_BINGET"}


class IndexRefusedError(InputError):
    """A checkpoint's index that would call what no checkpoint needs."""

    exit_code = ExitCode.CORRUPT


def check_index(folder: Path) -> None:
    """See that the index of a checkpoint names nothing but what torch's own names.

    Raises:
        IndexRefusedError: it does, or is no pickle; nothing of it was carried out.
        OSError: it cannot be read.
    """
    path = folder / INDEX
    try:
        with open_plain(path) as file:  # of many ranks it may be large
            foreign = sorted({name for name in _names(file.read()) if not _known(name)})
    except (ValueError, IndexError, UnicodeDecodeError, RecursionError) as error:
        raise IndexRefusedError(
            f"{path} is not the index of a checkpoint ({error}): {_ADVICE}"
        ) from error
    if foreign:
        raise IndexRefusedError(
            f"{path} would call {', '.join(foreign)}, which the index of a checkpoint never does: "
            f"{_ADVICE}"
        )


def find_index_problem(folder: Path) -> str:
    """Return the reason to refuse a checkpoint's index although its hash is right; empty if there
    is none.

    Raises:
        CheckpointError: It cannot be read, which proves nothing against it.
    """
    try:
        check_index(folder)
    except IndexRefusedError as error:
        return str(error)
    except OSError as error:
        raise _unread(folder / INDEX, error) from error
    return ""


_ADVICE = "nothing of it was loaded; copy the checkpoint again from where it was written"


def _known(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return last in _OWN.get(module, ()) or (
        module == "torch" and isinstance(getattr(torch, last, None), torch.dtype)
    )


def _names(pickled: bytes) -> Iterator[str]:
    """Every name that loading would look up, dotted. Raises ValueError where that is unknown."""
    memo: list[str | None] = []
    # the texts of the last two instructions that push something
    pushed: list[str | None] = [None, None]
    for opcode, argument, position in pickletools.genops(pickled):
        if opcode.name in _REFUSED:
            raise ValueError(f"{opcode.name} at byte {position}")
        if opcode.name == "MEMOIZE":
            memo.append(pushed[-1])
        if opcode.name in _NO_EFFECT:
            continue
        text = argument if isinstance(argument, str) and "UNICODE" in opcode.name else None
        if opcode.name in _FROM_MEMO:
            text = memo[cast(int, argument)]
        if opcode.name == "GLOBAL":
            yield str(argument).replace(" ", ".")
        elif opcode.name == "STACK_GLOBAL":
            module, name = pushed
            if module is None or name is None:
                raise ValueError(f"an indirect name at byte {position}")
            yield f"{module}.{name}"
        pushed = [pushed[-1], text]


MANIFEST = "manifest.json"
SCHEMA_VERSION = 1


class CheckpointError(InputError):
    """Checkpoints that this run must not resume from."""


class CorruptError(CheckpointError):
    """There are checkpoints, and none of them is whole."""

    exit_code = ExitCode.CORRUPT


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint holds, written last."""

    schema_version: int
    digest: str
    """The digest of the launch config it belongs to."""
    step: int
    """Optimizer steps done."""
    files: dict[str, str]
    """Name -> sha256."""
    carried: dict[str, object] = field(default_factory=dict)
    """Name of a hook's class -> what it carries over a restart, as JSON."""
    num_rollbacks: int = 0
    """That the run had made by then."""


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint after `step` optimizer steps lies."""
    return root / name_checkpoint(step)


def part_of(root: Path, step: int) -> Path:
    """Where that checkpoint lies until it is complete."""
    return folder_of(root, step).with_suffix(".part")


def staged(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """This rank's weights and moments as they are now, copied to the host's memory; collective."""
    weights, moments = get_state_dict(model, optimizer)
    copied: dict[str, Any] = _copied({"model": weights, "optimizer": moments})
    return copied


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return {key: _copied(item) for key, item in value.items()} if isinstance(value, dict) else value


def write_tensors(
    folder: Path, state: dict[str, Any], group: dist.ProcessGroup | None = None
) -> dict[str, str]:
    """Every rank writes its part of a staged state into `folder`; collective over `group`.

    Returns:
        Name -> sha256 of the files that this rank wrote; the first one's index among its own.

    Raises:
        CheckpointError: a rank could not write; raised on all of them. Or this one cannot read what
            it wrote.
    """
    # What is written is in the host's memory. With a GPU in sight torch's writer would wait, at
    # every few tensors, for what the training has begun there; of a thread, whose device is the
    # first, ranks would open contexts on that too.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    try:
        save(state, checkpoint_id=folder, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        causes = {f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items()}
        raise CheckpointError("; ".join(sorted(causes))) from error
    rank = dist.get_rank(group)
    mine = [*folder.glob(f"__{rank}_*"), *([folder / INDEX] if rank == 0 else [])]
    try:
        return {file.name: canon.file_sha256(file) for file in mine}
    except OSError as error:
        raise CheckpointError(str(error)) from error


def read_tensors(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load weights and moments, resharded where the number of ranks changed; collective.

    Raises:
        IndexRefusedError: see `check_index`.
    """
    check_index(folder)
    weights, moments = get_state_dict(model, optimizer)
    # Filled in place.
    load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    own: list[dict[str, Any]] = [
        {name: group[name] for name in ("fused", "foreach") if name in group}
        for group in optimizer.param_groups
    ]
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    for group, kernels in zip(optimizer.param_groups, own, strict=True):
        group.update(kernels)  # this device's, not those of the one that saved


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, by its name.

    Raises:
        IndexRefusedError: see `check_index`.
    """
    check_index(folder)
    kept = FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in kept.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is what is wanted
        load(dict(tensors), checkpoint_id=folder, no_dist=True)
    return tensors


def manifest_of(root: Path, step: int) -> Manifest:
    """Return the manifest of the checkpoint after `step` updates, for every rank once one has found
    it good.

    Raises:
        CheckpointError: it is gone, or no longer whole.
    """
    manifest, problems = _read_manifest(folder_of(root, step))
    if manifest is None:
        raise CheckpointError(f"{folder_of(root, step)}: {'; '.join(problems)}")
    return manifest


def whole(folder: Path, digest: str) -> Manifest:
    """A checkpoint's manifest, once every file has its hash and it is of the launch config
    `digest`; it stays.

    Raises:
        CheckpointError: it is not whole, or of another config.
    """
    manifest, problems = _read_manifest(folder)
    problems += _differing(folder, manifest.files) if manifest else []
    if manifest and manifest.digest != digest:
        problems.append(
            f"it belongs to the launch config {manifest.digest[:16]}..., this one is "
            f"{digest[:16]}..."
        )
    if manifest is None or problems:
        raise CheckpointError(f"{folder}: {'; '.join(problems)}")
    return manifest


def begin(root: Path, step: int) -> Path:
    """The empty folder to write a checkpoint into; what an interrupted save left is removed. One
    rank only.
    """
    canon.make_folder(root)
    for left_over in root.glob("*.part"):
        shutil.rmtree(left_over)
    part = part_of(root, step)
    part.mkdir()
    return part


def complete(part: Path, manifest: Manifest, *, keep: int, reach_steps: int = 0) -> Path:
    """Make the written folder a checkpoint, then delete older ones: see `kept_steps`. One rank
    only.
    """
    content = canon.to_json(manifest)
    canon.write_atomic(
        part / MANIFEST, canon.pretty({"manifest": content, "sha256": canon.content_id(content)})
    )
    final = part.with_suffix("")
    part.rename(final)
    canon.sync_folder(final.parent)
    folders = complete_folders(final.parent)
    for step in folders.keys() - kept_steps(list(folders), keep, reach_steps):
        _discard(folders[step])
    return final


def kept_steps(steps: list[int], keep: int, reach_steps: int) -> set[int]:
    """Which checkpoints stay, of those after `steps` updates, newest first: the newest `keep`, one
    at least.

    A run that may go back by itself also keeps one that lies `reach_steps` back or more, and the
    one that will take its place: so it has one between once and twice that old.
    """
    kept = set(steps[: max(keep, 1)])
    if reach_steps:
        old = [step for step in steps if step <= steps[0] - reach_steps]
        kept |= {*old[:1], steps[-len(old) - 1]}
    return kept


def _discard(folder: Path) -> None:
    # Renamed first: a deletion that is cut short must not leave half a checkpoint under a good
    # name.
    shutil.rmtree(folder.rename(folder.with_suffix(".part")))


def newest_good(
    root: Path,
    digest: str,
    refused: list[RefusedCheckpoint],
    usable: Callable[[Manifest], bool] = lambda _: True,
    *,
    may_begin: bool = True,
    expected: str = "",
    find_problem: Callable[[Path], str] = lambda _: "",
) -> Manifest | None:
    """The newest usable checkpoint whose every file has its hash, or None where there is none. One
    rank only.

    A newer one that is not whole is renamed `.corrupt`. One that is not usable is deleted, once it
    is known what to go on from; `may_begin`: from step 0, where no usable one is left. Both are
    added to `refused`. `expected`: why there must be one, in words; empty where there may be none.
    `find_problem`: what is wrong with a folder whose files all have their hashes.

    Raises:
        CorruptError: there are checkpoints, none of them good.
        CheckpointError: the newest one is of another launch config, or cannot be read, which proves
            nothing against it; or none is usable, or there is none although one is expected.
    """
    left: dict[int, Path] = {}
    for step, folder in complete_folders(root).items():
        manifest, problems = _read_manifest(folder)
        if manifest is not None:
            if manifest.digest != digest:
                raise CheckpointError(
                    f"{folder} belongs to the launch config {manifest.digest[:16]}..., this one is "
                    f"{digest[:16]}...: "
                    "resume with that config, or start this one in another folder"
                )
            if not usable(manifest):
                left[step] = folder
                continue
            problems = _differing(folder, manifest.files) or list(
                filter(None, [find_problem(folder)])
            )
        if manifest is None or problems:
            text = (
                f"checkpoint {folder.name} is corrupt ({'; '.join(problems)}): kept as "
                f"{_quarantine(folder).name}"
            )
            refused.append(RefusedCheckpoint(step=step, text=text, corrupt=True))
            continue
        _discard_left(left, refused)
        return manifest
    if corrupt := sorted(folder.name for folder in root.glob("*.corrupt*")):
        raise CorruptError(
            f"{root} holds no good checkpoint, only {', '.join(corrupt)}: restore one from a "
            "backup, or move "
            f"{root.parent} away to start from step 0"
        )
    if expected and not left:
        raise CheckpointError(
            f"{root} holds no checkpoint, although {expected}: put them back, or move "
            f"{root.parent} away to begin at "
            "step 0"
        )
    if left and not may_begin:
        raise CheckpointError(
            f"{root} holds no checkpoint old enough to go back to, only "
            f"{', '.join(sorted(folder.name for folder in left.values()))}: "
            f"restore one from a backup, or move {root.parent} away to start from step 0"
        )
    _discard_left(left, refused)
    return None


def _discard_left(folders: Mapping[int, Path], refused: list[RefusedCheckpoint]) -> None:
    for step, folder in folders.items():
        text = f"checkpoint {folder.name} is of the part that a rollback undid: deleted"
        refused.append(RefusedCheckpoint(step=step, text=text, corrupt=False))
        _discard(folder)


def _read_manifest(folder: Path) -> tuple[Manifest | None, list[str]]:
    """The manifest if it is whole and of its folder, else what is wrong with it."""
    try:
        value = canon.parse(read_plain(folder / MANIFEST))
        if not isinstance(value, dict) or canon.content_id(value.get("manifest")) != value.get(
            "sha256"
        ):
            return None, ["the manifest does not match its hash"]
        manifest = canon.decode(Manifest, value.get("manifest"))
    except _ABSENT as error:
        return None, [f"{MANIFEST} is missing: {error.strerror}"]
    except OSError as error:
        raise _unread(folder / MANIFEST, error) from error
    except canon.CanonError as error:
        return None, [f"{MANIFEST}: {error}"]
    if folder_of(folder.parent, manifest.step) != folder:
        return None, [f"the manifest is for step {manifest.step}"]
    return manifest, []


def _differing(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Which files do not have their hash."""
    problems = []
    for name, wanted in files.items():
        try:
            if canon.file_sha256(folder / name) != wanted:
                problems.append(f"{name} does not match its hash")
        except _ABSENT as error:
            problems.append(f"{name} is missing: {error.strerror}")
        except OSError as error:
            raise _unread(folder / name, error) from error
    return problems


_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""The file is not there. Any other failed read (a stale handle, a disk that fails) says nothing of
what it holds."""


def _unread(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read ({error.strerror}); no checkpoint was changed. Try again when the "
        "disk answers, or "
        f"move {path.parent} away to resume from the one before"
    )


def _quarantine(folder: Path) -> Path:
    """Rename to the first free name."""
    target, number = folder.with_suffix(".corrupt"), 1
    while target.exists():
        number += 1
        target = folder.with_suffix(f".corrupt{number}")
    return folder.rename(target)
