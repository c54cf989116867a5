"""An engine of ours that carries runs out from step 0, without checkpoints: behind the host, in the worker."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from launcher.workers.resumable import CALL_SECONDS, OwnEngine
from proxies.core.spec import Curve, Numerics, RunResult, RunSpec

_ROUNDING = {"highest": torch.finfo(torch.float32).eps, "high": 2.0**-10, "medium": torch.finfo(torch.bfloat16).eps}
"""Of one rounding of a float32 product, by `matmul_precision`."""


class RerunEngine:
    """A bank or a trial alone, for replays."""

    def __init__(self, engine: OwnEngine, *, nudged: bool) -> None:
        """`nudged`: each initial weight is moved up or down by one rounding of the run's arithmetic."""
        self._engine, self._nudged = engine, nudged

    @property
    def steps(self) -> dict[int, int]:
        """Slot -> optimizer steps done, of the occupied slots."""
        return self._engine.steps

    def admit(self, index: int, spec: RunSpec) -> None:
        """Start a run in a free slot."""
        self._engine.admit(index, spec)
        if self._nudged:
            state = self._engine.state(index)
            tensors = {name: _nudged(tensor, spec) for name, tensor in state.tensors.items()}
            self._engine.evict(index)
            self._engine.admit(index, spec, dataclasses.replace(state, tensors=tensors))

    def advance(self, num_steps: int) -> list[tuple[int, RunResult, Curve]]:
        """Up to so many steps, for some seconds; (slot, result, curve) of the runs that end."""
        return self._engine.advance(num_steps, CALL_SECONDS)


def _nudged(tensor: Tensor, spec: RunSpec) -> Tensor:
    """Weights by one rounding up or down, by a draw of the run's own; zeros, as moments are at step 0, stay."""
    if not tensor.is_floating_point():
        return tensor
    up = torch.randint(0, 2, tensor.shape, generator=torch.Generator().manual_seed(spec.seed)) * 2 - 1
    return tensor * (1 + up.to(tensor.dtype) * rounding(spec.numerics))


def rounding(numerics: Numerics) -> float:
    """One rounding of the products of that arithmetic, relative."""
    if numerics.dtype == "float64":
        return torch.finfo(torch.float64).eps
    return _ROUNDING["medium"] if numerics.dtype == "bfloat16" else _ROUNDING[numerics.matmul_precision]
