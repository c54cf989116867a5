"""Tests of the export of trained weights for transformers.

Every tensor must have its name in transformers, the logits must be equal, and wrong input must be
refused.
"""

import dataclasses
import json
import shutil
import subprocess

import numpy as np
import pytest
import torch
from spike_case import make_spike_decision, train
from trainer_venv import require_interpreter

from forerun._launcher.main_run.checkpoint_folders import CheckpointError
from forerun._launcher.main_run.exporters.export_checks import ExportError
from forerun._launcher.main_run.exporters.trainers import huggingface
from forerun._launcher.main_run.exporters.trainers import huggingface_weights as weights
from forerun._launcher.main_run.trainer import checkpoints
from forerun._proxies.model.decoder import Decoder, Multipliers

SAVE_LOGITS = """
import sys, numpy as np, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.from_numpy(np.load(sys.argv[2]))
with torch.no_grad():
    np.save(sys.argv[3], model(ids).logits.numpy())
print(len(model.generate(ids[:1, :4], max_new_tokens=5, do_sample=False)[0]))
"""


@pytest.fixture
def trained_run(corpus, tmp_path, one_rank):
    """A decision and the newest checkpoint of its run."""
    out, decision = tmp_path / "trained", make_spike_decision(corpus)
    train(decision, corpus, out)
    return decision, weights.find_checkpoint(out / "run")


def read_safetensors(path):
    """Return the arrays of a safetensors file by name, read without the library."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header, arrays = json.loads(content[8:end]), {}
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, row in header.items():
        first, last = row["data_offsets"]
        arrays[name] = np.frombuffer(content[end + first : end + last], "<f4").reshape(row["shape"])
    return arrays


def test_every_tensor_is_written_unchanged(trained_run, tmp_path):
    decision, checkpoint = trained_run
    num_params, note = weights.write_weights(decision, checkpoint, tmp_path / "out", None)
    arrays = read_safetensors(tmp_path / "out" / "model.safetensors")
    names = huggingface.parameter_names(decision.shape)
    saved = checkpoints.read_saved_tensors(checkpoint)
    assert arrays.keys() == set(names.values()) and note == "no tokenizer: a token is a byte"
    for name, exported_name in names.items():
        assert np.array_equal(arrays[exported_name], saved[f"model.{name}"].numpy())
    assert num_params == sum(array.size for array in arrays.values())


def test_wrong_config_shape_folder_or_checkpoint_is_refused(trained_run, tmp_path):
    decision, checkpoint = trained_run
    other_config = dataclasses.replace(decision, seed=decision.seed + 1)
    with pytest.raises(CheckpointError, match="belongs to the launch config"):
        weights.write_weights(other_config, checkpoint, tmp_path / "out", None)
    normed = dataclasses.replace(decision, shape=dataclasses.replace(decision.shape, qk_norm=True))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(ExportError) as refused:
        weights.write_weights(normed, checkpoint, tmp_path / "full", None)
    assert len(refused.value.problems) == 2
    damaged = tmp_path / checkpoint.name
    shutil.copytree(checkpoint, damaged)
    part = next(damaged.glob("__0_*"))
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="does not match its hash"):
        weights.write_weights(decision, damaged, tmp_path / "out", None)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ExportError, match="step-NNNNNNNN"):
        weights.find_checkpoint(tmp_path / "nothing")


@pytest.mark.slow
def test_transformers_gives_equal_logits(trained_run, tmp_path):
    decision, checkpoint = trained_run
    weights.write_weights(decision, checkpoint, tmp_path / "out", None)
    ids = np.random.default_rng(0).integers(
        0, decision.shape.vocab_size, (2, decision.shape.seq_len)
    )
    np.save(tmp_path / "ids.npy", ids)
    words = [
        require_interpreter("huggingface"),
        "-c",
        SAVE_LOGITS,
        tmp_path / "out",
        tmp_path / "ids.npy",
        tmp_path / "logits.npy",
    ]
    process = subprocess.run(words, capture_output=True, text=True, check=True, timeout=280)
    model = Decoder(decision.shape)
    saved = checkpoints.read_saved_tensors(checkpoint)
    state = {
        name.removeprefix("model."): tensor
        for name, tensor in saved.items()
        if name.startswith("model.")
    }
    model.load_state_dict(state)
    with torch.no_grad():
        logits = model(
            torch.from_numpy(ids), Multipliers(**dataclasses.asdict(decision.forward))
        ).numpy()
    exported_logits = np.load(tmp_path / "logits.npy")
    logits = logits.reshape(2, decision.shape.seq_len, -1)
    assert np.abs(logits - exported_logits).max() < 1e-5
    assert process.stdout.split()[-1] == "9", "four given and five generated tokens"
