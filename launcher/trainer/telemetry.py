"""Columns of a step's line beside its own: norms of every layer, validation losses, each rank's
time.

Every rank holds parts of the weights; a layer's numbers are those of the whole weights, up to
rounding, however many ranks hold them: each rank sums squares over its parts, and one all-reduce of
a short vector adds them up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.trainer.callbacks import Callback, StepInfo
from launcher.trainer.ranks import own_part
from launcher.trainer.replay import RecordingReduceScatter
from proxies.core.canon import Json
from proxies.core.noise_scale import running_scale, split
from proxies.model.optimizer import keep_directions, last_update, state_of

if TYPE_CHECKING:
    from launcher.trainer.training import Trainer

MACHINES_EVERY_STEPS = 10
"""How often the run asks how its machines are: so seldom that it costs nothing, often enough to see
a slow one."""
NOISE_EVERY_STEPS, NOISE_SAMPLES = 5, 200
"""How often the first pass's gradient is measured, and over how many such steps the noise scale is
told."""
LEAST_NOISE_SAMPLES = 20
_NAMES = {"tok_embeddings": "embedding", "pos_embeddings": "positions", "lm_head": "readout"}


def layer_of(name: str, blocks: Collection[str] = ()) -> str:
    """Under which name a parameter counts: `layers.3`, `embedding`, `positions`, `readout`, or
    `norm`, the last one.

    Of a user's own model, whose `blocks` these are, by block, or by the module that it is of.
    """
    parts = name.split(".")
    if blocks:
        found = next((path for path in blocks if name.startswith(f"{path}.")), None)
        return found or ".".join(parts[:-1]) or name
    return ".".join(parts[:2]) if parts[0] == "layers" else _NAMES.get(parts[0], parts[0])


def _squares(part: Tensor, share: float) -> Tensor:
    squares: Tensor = torch.linalg.vector_norm(part, dtype=torch.float64).square() * share
    return squares


class Layers(Callback):
    """Every layer's `weight_rms`, `param_norm`, `grad_norm` (before clipping) and
    `update_ratio`.
    """

    def __init__(self, every_steps: int) -> None:
        self._every_steps = every_steps

    def begin(self, run: Trainer, step: int, carried: Json) -> None:
        """Takes the names and sizes of the layers."""
        self._run = run
        self._sizes: dict[str, int] = {}
        own = run.source.blocks(run.model) if run.decision.model else ()
        self._layers = {name: layer_of(name, own) for name, _ in run.model.named_parameters()}
        for name, parameter in run.model.named_parameters():
            layer = self._layers[name]
            self._sizes[layer] = self._sizes.get(layer, 0) + parameter.numel()
        self._index = {layer: index for index, layer in enumerate(self._sizes)}

    @torch.no_grad()
    def before_update(self, seen: StepInfo) -> None:
        """Sums the gradients, which clipping is about to change."""
        if (seen.step + 1) % self._every_steps == 0:
            keep_directions(self._run.optimizer, True)
            # Rows: gradients, weights, updates; in float64, where a sum of squares has room.
            self._sums_3L = torch.zeros(
                3, len(self._sizes), dtype=torch.float64, device=self._run.device
            )
            for name, parameter in self._run.model.named_parameters():
                if parameter.grad is not None:
                    self._sums_3L[0, self._index[self._layers[name]]] += _squares(
                        *own_part(parameter.grad)
                    )

    @torch.no_grad()
    def after_update(self, seen: StepInfo) -> dict[str, Json]:
        """Sums weights and updates, and all of it over the ranks."""
        if (seen.step + 1) % self._every_steps:
            return {}
        optimizer = self._run.optimizer
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in self._run.model.named_parameters():
            column = self._index[self._layers[name]]
            weights, share = own_part(parameter)
            self._sums_3L[1, column] += _squares(weights, share)
            if state := state_of(optimizer, parameter):
                parts = {key: own_part(moment)[0] for key, moment in state.items()}
                self._sums_3L[2, column] += _squares(
                    last_update(weights, groups[id(parameter)], parts), share
                )
        keep_directions(optimizer, False)
        dist.all_reduce(self._sums_3L)
        layers: dict[str, Json] = {}
        for (layer, size), sums in zip(self._sizes.items(), self._sums_3L.T.tolist(), strict=True):
            grad_norm, param_norm, update_norm = map(math.sqrt, sums)
            layers[layer] = {
                "weight_rms": param_norm / math.sqrt(size),
                "param_norm": param_norm,
                "grad_norm": grad_norm,
                "update_ratio": update_norm / param_norm if param_norm else None,
            }
        return {"layers": layers}


class Validation(Callback):
    """The validation loss on the way, as at the end."""

    def __init__(self, every_steps: int) -> None:
        self._every_steps = every_steps

    def begin(self, run: Trainer, step: int, carried: Json) -> None:
        """Nothing but whom to ask."""
        self._run = run

    def after_update(self, seen: StepInfo) -> dict[str, Json]:
        """Over all ranks: the same on each."""
        return (
            {}
            if (seen.step + 1) % self._every_steps
            else {"validation_loss_nats": self._run.validation_loss()}
        )


class BatchNoise(Callback):
    """The gradient noise scale of runs that accumulate or have several ranks, with the ends of its
    interval.

    The norm of the first pass's gradient, read before the next one is added to it, or of each
    rank's own, read before the exchange, beside the whole batch's (`proxies.core.noise_scale`),
    over the last `NOISE_SAMPLES` steps where it was measured. Replicas that shard nothing, and take
    one pass, have neither: they tell nothing.
    """

    def begin(self, run: Trainer, step: int, carried: Json) -> None:
        """Takes up what was measured before."""
        self._run = run
        self._splits: list[Json] = list(carried) if isinstance(carried, list) else []
        self._due = False
        by_ranks = run.num_ranks > 1 and not run.accumulates
        self._exchange = RecordingReduceScatter.of(run.model) if by_ranks else None
        self._listen_at(step)

    def _listen_at(self, step: int) -> None:
        if self._exchange is not None:
            self._exchange.norms = [] if (step + 1) % NOISE_EVERY_STEPS == 0 else None

    def _part(self) -> tuple[float, float] | None:
        """Of this step's batch: the share of it that a part has, and the squared norm of the part's
        gradient.
        """
        if self._run.part is not None:
            share, norm = self._run.part
            return share, norm.item() ** 2
        norms = None if self._exchange is None else self._exchange.norms
        if self._exchange is None or not norms:
            return None
        square, self._exchange.norms = torch.stack(norms).square().sum(), None
        dist.all_reduce(square)
        return 1 / self._run.num_ranks, square.item() / self._run.num_ranks

    def before_update(self, seen: StepInfo) -> None:
        """Takes the two norms, before the update or another pass."""
        part = self._part()
        self._due = part is not None
        if part is not None:
            (share, square), tokens = part, self._run.num_batch_tokens(seen.step)
            told = split((share * tokens, square), (tokens, seen.grad_norm**2))
            if all(map(math.isfinite, told)):
                self._splits.append([*told])
                del self._splits[:-NOISE_SAMPLES]

    def after_update(self, seen: StepInfo) -> dict[str, Json]:
        """Of the steps where it was measured; nothing while they are few, or where nothing can be
        told.
        """
        self._listen_at(seen.step + 1)
        told_now = self._due and len(self._splits) >= LEAST_NOISE_SAMPLES
        found = running_scale(cast(Any, self._splits)) if told_now else None
        if found is None or not math.isfinite(found.low):
            return {}
        ends = {"": found.tokens, "_low": found.low, "_high": found.high}
        return {
            f"noise_scale{end}_tokens": value for end, value in ends.items() if value is not None
        }

    def carried(self) -> Json:
        """What was measured."""
        return self._splits or None


class Stopwatch:
    """This rank's seconds inside the blocks' forward passes: what it computes, without its waiting
    for the others.

    A whole step takes every rank the same time, as the slowest lets it: its own time shows only
    between two exchanges, and within a block's pass there is none.
    """

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began: Any = None
        self._spans: list[tuple[Any, Any]] = []
        for block in blocks:
            block.register_forward_pre_hook(lambda *_: self._start())
            block.register_forward_hook(lambda *_: self._stop(), prepend=True)

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _start(self) -> None:
        self._began = self._now() if torch.is_grad_enabled() else None

    def _stop(self) -> None:
        if self._began is not None:  # a pass that trains
            self._spans.append((self._began, self._now()))

    def seconds(self) -> float:
        """Since `reset`."""
        if not self._on_gpu:
            return math.fsum(stop - start for start, stop in self._spans)
        return math.fsum(start.elapsed_time(stop) for start, stop in self._spans) / 1000

    def reset(self) -> None:
        """Begin anew."""
        self._spans = []


class Machines(Callback):
    """`rank_seconds` every few steps, of ranks that can be compared."""

    def __init__(self) -> None:
        self._watch: Stopwatch | None = None
        self._seconds = 0.0

    def begin(self, run: Trainer, step: int, carried: Json) -> None:
        """Puts a stopwatch on the blocks; compiled ones have no inside that it could be put on."""
        self._run = run
        if self._watch is None and run.num_ranks > 1 and not run.decision.compiled:
            self._watch = Stopwatch(run.source.blocks(run.model).values(), run.device)
        if self._watch is not None:
            self._watch.reset()  # of a step that the run went back at

    def before_update(self, seen: StepInfo) -> None:
        """Reads the stopwatch, before other hooks compute the step again; only where it is told."""
        if self._watch is not None and (seen.step + 1) % MACHINES_EVERY_STEPS == 0:
            self._seconds = self._watch.seconds()

    def after_update(self, seen: StepInfo) -> dict[str, Json]:
        """The times of this step alone."""
        if self._watch is None:
            return {}
        self._watch.reset()
        if (seen.step + 1) % MACHINES_EVERY_STEPS:
            return {}
        told = torch.zeros(self._run.num_ranks, dtype=torch.float64, device=self._run.device)
        told[self._run.rank] = self._seconds
        dist.all_reduce(told)
        return {"rank_seconds": told.tolist()}
