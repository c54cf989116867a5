"""The trained weights for transformers: every tensor under its name, equal logits there,
refusals.
"""

import dataclasses
import json
import shutil
import subprocess

import numpy as np
import pytest
import torch
from care_case import care_decision, train
from trainer_venv import interpreter

from launcher.exporters.fidelity import ExportError
from launcher.exporters.trainers import huggingface
from launcher.exporters.trainers import huggingface_weights as weights
from launcher.trainer import checkpoints
from launcher.trainer.checkpoints import CheckpointError
from proxies.model.decoder import Decoder, Multipliers

PROGRAM = """
import sys, numpy as np, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = torch.from_numpy(np.load(sys.argv[2]))
with torch.no_grad():
    np.save(sys.argv[3], model(ids).logits.numpy())
print(len(model.generate(ids[:1, :4], max_new_tokens=5, do_sample=False)[0]))
"""


@pytest.fixture
def trained(corpus, tmp_path, one_rank):
    """A decision and the newest checkpoint of its run."""
    out, decision = tmp_path / "trained", care_decision(corpus)
    train(decision, corpus, out)
    return decision, weights.checkpoint_in(out / "run")


def read_safetensors(path):
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header, found = json.loads(content[8:end]), {}
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, row in header.items():
        first, last = row["data_offsets"]
        found[name] = np.frombuffer(content[end + first : end + last], "<f4").reshape(row["shape"])
    return found


def test_every_tensor_is_written_as_it_was_trained(trained, tmp_path):
    decision, checkpoint = trained
    num_params, without = weights.write_weights(decision, checkpoint, tmp_path / "out", None)
    found, names = (
        read_safetensors(tmp_path / "out" / "model.safetensors"),
        huggingface.parameter_names(decision.shape),
    )
    saved = checkpoints.saved_tensors(checkpoint)
    assert found.keys() == set(names.values()) and without == "no tokenizer: a token is a byte"
    for ours, theirs in names.items():
        assert np.array_equal(found[theirs], saved[f"model.{ours}"].numpy())
    assert num_params == sum(array.size for array in found.values())


def test_refusals(trained, tmp_path):
    decision, checkpoint = trained
    other = dataclasses.replace(decision, seed=decision.seed + 1)
    with pytest.raises(CheckpointError, match="belongs to the launch config"):
        weights.write_weights(other, checkpoint, tmp_path / "out", None)
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
        weights.checkpoint_in(tmp_path / "nothing")


@pytest.mark.slow
def test_transformers_gives_equal_logits(trained, tmp_path):
    decision, checkpoint = trained
    weights.write_weights(decision, checkpoint, tmp_path / "out", None)
    ids = np.random.default_rng(0).integers(
        0, decision.shape.vocab_size, (2, decision.shape.seq_len)
    )
    np.save(tmp_path / "ids.npy", ids)
    words = [
        interpreter("huggingface"),
        "-c",
        PROGRAM,
        tmp_path / "out",
        tmp_path / "ids.npy",
        tmp_path / "theirs.npy",
    ]
    said = subprocess.run(words, capture_output=True, text=True, check=True, timeout=280)
    model = Decoder(decision.shape)
    saved = checkpoints.saved_tensors(checkpoint)
    model.load_state_dict(
        {
            name.removeprefix("model."): one
            for name, one in saved.items()
            if name.startswith("model.")
        }
    )
    with torch.no_grad():
        ours = model(
            torch.from_numpy(ids), Multipliers(**dataclasses.asdict(decision.forward))
        ).numpy()
    assert (
        np.abs(ours.reshape(2, decision.shape.seq_len, -1) - np.load(tmp_path / "theirs.npy")).max()
        < 1e-5
    )
    assert said.stdout.split()[-1] == "9"
