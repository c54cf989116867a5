"""The device that torch trains on: its memory, and the settings of the whole process."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path
from typing import ClassVar

import torch

from proxies.core.spec import Numerics
from proxies.training.calibration import CalibrationProbe
from proxies.training.memory import give_back_memory


class TorchDevice:
    """The device of a calibration: a GPU if there is one, else the CPU.

    Args:
        probe: The calibration, with the share of the machine that the worker may take.
    """

    _initial_resident_bytes: ClassVar[int] = 0
    """Memory of the process when the first device was created."""

    def __init__(self, probe: CalibrationProbe) -> None:
        self.kind = "cuda" if torch.cuda.is_available() else "cpu"
        gpus, cpus = min(1.0, probe.worker_gpus or 1.0), probe.worker_cpus / (os.cpu_count() or 1)
        self._share, self._most_bytes = (
            gpus if self.kind == "cuda" else min(1.0, cpus),
            probe.most_bytes,
        )
        self._bytes_before = 0
        if not TorchDevice._initial_resident_bytes:
            TorchDevice._initial_resident_bytes = _read_bytes("/proc/self/status", "VmRSS:")

    def forget(self) -> None:
        """Free the memory of engines that no longer exist, and the code compiled for them."""
        torch.compiler.reset()
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()
        give_back_memory()

    def free_bytes(self) -> int:
        """Return the free memory in bytes, at most this worker's share; 0 if unknown."""
        free = (
            torch.cuda.mem_get_info()[0]
            if self.kind == "cuda"
            else _read_bytes("/proc/meminfo", "MemAvailable:")
        )
        limits = [limit for limit in (int(self._share * free), self._most_bytes) if limit]
        return min(limits, default=0)

    def watch(self) -> None:
        """Start to measure the peak of the memory."""
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._bytes_before = torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        """Return the peak of the memory since `watch`, less the memory then, in bytes; 0 if
        unknown.

        On a CPU it is the peak of the process over all modes so far. Freed memory is kept for the
        next engine (`proxies.training.memory`), so one mode's share of it is unknown.
        """
        if self.kind == "cuda":
            return max(0, torch.cuda.max_memory_allocated() - self._bytes_before)
        peak_bytes = _read_bytes("/proc/self/status", "VmHWM:")
        return max(0, peak_bytes - TorchDevice._initial_resident_bytes)

    def prepare(self, mode: Numerics) -> None:
        """Apply the settings of a mode that hold for the whole process."""
        set_arithmetic(mode)


def set_arithmetic(numerics: Numerics) -> None:
    """Set the number of threads and the precision of float32 products for the whole process."""
    torch.set_num_threads(numerics.num_threads)
    # The compiler advises a faster precision, but the numerics decide.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*TF32", UserWarning)  # torch 2.9 warns of its own call
        torch.set_float32_matmul_precision(numerics.matmul_precision)


def _read_bytes(path: str, name: str) -> int:
    """Return a value of a memory file of Linux, in bytes; 0 on other systems."""
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), 0)
