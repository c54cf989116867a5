"""Run torchtitan's own program, and write a line for each of its logs.

`gpu_trainer.py` and the tests of the export copy this file into the folder of an export and run it
with torchtitan's arguments. Rank 0 appends [step, loss, gradient norm, seconds] for each log to the
file that the environment variable LOSSES names; seconds are since the previous log, or since the
program began. torchtitan needs GPUs: without one, its calls of the device and of NCCL are replaced
by those of CPUs and gloo.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._utils
from torch import nn
from torch.distributed.fsdp import FSDPModule

if not torch.cuda.is_available():  # before torchtitan is imported, which asks for the device
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.set_device = lambda device: None  # type: ignore[assignment]

from torchtitan.components import metrics
from torchtitan.distributed import fsdp, utils
from torchtitan.train import main

last_log_time = time.perf_counter()


class CpuMemoryMonitor:
    """A replacement of torchtitan's memory monitor, which needs a GPU; it reports zeros."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        """Return zeros for all statistics."""
        return metrics.DeviceMemStats(*[0.0] * 6)

    def reset_peak_stats(self) -> None:
        """Do nothing."""


def use_cpus() -> None:
    """Replace torchtitan's calls of GPUs.

    gloo has no mean over ranks, so gradients are summed, as torchtitan expects.
    """
    disable_division = fsdp.disable_fsdp_gradient_division

    def disable_division_and_sum(model: nn.Module) -> None:
        disable_division(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    metrics.build_device_memory_monitor = CpuMemoryMonitor
    fsdp.disable_fsdp_gradient_division = disable_division_and_sum
    utils.set_pg_timeouts = lambda **kwargs: None


def append_logs(losses: Path) -> None:
    """Let torchtitan append a line to a file for each of its logs."""
    real_log = metrics.MetricsProcessor.log

    def log_and_append(
        self: Any,
        step: int,
        loss: float,
        max_loss: float,
        grad_norm: float,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        global last_log_time
        previous_log_time, last_log_time = last_log_time, time.perf_counter()
        with losses.open("a") as file:
            file.write(
                json.dumps([step, loss, grad_norm, last_log_time - previous_log_time]) + "\n"
            )
        real_log(self, step, loss, max_loss, grad_norm, *args, **kwargs)

    metrics.MetricsProcessor.log = log_and_append


if __name__ == "__main__":
    if not torch.cuda.is_available():
        use_cpus()
    if os.environ["RANK"] == "0":
        append_logs(Path(os.environ["LOSSES"]))
    main()
    if not torch.cuda.is_available():
        # gloo's threads sometimes abort a process whose interpreter has ended. Here each rank has
        # trained and saved, so none of its work is lost.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
