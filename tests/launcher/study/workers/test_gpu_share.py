"""Tests of a worker's share of a GPU's memory: torch is limited to it before anything is
allocated.
"""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from main_run import make_spec, write_corpus

from forerun._launcher.study.workers import host as host_module
from forerun._launcher.study.workers.host import HostFactory, WorkerHost
from forerun._proxies.core import canon
from forerun._proxies.core.failures import classify
from forerun._sweeps.run.pool import HostCall

TOTAL_BYTES = 80 * 2**30


@pytest.fixture
def fractions(monkeypatch):
    """Memory fractions that torch is limited to, on a fake GPU."""
    fractions = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=TOTAL_BYTES)
    )
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    return fractions


def test_memory_of_four_workers_and_of_their_cuda_contexts_fits_on_a_gpu(fractions):
    host_module.cap_memory(0.25)
    (fraction,) = fractions
    assert 4 * (fraction * TOTAL_BYTES + host_module.CONTEXT_BYTES) == pytest.approx(TOTAL_BYTES)
    host_module.cap_memory(0.001)
    assert fractions[-1] == 0.0005, "a small share keeps a minimum"


@pytest.mark.parametrize(("share", "num_limits"), [(0.25, 1), (1.0, 0), (2.0, 0), (0.0, 0)])
def test_memory_of_a_shared_gpu_is_limited_before_the_engine_allocates(
    tmp_path, fractions, monkeypatch, share, num_limits
):
    spec = make_spec(write_corpus(tmp_path).data_id)

    def build_engine(*_, **__):
        assert len(fractions) == num_limits
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("forerun._proxies.training.single_trial.SingleTrialEngine", build_engine)
    host = HostFactory(study_dir=str(tmp_path), corpus=str(tmp_path / "tokens"), gpu_share=share)()
    assert isinstance(host, WorkerHost)
    call = HostCall(bank_key="", num_slots=1, admit=((0, canon.to_json(spec)),), seconds=1.0)
    for _ in range(2):  # the second engine of the worker is under the same limit
        with pytest.raises(torch.OutOfMemoryError) as error:
            host.advance(call)
        assert classify(error.value) == "out_of_memory", "such a run is retried in smaller parts"


@pytest.mark.gpu
def test_real_gpu_limits_a_worker_to_its_share():
    script = """
import torch
from forerun._launcher.study.workers.host import cap_memory
cap_memory(0.25)
total = torch.cuda.get_device_properties(0).total_memory
kept = torch.empty(int(0.2 * total), dtype=torch.uint8, device="cuda")
try:
    torch.empty(int(0.1 * total), dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    print("kept")
"""
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert process.stdout == "kept\n"
