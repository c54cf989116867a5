"""A checkpoint of the embedded trainer as a folder that `transformers.AutoModelForCausalLM` loads.

Granite is Llama's architecture with muP's four multipliers as fields of its config, so every tensor
is written as it was trained, under another name. The file format is safetensors': eight bytes of
the header's length, a JSON header, the tensors (https://github.com/huggingface/safetensors,
"Format").
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.run_files import CHECKPOINTS, complete_folders
from launcher.exporters.export_writer import put, scratch_for
from launcher.exporters.fidelity import ExportError
from launcher.exporters.trainers.huggingface import CONFIG_FILE, model_config, parameter_names
from launcher.frozen.frozen import Decision
from launcher.trainer import checkpoints
from proxies.core import canon
from proxies.core.shape import parameter_shapes
from proxies.data.tokens import TOKENIZER_FILE

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS_FILE = "model.safetensors"
_KEPT = "model."
"""What the trainer's checkpoint puts before a weight's name; moments are below `optimizer.`."""
_OURS = {WEIGHTS_FILE, CONFIG_FILE, TOKENIZER_FILE, "tokenizer_config.json"}


def checkpoint_in(place: Path) -> Path:
    """The checkpoint that `place` is, or the newest complete one of the run folder that it is.

    Raises:
        ExportError: it is neither.
    """
    if (place / checkpoints.MANIFEST).is_file():
        return place
    found = (
        {**complete_folders(place), **complete_folders(place / CHECKPOINTS)}
        if place.is_dir()
        else {}
    )
    if not found:
        raise ExportError(
            "weights",
            [f"--weights {place}: must be a checkpoint, step-NNNNNNNN, or a run with some"],
        )
    return found[max(found)]


def write_weights(
    decision: Decision, checkpoint: Path, out: Path, corpus: Path | None
) -> tuple[int, str]:
    """Write config, weights and tokenizer into `out`, wholly or not at all.

    Args:
        decision: the config that the checkpoint was trained with.
        checkpoint: its folder.
        out: a new folder, or one that an earlier call wrote.
        corpus: where the tokenizer's file lies; None: nowhere.

    Returns:
        The number of weights, and what stands in for a tokenizer where none is written; else empty.

    Raises:
        ExportError: what Granite cannot express, tensors that are not the config's, or a folder
            with other files; all at once.
        CheckpointError: the checkpoint is not whole, or of another config.
        IndexRefusedError: its index would call what no checkpoint needs.
    """
    problems = _unfit(decision)
    if strangers := sorted(
        {path.name for path in out.iterdir()} - _OURS if out.is_dir() else set()
    ):
        problems.append(
            f"--out {out}: it holds other files, such as {strangers[0]}: choose an empty folder"
        )
    if problems:
        raise ExportError("weights", problems)
    checkpoints.whole(checkpoint, decision.digest)
    saved = checkpoints.saved_tensors(checkpoint)
    names = parameter_names(decision.shape)
    tensors = {
        name.removeprefix(_KEPT): tensor for name, tensor in saved.items() if name.startswith(_KEPT)
    }
    wanted = parameter_shapes(decision.shape)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if problems := [
        f"{name} is {found.get(name, 'missing')} in the checkpoint: must be "
        f"{wanted.get(name, 'absent')}"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name)
    ]:
        raise ExportError("weights", problems)
    with scratch_for(out.resolve()) as scratch:
        canon.write_atomic(scratch / CONFIG_FILE, canon.pretty(model_config(decision)))
        write_safetensors(
            scratch / WEIGHTS_FILE, {names[name]: tensor for name, tensor in tensors.items()}
        )
        without = _tokenizer(decision, corpus, scratch)
        put(scratch, out.resolve())
    return sum(tensor.numel() for tensor in tensors.values()), without


def _unfit(decision: Decision) -> list[str]:
    """What of a config Granite cannot express."""
    if decision.own is not None:
        return [
            "own: your own trainer trains this config, and forerun does not know its checkpoints"
        ]
    if decision.model is not None:
        return [
            (
                "model: your own model: its code, not forerun, knows what its weights are called "
                "elsewhere"
            )
        ]
    shape, problems = decision.shape, list[str]()
    if shape.family != "llama":
        problems.append(
            f"shape.family = {shape.family!r}: only a llama-like model has a place in Granite"
        )
    if shape.qk_norm:
        problems.append("shape.qk_norm = true: Granite's attention has none")
    return problems


def _tokenizer(decision: Decision, corpus: Path | None, out: Path) -> str:
    """Copy the tokenizer that the config names; else why there is none."""
    name = decision.data.tokenizer
    if name == "bytes":
        return "no tokenizer: a token is a byte"
    file = None if corpus is None else corpus / TOKENIZER_FILE
    if file is None or not file.is_file() or f"sha256:{canon.file_sha256(file)}" != name:
        return (
            f"no tokenizer: {TOKENIZER_FILE} with {name[:23]}... is not in the corpus; copy it here"
        )
    shutil.copyfile(file, out / TOKENIZER_FILE)
    canon.write_atomic(
        out / "tokenizer_config.json", canon.pretty({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return ""


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write float32 tensors in the order of their names."""
    header, first = dict[str, object]({"__metadata__": {"format": "pt"}}), 0
    for name, tensor in sorted(tensors.items()):
        last = first + 4 * math.prod(tensor.shape)
        header[name] = {"dtype": "F32", "shape": [*tensor.shape], "data_offsets": [first, last]}
        first = last
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in sorted(tensors.items()):
            tensor.float().contiguous().numpy().astype("<f4", copy=False).tofile(file)
