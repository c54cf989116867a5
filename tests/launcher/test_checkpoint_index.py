"""A checkpoint's index is looked at before torch opens it: torch's own passes, whatever would call
more does not.
"""

import collections
import os
import pickle
import pickletools

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from launcher.trainer.checkpoints import INDEX, IndexRefusedError, check_index, read_tensors, staged


def trained(num_layers=2):
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(num_layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def written(tmp_path):
    model, optimizer = trained()
    with pytest.warns(UserWarning, match="single process"):
        save(staged(model, optimizer), checkpoint_id=tmp_path)
    return tmp_path


class Payload:
    def __init__(self, file):
        self.file = str(file)

    def __reduce__(self):
        return os.mkdir, (self.file,)


def test_torchs_own_index_passes_and_loads(written):
    check_index(written)
    model, optimizer = trained()
    with pytest.warns(UserWarning):
        read_tensors(written, model, optimizer)


def test_a_large_index_passes(tmp_path):
    """Above 64 kB a pickle is cut into frames, anywhere."""
    model, optimizer = trained(400)
    with pytest.warns(UserWarning, match="single process"):
        save(staged(model, optimizer), checkpoint_id=tmp_path)
    content = (tmp_path / INDEX).read_bytes()
    assert sum(opcode.name == "FRAME" for opcode, _, _ in pickletools.genops(content)) > 1
    check_index(tmp_path)


@pytest.mark.parametrize("protocol", [0, 2, pickle.HIGHEST_PROTOCOL])
def test_a_payload_is_refused_and_does_not_run(written, tmp_path, protocol):
    fuse = tmp_path / "ran"
    (written / INDEX).write_bytes(pickle.dumps(Payload(fuse), protocol=protocol))
    model, optimizer = trained()
    with pytest.raises(IndexRefusedError, match=r"mkdir|not the index"):
        read_tensors(written, model, optimizer)
    assert not fuse.exists()


def test_the_payload_would_run(tmp_path):
    pickle.loads(pickle.dumps(Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def test_a_payload_inside_an_index_is_refused(written):
    index = pickle.loads((written / INDEX).read_bytes())
    index.planner_data = {"model": Payload(written / "ran"), "more": collections.Counter("ab")}
    (written / INDEX).write_bytes(pickle.dumps(index))
    with pytest.raises(IndexRefusedError, match=r"collections\.Counter, posix\.mkdir"):
        check_index(written)


TRICKS = {
    "name put together from the memo": b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94h\x00h\x01\x93\x8c\x01:\x85R.",  # noqa: E501
    "name after a pop": b"\x80\x04\x8c\x05torch\x8c\x02os\x8c\x06system\x8c\x04Size0\x93.",
    "extension": b"\x80\x04\x82\x01.",
    "persistent": b"P1\n.",
    "instance": b"(ios\nsystem\n.",
    "cut": b"\x80\x04\x8c\x02o",
    "memo that is not there": b"\x80\x04h\x07h\x08\x93.",
    "no pickle": b"{}",
    "empty": b"",
}


@pytest.mark.parametrize("content", TRICKS.values(), ids=TRICKS)
def test_what_is_not_plainly_an_index_is_refused(tmp_path, content):
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(IndexRefusedError, match="nothing of it was loaded"):
        check_index(tmp_path)
