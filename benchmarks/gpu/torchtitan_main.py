"""torchtitan's own program, whose rank 0 also writes each log as [step, loss, gradient norm,
seconds] into LOSSES.

It lies in the folder of an export and takes torchtitan's arguments; `gpu_trainer.py` and the tests
of the export run it. torchtitan is made for GPUs: where there is none, what it asks of the device
and of NCCL is told for CPUs and gloo. Seconds are since the log before, or since the program began.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch._utils
from torch import nn
from torch.distributed.fsdp import FSDPModule

if not torch.cuda.is_available():  # torchtitan asks as it is imported
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.set_device = lambda device: None  # type: ignore[assignment]

from torchtitan.components import metrics
from torchtitan.distributed import fsdp, utils
from torchtitan.train import main

last = time.perf_counter()


class Memory:
    """That of a CPU, which nobody reads."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        """None."""
        return metrics.DeviceMemStats(*[0.0] * 6)

    def reset_peak_stats(self) -> None:
        """Nothing to reset."""


def on_cpus() -> None:
    """Have torchtitan take CPUs: gloo has no mean over ranks, so gradients are summed, as
    torchtitan wants them.
    """
    undivided = fsdp.disable_fsdp_gradient_division

    def summed(model: nn.Module) -> None:
        undivided(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    metrics.build_device_memory_monitor = Memory
    fsdp.disable_fsdp_gradient_division = summed
    utils.set_pg_timeouts = lambda **kwargs: None


def log_into(losses: Path) -> None:
    """Have each log written there too."""
    log = metrics.MetricsProcessor.log

    def logged(
        self: Any,
        step: int,
        loss: float,
        max_loss: float,
        grad_norm: float,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        global last
        before, last = last, time.perf_counter()
        with losses.open("a") as file:
            file.write(json.dumps([step, loss, grad_norm, last - before]) + "\n")
        log(self, step, loss, max_loss, grad_norm, *args, **kwargs)

    metrics.MetricsProcessor.log = logged


if __name__ == "__main__":
    if not torch.cuda.is_available():
        on_cpus()
    if os.environ["RANK"] == "0":
        log_into(Path(os.environ["LOSSES"]))
    main()
