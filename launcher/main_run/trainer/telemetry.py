"""Further columns of a step's line in `metrics.jsonl`: norms of every layer, validation losses, the
gradient noise scale, each rank's time, and the share of the devices' peak.

The gradient noise scale is the batch size in tokens at which the noise of a gradient is as large as
the gradient (arXiv 1812.06162). A replay (`replay`) computes the gradients of some steps a second
time; these columns measure the first computation. Each rank holds parts of the weights. A layer's
numbers are those of its full weights, up to rounding, on any number of ranks.
"""

from __future__ import annotations

import datetime
import math
import re
import time
from collections.abc import Collection
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from forerun._launcher.main_run.estimates.reference_tables import GPUS
from forerun._launcher.main_run.metrics_file import AttemptStart
from forerun._launcher.main_run.trainer.callbacks import Callback, Columns, StepInfo, is_due
from forerun._launcher.main_run.trainer.ranks import gather, total_norm
from forerun._proxies.core.canon import Json
from forerun._proxies.core.flops import compute_flops_per_token
from forerun._proxies.core.noise_scale import estimate_moments, estimate_running_scale
from forerun._proxies.model.loss import compute_token_loss
from forerun._proxies.training.run_progress import get_environment, read_validation_ids

if TYPE_CHECKING:
    from forerun._launcher.main_run.trainer.training import Trainer

# ---- Share of the devices' peak ----

_SLOWER_FORMS = {"PCIe", "NVL"}
"""Words in a device's name that mark a slower form of the card than the reference table has."""


def header(run: Trainer) -> AttemptStart:
    """Return the first line of an attempt at a run."""
    decision, name = run.decision, get_environment(run.device)["device"]
    peak = peak_flops_per_second(name) if decision.precision == "bfloat16" else None
    return AttemptStart(
        digest=decision.digest,
        step=run.done,
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        num_ranks=run.num_ranks,
        device=name,
        model_flops_per_token=float(compute_flops_per_token(decision.shape)),
        peak_flops_per_second=peak,
    )


def peak_flops_per_second(device_name: str) -> float | None:
    """Return the dense bfloat16 peak of a device by its driver's name; None if it is not in the
    reference table.
    """
    words = re.split(r"[^A-Za-z0-9]+", device_name)
    # The table's RTX4090 is two words in the driver's "GeForce RTX 4090".
    names = {*words, *(first + second for first, second in pairwise(words))}
    if names & _SLOWER_FORMS:
        return None
    return next((gpu.peak_flops for name, gpu in GPUS.items() if name in names), None)


def share_of_peak(header: AttemptStart, tokens_per_second: float) -> Columns:
    """Return `mfu` of a step over all ranks; nothing if the peak is not known."""
    if header.peak_flops_per_second is None:
        return {}
    peak = header.peak_flops_per_second * header.num_ranks
    return {"mfu": tokens_per_second / peak * header.model_flops_per_token}


def step_line(run: Trainer, info: StepInfo, seconds: float) -> Columns:
    """Return the line of a step that was made in `seconds`."""
    tokens_per_second = info.num_tokens / seconds
    return {
        "step": info.step + 1,
        "train_loss_nats": info.loss_nats,
        "grad_norm": info.grad_norm,
        "lr": run.optimizer.param_groups[0]["lr"],
        "tokens": run.sequences(info.step + 1)[0] * run.decision.shape.seq_len,
        "tokens_per_second": tokens_per_second,
        "seconds": seconds,
        **share_of_peak(run.header, tokens_per_second),
    }


