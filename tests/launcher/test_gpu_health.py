"""What the GPUs' library tells, from a library in its place; and nothing, told once, where there is none."""
# ruff: noqa: N802  (the library names its functions so)

from __future__ import annotations

import sys
import types

import pytest
import torch

from launcher.trainer import gpu_health

DEVICE = torch.device("cuda", 1)
NOTHING = {"temperature_celsius": None, "num_ecc_errors": None, "num_link_errors": None}


class Library(types.ModuleType):
    """Answers of one GPU, by the names that nvidia-ml-py gives; whatever it lacks is not supported."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU, NVML_VOLATILE_ECC, NVML_NVLINK_MAX_LINKS = 0, 0, 3
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_NVLINK_ERROR_DL_REPLAY, NVML_NVLINK_ERROR_DL_RECOVERY = 0, 1
    NVML_NVLINK_ERROR_DL_CRC_FLIT, NVML_NVLINK_ERROR_DL_CRC_DATA = 2, 3

    def __init__(self, ecc=(3, 1), links=(0, 1), driver=True):
        super().__init__("pynvml")
        self.ecc, self.links, self.driver, self.asked = ecc, links, driver, []

    def nvmlInit(self):
        if not self.driver:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid):
        self.asked.append(uuid)
        return uuid

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert handle == "GPU-of-1" and sensor == 0
        return 61

    def nvmlDeviceGetTotalEccErrors(self, handle, kind, counter):
        if self.ecc is None:
            raise self.NVMLError("Not Supported")
        return self.ecc[kind]

    def nvmlDeviceGetPcieReplayCounter(self, handle):
        return 5

    def nvmlDeviceGetNvLinkErrorCounter(self, handle, link, counter):
        if link not in self.links:
            raise self.NVMLError("Not Supported")
        return 100 * link + counter


@pytest.fixture
def planted(monkeypatch):
    def plant(library):
        gpu_health._opened.cache_clear()
        monkeypatch.setitem(sys.modules, "pynvml", library)
        properties = types.SimpleNamespace(uuid="of-1")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return library

    yield plant
    gpu_health._opened.cache_clear()


def test_tells_temperature_and_adds_up_the_errors(planted):
    library = planted(Library())
    told = gpu_health.health(DEVICE)
    # PCIe 5; link 0: 0 + 1 + 2 + 3; link 1: 400 + 6; link 2 is not there.
    assert told == {"temperature_celsius": 61, "num_ecc_errors": 4, "num_link_errors": 5 + 6 + 406}
    gpu_health.health(DEVICE)
    assert library.asked == ["GPU-of-1"], "found by its id, and opened once"


def test_what_a_gpu_does_not_count_is_not_known(planted):
    planted(Library(ecc=None, links=()))
    assert gpu_health.health(DEVICE) == {"temperature_celsius": 61, "num_ecc_errors": None, "num_link_errors": 5}


@pytest.mark.parametrize(
    ("library", "said"), [(None, "the package nvidia-ml-py is not installed"), (Library(driver=False), "Driver Not")]
)
def test_without_the_library_or_the_driver_it_says_so_once(planted, capsys, library, said):
    planted(library)
    assert [gpu_health.health(DEVICE) for _ in range(3)] == [NOTHING] * 3
    err = capsys.readouterr().err
    assert err.count("no GPU health in the metrics") == 1 and said in err
