"""Lines of `metrics.jsonl`: the first line of an attempt, the line of a step, and the measurements
that some steps add to their line.

The measurements are norms of every layer, the validation loss, the gradient noise scale, and each
rank's time. The gradient noise scale is the batch size in tokens at which the noise of a gradient
is as large as the gradient (arXiv 1812.06162). If a step is replayed (`replay`), the measurements
are from its first computation. Each rank holds parts of the weights, but a layer's norms are those
of its full weights, up to rounding, on any number of ranks.
"""

from __future__ import annotations

import datetime
import math
import re
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from forerun._launcher.main_run.estimates.reference_tables import GPUS
from forerun._launcher.main_run.metrics_file import AttemptStart
from forerun._launcher.main_run.trainer.callbacks import Callback, Columns, StepInfo
from forerun._launcher.main_run.trainer.ranks import compute_norm, gather
from forerun._proxies.core.canon import Json
from forerun._proxies.core.flops import compute_flops_per_token
from forerun._proxies.core.noise_scale import estimate_moments, estimate_running_scale
from forerun._proxies.model.loss import compute_token_loss
from forerun._proxies.training.run_progress import get_environment, read_validation_ids

if TYPE_CHECKING:
    from forerun._launcher.main_run.trainer.training import Trainer

# ---- Attempts and steps ----

_SLOWER_FORMS = {"PCIe", "NVL"}
"""Words in a device's name that mark a slower variant of the GPU in the reference table."""


def build_header(run: Trainer) -> AttemptStart:
    """Return the first line of an attempt at a run."""
    decision, name = run.decision, get_environment(run.device)["device"]
    peak = look_up_peak(name) if decision.precision == "bfloat16" else None
    return AttemptStart(
        digest=decision.digest,
        step=run.done,
        started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        num_ranks=run.num_ranks,
        device=name,
        model_flops_per_token=float(compute_flops_per_token(decision.shape)),
        peak_flops_per_second=peak,
    )


def look_up_peak(device_name: str) -> float | None:
    """Return the dense bfloat16 peak of a device in FLOP/s; None if the reference table lacks it.

    Args:
        device_name: Name of the device as its driver reports it.
    """
    words = re.split(r"[^A-Za-z0-9]+", device_name)
    # The table's RTX4090 is two words in the driver's "GeForce RTX 4090".
    names = {*words, *(first + second for first, second in pairwise(words))}
    if names & _SLOWER_FORMS:
        return None
    return next((gpu.peak_flops for name, gpu in GPUS.items() if name in names), None)


def build_step_line(run: Trainer, info: StepInfo, seconds: float) -> Columns:
    """Return the line of a step that took `seconds`; without `mfu` if the peak is not known."""
    tokens_per_second, header = info.num_tokens / seconds, run.header
    line: Columns = {
        "step": info.step + 1,
        "train_loss_nats": info.loss_nats,
        "grad_norm": info.grad_norm,
        "lr": run.optimizer.param_groups[0]["lr"],
        "tokens": run.count_sequences(info.step + 1)[0] * run.decision.shape.seq_len,
        "tokens_per_second": tokens_per_second,
        "seconds": seconds,
    }
    if header.peak_flops_per_second is not None:
        peak = header.peak_flops_per_second * header.num_ranks
        line["mfu"] = tokens_per_second / peak * header.model_flops_per_token
    return line


@torch.no_grad()
def measure_validation_loss(run: Trainer) -> float:
    """Return the validation loss in nats per token; collective.

    The validation windows are those of the proxies, the small runs that the config was frozen from.
    """
    seq_len, num_rows = run.decision.shape.seq_len, run.pass_sequences
    windows = read_validation_ids(run.store, seq_len)
    num_sequences = len(windows)
    total = torch.zeros((), dtype=torch.float64, device=run.device)
    for first in range(0, num_sequences, num_rows * run.num_ranks):
        # With sharding, every rank must run the model equally often. So rows beyond the last window
        # repeat it, and their losses do not count.
        start = first + run.rank * num_rows
        rows = torch.arange(start, start + num_rows).clamp(max=num_sequences - 1)
        ids_BT = windows[rows].to(run.device)
        logits_BTV = run.source.forward(run.model, ids_BT[:, :-1]).view(num_rows, seq_len, -1)
        losses_B = compute_token_loss(logits_BTV, ids_BT[:, 1:])
        total += losses_B[: max(0, num_sequences - start)].double().sum()
    dist.all_reduce(total)
    return total.item() / num_sequences


# ---- Layers ----

_NAMES = {"tok_embeddings": "embedding", "pos_embeddings": "positions", "lm_head": "readout"}
"""Names of layers by the decoder's module, if they differ."""