@torch.no_grad()
def validation_loss(run: Trainer) -> float:
    """Return the loss in nats per token over the validation windows of the proxies; collective.

    The proxies are the small runs from which the config was frozen.
    """
    seq_len, num_rows = run.decision.shape.seq_len, run.pass_sequences
    windows = read_validation_ids(run.store, seq_len)
    num_sequences = len(windows)
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    for first in range(0, num_sequences, num_rows * run.num_ranks):
        # Sharding needs every rank to run the model equally often, so rows beyond the end repeat
        # the last one and do not count.
        rows = torch.arange(num_rows) + first + run.rank * num_rows
        ids_BT = windows[rows.clamp(max=num_sequences - 1)].to(run.device)
        logits_BTV = run.source.forward(run.model, ids_BT[:, :-1]).view(num_rows, seq_len, -1)
        losses_B = compute_token_loss(logits_BTV, ids_BT[:, 1:])
        total += losses_B[(rows < num_sequences).to(run.device)].double().sum()
    dist.all_reduce(total)
    return total.item() / num_sequences


# ---- Layers ----

_NAMES = {"tok_embeddings": "embedding", "pos_embeddings": "positions", "lm_head": "readout"}


def layer_of(name: str, blocks: Collection[str] = ()) -> str:
    """Return the name of a parameter's layer: `layers.3`, `embedding`, `positions`, `readout`, or
    `norm` (the last norm).

    Args:
        name: Name of the parameter.
        blocks: Paths of the blocks of a user's model, whose layers are its blocks and its other
            modules; empty for forerun's decoder.
    """
    parts = name.split(".")
    if blocks:
        block = next((path for path in blocks if name.startswith(f"{path}.")), None)
        return block or ".".join(parts[:-1]) or name
    return ".".join(parts[:2]) if parts[0] == "layers" else _NAMES.get(parts[0], parts[0])


class Layers(Callback):
    """Every layer's `weight_rms`, `param_norm`, `grad_norm` (before clipping) and
    `update_ratio`.
    """

    def __init__(self, every_steps: int) -> None:
        self._every_steps = every_steps

    def begin(self, step: int, carried: Any) -> None:
        """Assign each parameter to a layer."""
        run = self.run
        blocks = run.source.blocks(run.model) if run.decision.model else ()
        self._layers: dict[str, list[nn.Parameter]] = {}
        for name, parameter in run.model.named_parameters():
            self._layers.setdefault(layer_of(name, blocks), []).append(parameter)

    @torch.no_grad()
    def before_update(self, info: StepInfo) -> None:
        """Measure the gradients, which clipping is about to change, and copy the weights."""
        if is_due(self._every_steps, info.step):
            self._grad_norms = {
                layer: total_norm(parameter.grad for parameter in parameters)
                for layer, parameters in self._layers.items()
            }
            # The copy is in the host's memory: the device may have no room for it.
            self._before = {
                parameter: parameter.detach().to("cpu", copy=True)
                for parameter in self.run.model.parameters()
            }

    @torch.no_grad()
    def after_update(self, info: StepInfo) -> Columns:
        """Measure weights and updates."""
        if not is_due(self._every_steps, info.step):
            return {}
        layers: Columns = {}
        for layer, parameters in self._layers.items():
            updates = [p - self._before.pop(p).to(p.device) for p in parameters]
            param_norm, update_norm = total_norm(parameters).item(), total_norm(updates).item()
            layers[layer] = {
                "weight_rms": param_norm / math.sqrt(sum(p.numel() for p in parameters)),
                "param_norm": param_norm,
                "grad_norm": self._grad_norms[layer].item(),
                "update_ratio": update_norm / param_norm if param_norm else None,
            }
        return {"layers": layers}


# ---- Gradient noise scale ----

NOISE_EVERY_STEPS = 5
"""Steps between two measurements of the noise scale."""
NUM_NOISE_SAMPLES, MIN_NOISE_SAMPLES = 200, 20
"""Number of measured steps over which the noise scale is averaged, and the fewest that give one."""


