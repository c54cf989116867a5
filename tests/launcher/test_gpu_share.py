"""A worker keeps to its share of a GPU's memory: told to torch before anything is allocated, and
meant.
"""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from main_run import spec_of, write_corpus

from launcher.workers import host as host_module
from launcher.workers.host import HostFactory, WorkerHost
from proxies.core import canon
from proxies.core.failures import classify
from sweeps.run.pool import HostCall
from sweeps.store.sites import DEVICE, WHERE, gpu_name

TOTAL_BYTES = 80 * 2**30


@pytest.fixture
def told(monkeypatch):
    """What torch is told, on a GPU that is not there."""
    said = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=TOTAL_BYTES)
    )
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", said.append)
    return said


def test_four_shares_and_their_contexts_fit(told):
    host_module.cap_memory(0.25)
    (fraction,) = told
    assert 4 * (fraction * TOTAL_BYTES + host_module.CONTEXT_BYTES) == pytest.approx(TOTAL_BYTES)
    host_module.cap_memory(0.001)
    assert told[-1] == 0.0005, "something is left, however small the share"


@pytest.mark.parametrize(("share", "times"), [(0.25, 1), (1.0, 0), (2.0, 0), (0.0, 0)])
def test_before_the_engine_takes_any(tmp_path, told, monkeypatch, share, times):
    spec = spec_of(write_corpus(tmp_path).data_id)

    def engine(*_, **__):
        assert len(told) == times
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("proxies.training.solo.Solo", engine)
    host = HostFactory(study_dir=str(tmp_path), corpus=str(tmp_path / "tokens"), gpu_share=share)()
    assert isinstance(host, WorkerHost)
    call = HostCall(bank_key="", num_slots=1, admit=((0, canon.to_json(spec)),), seconds=1.0)
    with pytest.raises(torch.OutOfMemoryError) as error:
        host.advance(call)
    assert classify(error.value) == "out_of_memory", "it is tried again in smaller parts"


def where(**options):
    (host,) = [HostFactory(study_dir="", corpus="", **options)()]
    return host.advance(
        HostCall(bank_key="", num_slots=1, admit=(), seconds=0, probe=WHERE)
    ).answer[DEVICE]


def test_a_worker_names_its_device_as_its_results_do(told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert where() == "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert where() == "cpu"


def test_a_trainers_device_is_named_by_nvidia_smi(tmp_path, monkeypatch):
    """Torch would hold memory of the GPU that the user's trainer needs."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\ntest "$3 $4" = "-i 1" && echo "NVIDIA A100-SXM4-40GB"\n')
    smi.chmod(0o755)
    monkeypatch.setattr("torch.cuda.is_available", lambda: pytest.fail("torch was asked"))
    for path, visible, name in (
        (tmp_path, "1,0", "NVIDIA A100-SXM4-40GB"),
        (tmp_path, "", "cpu"),
        ("", "1", "cpu"),
    ):
        monkeypatch.setenv("PATH", str(path))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        gpu_name.cache_clear()
        assert where(own_trainer=True) == name
    gpu_name.cache_clear()


@pytest.mark.gpu
def test_torch_and_nvidia_smi_give_a_gpu_one_name():
    gpu_name.cache_clear()
    assert where() == where(own_trainer=True) == torch.cuda.get_device_name()


@pytest.mark.gpu
def test_a_real_gpu_keeps_a_worker_to_its_share():
    script = """
import torch
from launcher.workers.host import cap_memory
cap_memory(0.25)
total = torch.cuda.get_device_properties(0).total_memory
kept = torch.empty(int(0.2 * total), dtype=torch.uint8, device="cuda")
try:
    torch.empty(int(0.1 * total), dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("kept")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "kept\n"
