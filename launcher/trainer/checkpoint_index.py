"""The index of a torch checkpoint, `.metadata`, looked at before torch opens it: it is a pickle, and a pickle may call
anything. Its instructions are read, never carried out, and the names that it would call are looked up in a list.

Python's `pickletools` gives the instructions. A name is either spelled out (GLOBAL) or the two texts pushed last
(STACK_GLOBAL), themselves or from the memo; all that is not plainly that is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch

INDEX = ".metadata"
_OWN = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath",), "pathlib._local": ("PosixPath",), "collections": ("OrderedDict",), "torch": ("Size",),
}  # fmt: skip
_REFUSED = {"INST", "OBJ", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "PUT", "BINPUT", "LONG_BINPUT"}
"""What Python's own pickler does not write for such an index."""
_NO_EFFECT = {"MEMOIZE", "FRAME", "PROTO"}
"""On the stack of what is being built."""
_FROM_MEMO = {"GET", "BINGET", "LONG_BINGET"}


class IndexRefusedError(ValueError):
    """A checkpoint's index that would call what no checkpoint needs."""


def check_index(folder: Path) -> None:
    """See that the index of a checkpoint names nothing but what torch's own names.

    Raises:
        IndexRefusedError: it does, or is no pickle; nothing of it was carried out.
        OSError: it cannot be read.
    """
    path = folder / INDEX
    try:
        foreign = sorted({name for name in _names(path.read_bytes()) if not _known(name)})
    except (ValueError, IndexError, UnicodeDecodeError, RecursionError) as error:
        raise IndexRefusedError(f"{path} is no index of a checkpoint ({error}): {_ADVICE}") from error
    if foreign:
        raise IndexRefusedError(f"{path} would call {', '.join(foreign)}, as no index of a checkpoint does: {_ADVICE}")


_ADVICE = "nothing of it was loaded; take the checkpoint from where it was written"


def _known(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return last in _OWN.get(module, ()) or (module == "torch" and isinstance(getattr(torch, last, None), torch.dtype))


def _names(pickled: bytes) -> Iterator[str]:
    """Every name that loading would look up, dotted. Raises ValueError where that cannot be told."""
    memo: list[str | None] = []
    pushed: list[str | None] = [None, None]  # the texts of the last two instructions that push something
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
                raise ValueError(f"a name at byte {position} that is not spelled out")
            yield f"{module}.{name}"
        pushed = [pushed[-1], text]