class BatchNoise(Callback):
    """The gradient noise scale, with the bounds of its interval
    (`forerun._proxies.core.noise_scale`).

    It compares the norm of the full batch's gradient with that of a part of the batch: the first
    pass of a run that accumulates, or each rank's own gradient before the exchange. Replicas that
    shard nothing and take one pass per step have no such part, and report nothing.
    """

    def begin(self, step: int, carried: Any) -> None:
        """Restore the earlier measurements from the checkpoint."""
        self._splits: list[Any] = [*(carried or [])]

    def before_gradients(self, step: int) -> None:
        """Record fingerprints, which have the norms, of what this rank gives to the exchange."""
        if is_due(NOISE_EVERY_STEPS, step):
            self.run.recorder.fingerprints = []

    def _measure_part(self) -> tuple[float, float] | None:
        """Return a part's share of this step's batch, and the squared norm of its gradient."""
        run = self.run
        if run.first_pass is not None:
            share, norm = run.first_pass
            return share, norm.item() ** 2
        if run.num_ranks == 1 or not run.recorder.fingerprints:
            return None
        norms = torch.stack(run.recorder.fingerprints)[:, 1]
        square = norms.square().sum()
        dist.all_reduce(square)
        return 1 / run.num_ranks, square.item() / run.num_ranks

    def before_update(self, info: StepInfo) -> None:
        """Measure both norms, before the update and before a replay."""
        if is_due(NOISE_EVERY_STEPS, info.step) and (part := self._measure_part()):
            share, square = part
            tokens = info.num_tokens
            split = estimate_moments((share * tokens, square), (tokens, info.grad_norm**2))
            if all(map(math.isfinite, split)):
                self._splits.append([*split])
                del self._splits[:-NUM_NOISE_SAMPLES]

    def after_update(self, info: StepInfo) -> Columns:
        """Return the noise scale at measured steps, once there are enough of them."""
        if not is_due(NOISE_EVERY_STEPS, info.step) or len(self._splits) < MIN_NOISE_SAMPLES:
            return {}
        scale = estimate_running_scale(self._splits)
        if scale is None or not math.isfinite(scale.low):
            return {}
        columns: Columns = {
            "noise_scale_tokens": scale.tokens,
            "noise_scale_low_tokens": scale.low,
            "noise_scale_high_tokens": scale.high,
        }
        return {name: value for name, value in columns.items() if value is not None}

    def get_state(self) -> Json:
        """Return the newest measurements."""
        return [*self._splits] or None


# ---- Time of each rank ----

RANK_SECONDS_EVERY_STEPS = 10
"""Interval at which the ranks' times are compared: rare enough to cost nothing."""


class RankSeconds(Callback):
    """Measures `rank_seconds`: each rank's seconds inside the blocks' forward passes.

    A full step takes every rank as long as the slowest one, because the ranks wait for each other
    at every exchange. There is no exchange within a block's forward pass, so its time is the rank's
    own.
    """

    _has_hooks = _is_due = False

    def begin(self, step: int, carried: Any) -> None:
        """Put hooks on the blocks, once: a run that goes back to a checkpoint begins again."""
        run = self.run
        for block in () if self._has_hooks else run.source.blocks(run.model).values():
            block.register_forward_pre_hook(self._mark)
            block.register_forward_hook(self._mark, prepend=True)
        self._has_hooks = True

    def before_gradients(self, step: int) -> None:
        """Begin to mark, if the step is one to measure."""
        self._is_due = is_due(RANK_SECONDS_EVERY_STEPS, step)
        self._marks: list[Any] = []

    def _mark(self, *_: Any) -> None:
        """Note the time at which a block's pass begins or ends, unless it is a validation's."""
        if not (self._is_due and torch.is_grad_enabled()):
            return
        mark: Any = time.perf_counter()
        if torch.cuda.is_available():
            mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            mark.record()
        self._marks.append(mark)

    def before_update(self, info: StepInfo) -> None:
        """Add up this step's time, before a replay computes the step again."""
        self._seconds = math.fsum(
            stop - start if isinstance(stop, float) else start.elapsed_time(stop) / 1000
            for start, stop in zip(self._marks[::2], self._marks[1::2], strict=True)
        )

    def after_update(self, info: StepInfo) -> Columns:
        """Return every rank's time of this step alone."""
        return {"rank_seconds": [*gather(self._seconds)]} if self._is_due else {}
