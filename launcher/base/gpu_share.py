"""What keeps a worker to its share of a GPU's memory: torch's own limit, set before anything is allocated."""

from __future__ import annotations

import torch

CONTEXT_BYTES = 768 * 2**20
"""What every process takes on a device for its context and libraries, which torch cannot limit. Not measured
on a device of each kind; half a gigabyte is usual."""


def cap_memory(share: float) -> None:
    """Have an allocation beyond `share` of this process's GPU, contexts counted, fail as out of memory; none on a CPU.

    So a neighbour's memory is never taken: the run that does not fit is tried again in smaller parts.
    """
    if torch.cuda.is_available():
        total_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        context = min(CONTEXT_BYTES / total_bytes, share / 2)
        torch.cuda.set_per_process_memory_fraction(share - context)
