"""The health of a rank's GPU, as NVIDIA's management library tells it: the door to `pynvml` (package nvidia-ml-py).

The package is optional. Where it, the driver or a counter is not there, the number is None, and the run's log says so
once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from proxies.core.canon import Json

_LINK_COUNTERS = ("REPLAY", "RECOVERY", "CRC_FLIT", "CRC_DATA")


def health(device: torch.device) -> dict[str, Json]:
    """`temperature_celsius`; `num_ecc_errors`, corrected or not, since the driver was loaded; `num_link_errors`, of
    PCIe and NVLink together.
    """
    opened = _opened(device)
    if opened is None:
        return {"temperature_celsius": None, "num_ecc_errors": None, "num_link_errors": None}
    nvml, handle = opened
    return {
        "temperature_celsius": _asked(nvml, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        "num_ecc_errors": _sum([_asked(nvml, ask) for ask in _ecc(nvml, handle)]),
        "num_link_errors": _sum([_asked(nvml, ask) for ask in _links(nvml, handle)]),
    }


@functools.cache
def _opened(device: torch.device) -> tuple[ModuleType, Any] | None:
    """The library, and its handle of the device."""
    try:
        import pynvml
    except ImportError:
        print("no GPU health in the metrics: the package nvidia-ml-py is not installed", file=sys.stderr)
        return None
    try:
        pynvml.nvmlInit()
        # By the id that both libraries give it: they count differently where some GPUs are hidden.
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError as error:
        print(f"no GPU health in the metrics: {error}", file=sys.stderr)
        return None


def _asked(nvml: ModuleType, ask: Callable[[], Any]) -> int | None:
    try:
        return int(ask())
    except nvml.NVMLError:  # most often: not supported by this GPU
        return None


def _sum(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _ecc(nvml: ModuleType, handle: Any) -> list[Callable[[], Any]]:
    ask, since_loaded = nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_VOLATILE_ECC
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    return [functools.partial(ask, handle, kind, since_loaded) for kind in kinds]


def _links(nvml: ModuleType, handle: Any) -> list[Callable[[], Any]]:
    counters = [getattr(nvml, f"NVML_NVLINK_ERROR_DL_{name}") for name in _LINK_COUNTERS]
    ask = nvml.nvmlDeviceGetNvLinkErrorCounter
    return [functools.partial(nvml.nvmlDeviceGetPcieReplayCounter, handle)] + [
        functools.partial(ask, handle, link, counter)
        for link in range(nvml.NVML_NVLINK_MAX_LINKS)
        for counter in counters
    ]