def group_by_layer(run: Trainer) -> dict[str, list[str]]:
    """Return the names of a model's parameters by layer.

    A layer is a block or a module outside of blocks. In forerun's decoder, the layers are
    `layers.0` and so on, `embedding`, `positions`, `readout`, and `norm` (the last norm). In a
    user's model, they have the paths of the modules.
    """
    blocks, names = run.source.find_blocks(run.model), {} if run.decision.model else _NAMES
    layers: dict[str, list[str]] = {}
    for name, _ in run.model.named_parameters():
        block = next((path for path in blocks if name.startswith(f"{path}.")), None)
        layer = block or name.rpartition(".")[0] or name
        layers.setdefault(names.get(layer, layer), []).append(name)
    return layers


class Layers(Callback):
    """A callback that measures each layer: `weight_rms`, `param_norm`, `grad_norm` before clipping,
    and `update_ratio`.
    """

    def __init__(self, every_steps: int) -> None:
        self.every_steps = every_steps

    def begin(self, step: int, carried: Any) -> None:
        """Assign each parameter to a layer."""
        self._layers = {
            layer: [self.run.model.get_parameter(name) for name in names]
            for layer, names in group_by_layer(self.run).items()
        }

    @torch.no_grad()
    def before_update(self, info: StepInfo) -> None:
        """Measure the gradients, which clipping is about to change, and copy the weights."""
        self._grad_norms = {
            layer: compute_norm(parameter.grad for parameter in parameters)
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
        layers: Columns = {}
        for layer, parameters in self._layers.items():
            updates = [p - self._before.pop(p).to(p.device) for p in parameters]
            param_norm, update_norm = compute_norm(parameters).item(), compute_norm(updates).item()
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
"""Number of newest measurements that the noise scale averages, and the minimum number for it."""


class BatchNoise(Callback):
    """A callback that measures the gradient noise scale and its interval
    (`forerun._proxies.core.noise_scale`).

    The estimate compares the norm of the full batch's gradient with that of a part of the batch.
    The part is the first pass of a run that accumulates, or else each rank's own gradient before
    the exchange. Replicas that shard nothing and take one pass per step have no such part, and
    report nothing.
    """

    def __init__(self) -> None:
        self.every_steps = NOISE_EVERY_STEPS

    def begin(self, step: int, carried: Any) -> None:
        """Restore the earlier measurements from the checkpoint."""
        self._splits: list[Any] = [*(carried or [])]

    def before_gradients(self, step: int) -> None:
        """Record fingerprints of the gradients that this rank gives to the exchange.

        A fingerprint contains the norm.
        """
        self.run.recorder.fingerprints = []

    def _measure_part(self) -> tuple[float, float] | None:
        """Return a part's share of this step's batch, and the squared norm of its gradient.

        None if there is no part to measure.
        """
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
        if part := self._measure_part():
            share, square = part
            tokens = info.num_tokens
            split = estimate_moments((share * tokens, square), (tokens, info.grad_norm**2))
            if all(map(math.isfinite, split)):
                self._splits.append([*split])
                del self._splits[:-NUM_NOISE_SAMPLES]

    def after_update(self, info: StepInfo) -> Columns:
        """Return the noise scale, once there are enough measurements."""
        if len(self._splits) < MIN_NOISE_SAMPLES:
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
"""Steps between two comparisons of the ranks' times, which are then too rare to cost time."""


class RankSeconds(Callback):
    """A callback that measures `rank_seconds`: each rank's seconds in the forward passes of blocks.

    The ranks wait for each other at every exchange, so a full step takes all of them as long as the
    slowest rank. There is no exchange within a block's forward pass, so its time is the rank's own.
    """

    every_steps = RANK_SECONDS_EVERY_STEPS
    _has_hooks = False
    _marks: list[Any] | None = None
    """Times at which blocks' passes of this step began and ended; None if it is not measured."""

    def begin(self, step: int, carried: Any) -> None:
        """Register hooks on the blocks, unless the run has only gone back to a checkpoint."""
        run, self._marks = self.run, None
        for block in () if self._has_hooks else run.source.find_blocks(run.model).values():
            block.register_forward_pre_hook(self._mark)
            block.register_forward_hook(self._mark, prepend=True)
        self._has_hooks = True

    def before_gradients(self, step: int) -> None:
        """Begin to measure this step."""
        self._marks = []

    def _mark(self, *_: Any) -> None:
        """Record the time at which a block's forward pass begins or ends, except in validations."""
        if self._marks is None or not torch.is_grad_enabled():
            return
        mark: Any = time.perf_counter()
        if torch.cuda.is_available():
            mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            mark.record()
        self._marks.append(mark)

    def before_update(self, info: StepInfo) -> None:
        """Add up this step's time, before a replay computes the step again."""
        marks, self._marks = self._marks or [], None
        self._seconds = math.fsum(
            stop - start if isinstance(stop, float) else start.elapsed_time(stop) / 1000
            for start, stop in zip(marks[::2], marks[1::2], strict=True)
        )

    def after_update(self, info: StepInfo) -> Columns:
        """Return the time of each rank in this step."""
        return {"rank_seconds": [*gather(self._seconds)]}
