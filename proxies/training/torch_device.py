"""The device that torch trains on here, as a calibration wants it: its memory, and what is set of
the whole process.
"""

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
    """A GPU if there is one."""

    _resident_at_first: ClassVar[int] = 0

    def __init__(self, probe: CalibrationProbe) -> None:
        """`probe` says what the worker may take."""
        self.kind = "cuda" if torch.cuda.is_available() else "cpu"
        gpus, cpus = min(1.0, probe.worker_gpus or 1.0), probe.worker_cpus / (os.cpu_count() or 1)
        self._share, self._most_bytes = (
            gpus if self.kind == "cuda" else min(1.0, cpus),
            probe.most_bytes,
        )
        self._before = 0
        if not TorchDevice._resident_at_first:
            TorchDevice._resident_at_first = _bytes("/proc/self/status", "VmRSS:")

    def forget(self) -> None:
        """Give back what engines that are gone held, and what was compiled for them."""
        torch.compiler.reset()
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()
        give_back_memory()

    def free_bytes(self) -> int:
        """Memory that nobody has, at most this worker's share; 0 if unknown."""
        free = (
            torch.cuda.mem_get_info()[0]
            if self.kind == "cuda"
            else _bytes("/proc/meminfo", "MemAvailable:")
        )
        said = [each for each in (int(self._share * free), self._most_bytes) if each]
        return min(said, default=0)

    def watch(self) -> None:
        """Begin to watch how much is held."""
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        """The most that was held since, beyond what was then; 0 if unknown.

        On a CPU it is the process's own peak, all modes so far together: what was freed is kept for
        the next (`proxies.training.memory`), so that no mode's share of it can be told.
        """
        if self.kind == "cuda":
            return max(0, torch.cuda.max_memory_allocated() - self._before)
        return max(0, _bytes("/proc/self/status", "VmHWM:") - TorchDevice._resident_at_first)

    def prepare(self, mode: Numerics) -> None:
        """Set what a mode has of the whole process: threads, precision of products."""
        set_arithmetic(mode)


def set_arithmetic(numerics: Numerics) -> None:
    """Threads and the precision of float32 products, of the whole process."""
    torch.set_num_threads(numerics.num_threads)
    # The compiler's advice to take a faster precision: the numerics say which.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*TF32", UserWarning)  # torch 2.9 warns of its own call
        torch.set_float32_matmul_precision(numerics.matmul_precision)


def _bytes(path: str, name: str) -> int:
    """A line of what Linux says of memory; 0 on other systems."""
    try:
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), 0)
