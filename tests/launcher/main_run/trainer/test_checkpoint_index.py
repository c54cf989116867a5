"""Tests of the check of a checkpoint's index, which is a pickle, before torch loads it.

torch's own index must pass. A pickle must be refused if it would call a function that torch's own
index never calls.
"""

import collections
import os
import pickle
import pickletools

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from forerun._launcher.main_run.checkpoint_folders import CorruptError
from forerun._launcher.main_run.trainer.checkpoint_index import INDEX, check_index
from forerun._launcher.main_run.trainer.checkpoints import read_tensors, stage_tensors


def train_model(num_layers=2):
    """Return a small model and its optimizer after one update."""
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(num_layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def saved_model(tmp_path):
    """The folder of a checkpoint that torch wrote."""
    model, optimizer = train_model()
    with pytest.warns(UserWarning, match="single process"):
        save(stage_tensors(model, optimizer), checkpoint_id=tmp_path)
    return tmp_path


class Payload:
    """An object whose pickle calls `os.mkdir` when it is loaded."""

    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return os.mkdir, (self.file,)


def test_torchs_own_index_passes_and_loads(saved_model):
    check_index(saved_model)
    model, optimizer = train_model()
    with pytest.warns(UserWarning):
        read_tensors(saved_model, model, optimizer)


def test_large_index_passes(tmp_path):
    """A pickle above 64 kB is cut into frames at any place."""
    model, optimizer = train_model(400)
    with pytest.warns(UserWarning, match="single process"):
        save(stage_tensors(model, optimizer), checkpoint_id=tmp_path)
    content = (tmp_path / INDEX).read_bytes()
    assert sum(opcode.name == "FRAME" for opcode, _, _ in pickletools.genops(content)) > 1
    check_index(tmp_path)


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_payload_is_refused_and_does_not_run(saved_model, tmp_path, protocol):
    created_path = tmp_path / "ran"
    (saved_model / INDEX).write_bytes(pickle.dumps(Payload(created_path), protocol=protocol))
    model, optimizer = train_model()
    with pytest.raises(CorruptError, match=r"mkdir|not the index"):
        read_tensors(saved_model, model, optimizer)
    assert not created_path.exists()


def test_payload_runs_if_it_is_loaded(tmp_path):
    """A payload that is loaded without the check runs, so the other tests can fail."""
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def test_payload_inside_an_index_is_refused(saved_model):
    index = pickle.loads((saved_model / INDEX).read_bytes())
    index.planner_data = {"model": Payload(saved_model / "ran"), "more": collections.Counter("ab")}
    (saved_model / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(CorruptError, match=r"collections\.Counter, posix\.mkdir"):
        check_index(saved_model)


TRICKS = {
    "name put together from the memo": b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94h\x00h\x01\x93\x8c\x01:\x85R.",  # noqa: E501
    "name after a pop": b"\x80\x04\x8c\x05torch\x8c\x02os\x8c\x06system\x8c\x04Size0\x93.",
    "extension code": b"\x80\x04\x82\x01.",
    "persistent id": b"P1\n.",
    "instance of a class": b"(ios\nsystem\n.",
    "cut off": b"\x80\x04\x8c\x02o",
    "missing entry of the memo": b"\x80\x04h\x07h\x08\x93.",
    "no pickle": b"{}",
    "empty": b"",
}
"""Contents that must be refused: pickles that hide a function which they call, and other bytes."""


@pytest.mark.parametrize("content", TRICKS.values(), ids=TRICKS)
def test_anything_but_a_plain_index_is_refused(tmp_path, content):
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(CorruptError, match="nothing of it was loaded"):
        check_index(tmp_path)
