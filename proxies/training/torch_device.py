"""The device that torch trains on: its memory, and the settings of the whole process."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path
from typing import ClassVar

import torch

from forerun._proxies.core.spec import Numerics
from forerun._proxies.training.calibration import CalibrationProbe
from forerun._proxies.training.memory import return_free_memory


class TorchDevice:
    """The device of a calibration: a GPU if there is one, else the CPU.

    Args:
        probe: The calibration, with the share of the machine that the worker may take.
    """

    _initial_resident_bytes: ClassVar[int] = 0
    """Memory of the process when the first device was created."""

    def __init__(self, probe: CalibrationProbe) -> None:
        self.kind = "cuda" if torch.cuda.is_available() else "cpu"
        # A worker of several GPUs trains on one of them
        gpu_share = min(1.0, probe.worker_gpus or 1.0)
        cpu_share = min(1.0, probe.worker_cpus / (os.cpu_count() or 1))
        self._share = gpu_share if self.kind == "cuda" else cpu_share
        self._max_bytes = probe.most_bytes
        self._bytes_before = 0
        if not TorchDevice._initial_resident_bytes:
            TorchDevice._initial_resident_bytes = _read_bytes("/proc/self/status", "VmRSS:")

    def free_memory(self) -> None:
        """Free the memory of engines that no longer exist, and the code compiled for them."""
        torch.compiler.reset()
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()
        return_free_memory()

    def get_free_bytes(self) -> int:
        """Return the memory in bytes that this worker may use; 0 if unknown.

        This is its share of the free memory, but at most the maximum that the user gave. If the
        free memory is unknown, it is that maximum.
        """
        free_bytes = (
            torch.cuda.mem_get_info()[0]
            if self.kind == "cuda"
            else _read_bytes("/proc/meminfo", "MemAvailable:")
        )
        limits = [limit for limit in (int(self._share * free_bytes), self._max_bytes) if limit]
        return min(limits, default=0)

    def start_peak_measurement(self) -> None:
        """Start to measure the peak of the memory."""
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._bytes_before = torch.cuda.memory_allocated()

    def get_peak_bytes(self) -> int:
        """Return by how many bytes the memory rose above its value at `start_peak_measurement`; 0
        if unknown.

        On a CPU, this is the peak of the process over all modes so far. Freed memory is kept for
        the next engine (`forerun._proxies.training.memory`), so the share of one mode is unknown.
        """
        if self.kind == "cuda":
            return max(0, torch.cuda.max_memory_allocated() - self._bytes_before)
        peak_bytes = _read_bytes("/proc/self/status", "VmHWM:")
        return max(0, peak_bytes - TorchDevice._initial_resident_bytes)

    def prepare(self, mode: Numerics) -> None:
        """Apply those settings of a mode that are settings of the whole process."""
        set_arithmetic(mode)


def set_arithmetic(numerics: Numerics) -> None:
    """Set the number of threads and the precision of float32 products for the whole process."""
    torch.set_num_threads(numerics.num_threads)
    # Hide the compiler's advice to use a faster precision: the run's numerics decide on it
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*TF32", UserWarning)  # torch 2.9 warns of its own call
        torch.set_float32_matmul_precision(numerics.matmul_precision)


def _read_bytes(path: str, name: str) -> int:
    """Return a value in bytes from one of Linux's files about memory; 0 on other systems."""
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), 0)
