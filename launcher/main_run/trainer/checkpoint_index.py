"""The index of a torch checkpoint, `.metadata`, checked before torch loads it.

The index is a pickle, and loading a pickle may call anything. Its instructions are read with
`pickletools`, never carried out, and the names that loading would look up are compared with a short
list. A name is either an argument of the instruction (GLOBAL), or consists of the two texts that
were last pushed on the pickle's stack (STACK_GLOBAL), directly or from its memo. Anything else is
refused.
"""

from __future__ import annotations

import pickletools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch

from forerun._launcher.main_run.checkpoint_folders import CorruptError
from forerun._proxies.core.plain_files import open_plain

INDEX = ".metadata"
_ALLOWED = {
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
_REFUSED_OPCODES = re.compile("INST|OBJ|EXT.|(BIN)?PERSID|((LONG_)?BIN)?PUT")
"""Instructions that Python's own pickler does not write for an index."""
_ADVICE = "nothing of it was loaded; copy the checkpoint again from where it was written"


def check_index(folder: Path) -> None:
    """Check that the index of a checkpoint names only what torch's own index names.

    Raises:
        CorruptError: It names something else, or is not a pickle. Nothing was carried out.
        OSError: It cannot be read.
    """
    path = folder / INDEX
    try:
        with open_plain(path) as file:  # the index of many ranks may be large
            foreign = sorted({name for name in _find_names(file.read()) if not _is_allowed(name)})
    except (ValueError, IndexError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptError(
            f"{path} is not the index of a checkpoint ({error}): {_ADVICE}"
        ) from error
    if foreign:
        raise CorruptError(
            f"{path} would call {', '.join(foreign)}, which the index of a checkpoint never does: "
            f"{_ADVICE}"
        )


def _is_allowed(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    is_dtype = module == "torch" and isinstance(getattr(torch, attribute, None), torch.dtype)
    return is_dtype or attribute in _ALLOWED.get(module, ())


def _find_names(pickled: bytes) -> Iterator[str]:
    """Yield every dotted name that loading would look up; ValueError if one is not known."""
    memo: list[str | None] = []
    pushed: list[str | None] = [None, None]  # texts of the last two instructions that push
    for opcode, argument, position in pickletools.genops(pickled):
        name = opcode.name
        if _REFUSED_OPCODES.fullmatch(name):
            raise ValueError(f"{name} at byte {position}")
        if name == "MEMOIZE":
            memo.append(pushed[-1])
        if name in ("MEMOIZE", "FRAME", "PROTO"):  # these push nothing
            continue
        if name == "GLOBAL":
            yield str(argument).replace(" ", ".")
        elif name == "STACK_GLOBAL":
            if None in pushed:
                raise ValueError(f"an indirect name at byte {position}")
            yield f"{pushed[0]}.{pushed[1]}"
        text = argument if isinstance(argument, str) and "UNICODE" in name else None
        if name in ("GET", "BINGET", "LONG_BINGET"):
            text = memo[cast(int, argument)]
        pushed = [pushed[-1], text]
