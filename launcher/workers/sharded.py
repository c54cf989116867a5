"""One trial over several devices, as an engine: on rank 0, while the other ranks do what it says (`group`).

At one number of ranks a run repeats bit by bit, resumed or not; against the same run on one device it is equal up to
rounding.
"""

from __future__ import annotations

import math
from typing import cast

from torch.distributed.device_mesh import DeviceMesh

from launcher.trainer.ranks import device
from launcher.workers.group import Order, tell
from launcher.workers.shard import Part, state_like
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.spec import DIVERGED_ABOVE_NATS, Curve, RunResult, RunSpec
from proxies.data.tokens import TokenStore
from proxies.training.outcome import Progress, environment
from proxies.training.slot_state import SlotState, captured, resumed


class Sharded:
    """One slot for one run at a time, over all ranks of this worker; lives on rank 0.

    Args:
        store: the corpus.
        mesh: the ranks.
        num_microbatches: passes that a rank splits its share of a batch into, at least.
        diverged_above_nats: over ln(vocabulary), the loss at which a run past its warmup has diverged.
    """

    def __init__(
        self, store: TokenStore, mesh: DeviceMesh, *, num_microbatches: int = 1,
        diverged_above_nats: float = DIVERGED_ABOVE_NATS,
    ) -> None:  # fmt: skip
        self._store, self._mesh, self._num_microbatches = store, mesh, num_microbatches
        self._diverged_above_nats = diverged_above_nats
        self._part: Part | None = None
        self._run: Progress | None = None

    def admit(self, index: int, spec: RunSpec, state: SlotState | None = None) -> None:
        """Start a run from its own initial weights, or go on from a `state` of it.

        Raises:
            ValueError: the slot is taken or is not slot 0, or the run is not one for these ranks or this corpus.
            StateError: the state is not one of this run; the slot is free.
        """
        self._refuse(index, spec)
        run = Progress(spec, num_microbatches=self._num_microbatches)
        if state is not None:
            run = resumed(spec, state, state_like(spec), self._num_microbatches)
        resumes = state is not None
        tell(Order.ADMIT, {"spec": canon.to_json(spec), "parts": self._num_microbatches, "resumes": resumes})
        self._part = Part(spec, self._store, self._mesh, self._num_microbatches)
        if state is not None:
            self._part.restore(state.tensors)
        self._run = run

    def _refuse(self, index: int, spec: RunSpec) -> None:
        num_ranks, vocab_size = self._mesh.size(), self._store.manifest.vocab_size
        refusals = {
            f"slot {index}: a trial alone has slot 0": index == 0,
            f"slot {index} is taken": self._run is None,
            f"num_ranks = {spec.numerics.num_ranks}: this worker has {num_ranks}": spec.numerics.num_ranks == num_ranks,
            f"run {spec.id[:12]} is of another corpus": spec.data_id == self._store.manifest.data_id,
            f"vocab_size = {spec.shape.vocab_size} is smaller than the corpus's {vocab_size}": (
                spec.shape.vocab_size >= vocab_size
            ),
        }
        if problems := [problem for problem, holds in refusals.items() if not holds]:
            raise ValueError("; ".join(problems))

    @property
    def steps(self) -> dict[int, int]:
        """Optimizer steps done, by occupied slot."""
        return {} if self._run is None else {0: self._run.step}

    @property
    def environment(self) -> dict[str, str]:
        """What this engine's arithmetic depends on besides the spec."""
        return environment(device())

    def evict(self, index: int) -> None:
        """Free the slot, whatever it is doing."""
        tell(Order.EVICT)
        self._part = self._run = None

    def state(self, index: int) -> SlotState:
        """What the run in the slot can go on from."""
        run, part = self._held()
        tell(Order.GATHER)
        return captured(run, device(), part.gathered())

    def pause_at(self, index: int, step: int | None) -> None:
        """Have `advance` do nothing while the run has done `step` steps or more; None: go on."""
        self._held()[0].pause_step = step

    def pruned(self, index: int, num_steps: int, reason: str) -> tuple[RunResult, Curve]:
        """The outcome of the run if it is given up as it was after `num_steps`; nothing changes here."""
        return self._held()[0].pruned(num_steps, reason, device())

    def advance(self, num_steps: int, seconds: float = math.inf) -> list[tuple[int, RunResult, Curve]]:
        """Up to `num_steps` optimizer steps, none begun after `seconds`; returns early, with (0, result, curve), when
        the run ends.
        """
        if self._run is None:
            return []
        ended = self._run.advance(
            num_steps, seconds, self._step, self._validation_loss,
            diverged_above_nats=self._diverged_above_nats, device=device(),
        )  # fmt: skip
        if ended is None:
            return []
        self.evict(0)
        return [(0, *ended)]

    def _step(self, step: int) -> tuple[float, float]:
        tell(Order.STEP, step)
        return self._held()[1].step(step)

    def _validation_loss(self) -> float:
        tell(Order.VALIDATE)
        return self._held()[1].validation_loss()

    def _held(self) -> tuple[Progress, Part]:
        if self._run is None or self._part is None:
            raise ValueError("no run is admitted")
        return self._run, self._part


class Obedient:
    """The part of any other rank, as `Sharded` on rank 0 orders."""

    def __init__(self, store: TokenStore, mesh: DeviceMesh) -> None:
        """As of `Sharded`."""
        self._store, self._mesh = store, mesh
        self._part: Part | None = None

    def __call__(self, order: Order, body: Json) -> None:
        """Do it. Raises ValueError where there is nothing to do it with."""
        if order is Order.ADMIT and isinstance(body, dict):
            self._part = None  # what it held is free before the next one takes its own
            spec = canon.decode(RunSpec, body["spec"])
            self._part = Part(spec, self._store, self._mesh, cast(int, body["parts"]))
            if body["resumes"]:
                self._part.restore({})
        elif order is Order.EVICT:
            self._part = None
        elif self._part is None:
            raise ValueError(f"{order.name} before a run was admitted")
        elif order is Order.STEP:
            self._part.step(cast(int, body))
        elif order is Order.VALIDATE:
            self._part.validation_loss()
        elif order is Order.GATHER:
            self._part.gathered()
