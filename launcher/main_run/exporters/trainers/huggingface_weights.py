"""Export of a checkpoint of the embedded trainer as a folder that transformers loads.

Granite is Llama's architecture with muP's four multipliers as fields of its config, so every tensor
is written as it was trained, under another name.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import safetensors.torch

from forerun._launcher.main_run.checkpoint_folders import CHECKPOINTS, list_complete_checkpoints
from forerun._launcher.main_run.exporters.export_checks import ExportError
from forerun._launcher.main_run.exporters.export_writer import make_scratch, replace_folder
from forerun._launcher.main_run.exporters.trainers.huggingface import (
    CONFIG_FILE,
    build_model_config,
    parameter_names,
)
from forerun._launcher.main_run.frozen.frozen import Decision
from forerun._launcher.main_run.trainer import checkpoints
from forerun._proxies.core import canon
from forerun._proxies.core.shape import list_parameter_shapes
from forerun._proxies.data.tokens import TOKENIZER_FILE

WEIGHTS_FILE = "model.safetensors"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_PREFIX = "model."
"""Prefix of a weight's name in the trainer's checkpoint, which also has moments."""


def find_checkpoint(folder: Path) -> Path:
    """Return a folder that is a checkpoint, or the newest complete checkpoint of a run's folder.

    Raises:
        ExportError: The folder is neither.
    """
    if (folder / checkpoints.MANIFEST).is_file():
        return folder
    steps = list_complete_checkpoints(folder) | list_complete_checkpoints(folder / CHECKPOINTS)
    if not steps:
        problem = f"--weights {folder}: must be a checkpoint, step-NNNNNNNN, or a run with some"
        raise ExportError("weights", [problem])
    return steps[max(steps)]


def write_weights(
    decision: Decision, checkpoint: Path, out: Path, corpus: Path | None
) -> tuple[int, str]:
    """Write config, weights, and tokenizer into a folder, completely or not at all.

    Args:
        decision: The config that the checkpoint was trained with.
        checkpoint: Folder of the checkpoint.
        out: A new folder, or one that an earlier call wrote.
        corpus: Folder with the tokenizer's file; None if there is none.

    Returns:
        The number of weights, and the reason why no tokenizer is written; empty if one is.

    Raises:
        ExportError: Granite cannot express the model, the tensors are not those of the config, or
            the folder has other files. The error lists every problem.
        CheckpointError: The checkpoint is not complete, or belongs to another config.
        CorruptError: The index of the checkpoint would call something that none needs.
    """
    problems = _find_problems(decision)
    written = {WEIGHTS_FILE, CONFIG_FILE, TOKENIZER_FILE, _TOKENIZER_CONFIG}
    present = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if other_files := sorted(present - written):
        problems.append(
            f"--out {out}: it holds other files, such as {other_files[0]}: choose an empty folder"
        )
    if problems:
        raise ExportError("weights", problems)
    checkpoints.check_checkpoint(checkpoint, decision.digest)
    tensors = {
        name.removeprefix(_PREFIX): tensor
        for name, tensor in checkpoints.read_saved_tensors(checkpoint).items()
        if name.startswith(_PREFIX)
    }
    expected = list_parameter_shapes(decision.shape)
    saved = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = [
        f"{name} is {saved.get(name, 'missing')} in the checkpoint: must be "
        f"{expected.get(name, 'absent')}"
        for name in sorted(saved.keys() | expected.keys())
        if saved.get(name) != expected.get(name)
    ]
    if problems:
        raise ExportError("weights", problems)
    names = parameter_names(decision.shape)
    weights = {names[name]: tensor.float().contiguous() for name, tensor in tensors.items()}
    with make_scratch(out.resolve()) as scratch:
        canon.write_atomic(
            scratch / CONFIG_FILE, canon.to_pretty_json(build_model_config(decision))
        )
        safetensors.torch.save_file(weights, scratch / WEIGHTS_FILE, metadata={"format": "pt"})
        tokenizer_problem = _copy_tokenizer(decision, corpus, scratch)
        replace_folder(scratch, out.resolve())
    return sum(tensor.numel() for tensor in weights.values()), tokenizer_problem


def _find_problems(decision: Decision) -> list[str]:
    """Return the reasons why Granite cannot express a model."""
    if decision.own is not None:
        return [
            "own: your own trainer trains this config, and forerun does not know its checkpoints"
        ]
    if decision.model is not None:
        return ["model: your own model: forerun does not know its weights' names in other programs"]
    problems = []
    if decision.shape.family != "llama":
        problems.append(
            f"shape.family = {decision.shape.family!r}: only a llama-like model fits Granite"
        )
    if decision.shape.qk_norm:
        problems.append("shape.qk_norm = true: Granite's attention has none")
    return problems


def _copy_tokenizer(decision: Decision, corpus: Path | None, out: Path) -> str:
    """Copy the tokenizer that the config names, or return why there is none to copy."""
    name = decision.data.tokenizer
    if name == "bytes":
        return "no tokenizer: a token is a byte"
    # Other tokenizers are named `sha256:` and the hash of their file; a message shows 16 digits.
    file = None if corpus is None else corpus / TOKENIZER_FILE
    if file is None or not file.is_file() or f"sha256:{canon.hash_file(file)}" != name:
        return (
            f"no tokenizer: {TOKENIZER_FILE} with {name[:23]}... is not in the corpus; copy it here"
        )
    shutil.copyfile(file, out / TOKENIZER_FILE)
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    canon.write_atomic(out / _TOKENIZER_CONFIG, canon.to_pretty_json(tokenizer_config))
    return ""
