"""Tests of the device that a worker names: its GPU's name, or `cpu`."""

import pytest
import torch

from forerun._launcher.study.workers.host import HostFactory
from forerun._sweeps.run.pool import HostCall
from forerun._sweeps.store.sites import DEVICE, PLACE_PROBE, get_gpu_name


def ask_for_device(**options):
    """Return the device that a worker names."""
    host = HostFactory(study_dir="", corpus="", **options)()
    call = HostCall(bank_key="", num_slots=1, admit=(), seconds=0, probe=PLACE_PROBE)
    return host.advance(call).answer[DEVICE]


def test_worker_names_its_gpu_or_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert ask_for_device() == "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ask_for_device() == "cpu"


def test_device_of_a_users_trainer_is_named_by_nvidia_smi(tmp_path, monkeypatch):
    """Torch would take memory of the GPU that the user's trainer needs."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\ntest "$3 $4" = "-i 1" && echo "NVIDIA A100-SXM4-40GB"\n')
    smi.chmod(0o755)
    monkeypatch.setattr("torch.cuda.is_available", lambda: pytest.fail("torch was asked"))
    for path, visible_devices, name in (
        (tmp_path, "1,0", "NVIDIA A100-SXM4-40GB"),
        (tmp_path, "", "cpu"),  # no device is visible
        ("", "1", "cpu"),  # nvidia-smi is not on the PATH
    ):
        monkeypatch.setenv("PATH", str(path))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_devices)
        get_gpu_name.cache_clear()
        assert ask_for_device(has_user_trainer=True) == name
    get_gpu_name.cache_clear()


@pytest.mark.gpu
def test_torch_and_nvidia_smi_give_a_gpu_one_name():
    get_gpu_name.cache_clear()
    assert ask_for_device() == ask_for_device(has_user_trainer=True) == torch.cuda.get_device_name()
