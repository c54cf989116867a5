"""Classes that a frozen launch config of forerun needs and OLMo-core lacks; `run.json` names them.

`run.json` has everything for which OLMo-core has configs, and `forerun.json` the other numbers. The
code uses the public classes of OLMo-core and copies nothing from it.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forerun_numbers import HERE, open_corpus, read_numbers
from forerun_torch import gradient_norm, import_muon, read_rows, stop_before_update
from olmo_core.config import Config
from olmo_core.data.data_loader import DataLoaderBase
from olmo_core.distributed.utils import get_rank, get_world_size
from olmo_core.nn.attention import AttentionConfig
from olmo_core.nn.layer_norm import LayerNormConfig, RMSNorm
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import OptimConfig
from olmo_core.train import TrainerConfig
from olmo_core.train.callbacks import Callback
from olmo_core.train.common import TRAIN_CE_LOSS_METRIC
from olmo_core.train.train_module import TransformerTrainModuleConfig

from forerun._proxies.core.schedule import Schedule

FROZEN = read_numbers()
SEQ_LEN = FROZEN.shape.seq_len
SCHEDULE = Schedule(**vars(FROZEN.schedule))
RUN_FILE = HERE / "run.json"


@dataclass
class ScaledAttentionConfig(AttentionConfig):
    """Configuration of OLMo-core's attention with a scale of q . k, which its own config lacks."""

    softmax_scale: float | None = None


class ScaledRMSNorm(RMSNorm):
    """A norm whose output, the readout's input, is multiplied."""

    multiplier = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the input and multiply it."""
        return super().forward(x) * self.multiplier


@dataclass
class ScaledNormConfig(LayerNormConfig):
    """Configuration of a `ScaledRMSNorm`."""

    multiplier: float = 1.0

    def build(
        self, size: int, init_device: str = "cpu", weight_shape: tuple[int, ...] | None = None
    ) -> RMSNorm:
        """Build the norm."""
        norm = ScaledRMSNorm(
            size=size, eps=self.eps, bias=False, init_device=init_device, weight_shape=weight_shape
        )
        norm.multiplier = self.multiplier
        return norm


@dataclass
class MuonConfig(OptimConfig):
    """Configuration of the Muon that this export carries; each group has its own numbers."""

    @classmethod
    def optimizer(cls) -> Any:
        """Return the class of the optimizer."""
        return import_muon()


class CorpusLoader(DataLoaderBase):
    """A loader that divides each batch of the frozen data order among the ranks.

    A run can resume on another number of ranks.
    """

    def __init__(self, dp_process_group: dist.ProcessGroup | None, work_dir: str) -> None:
        super().__init__(
            work_dir=work_dir,
            global_batch_size=FROZEN.batch_sequences * SEQ_LEN,
            dp_world_size=get_world_size(dp_process_group),
            dp_rank=get_rank(dp_process_group),
        )
        self.store = open_corpus(FROZEN, os.environ.get("FORERUN_DATA"))

    @property
    def total_batches(self) -> None:
        """None, because the trainer's duration ends the run."""
        return None

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        for step in range(self.batches_processed, SCHEDULE.num_steps):
            first, count = SCHEDULE.count_sequences(step, FROZEN.batch_sequences)
            num_rows = count // self.dp_world_size
            ids = read_rows(FROZEN, self.store, first + self.dp_rank * num_rows, num_rows)
            yield {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def get_mock_batch(self) -> dict[str, Any]:
        """Return a batch of zeros for OLMo-core's dry run."""
        ids = torch.zeros(self.rank_batch_size, dtype=torch.int64).view(-1, SEQ_LEN)
        return {"input_ids": ids, "labels": ids.clone()}

    def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int:
        """Return the number of tokens that all ranks together read in the batch."""
        return int(batch["input_ids"].numel() * self.dp_world_size)

    def reshuffle(self, epoch: int | None = None, **unused: Any) -> None:
        """Set the epoch; the order is frozen, so it is not shuffled."""
        self._epoch = epoch or 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, which fits any number of ranks."""
        return {"batches_processed": self.batches_processed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a position in the data."""
        self.batches_processed = state_dict["batches_processed"]


@dataclass
class Brakes(Callback):
    """The brakes of the run: a callback that follows the frozen abort policy.

    It stops the run if the loss or the gradient is not finite, or if the loss is above the limit.
    The callback also logs every step to metrics.jsonl.
    """

    @property
    def metrics_file(self) -> Path:
        """Path of the log, in the folder of checkpoints."""
        return Path(self.trainer.save_folder, "metrics.jsonl")

    def pre_train(self) -> None:
        """Remove the log lines of steps that a resumed run trains again."""
        if get_rank() == 0 and self.metrics_file.exists():
            lines = self.metrics_file.read_text().splitlines(keepends=True)
            self.metrics_file.write_text(
                "".join(line for line in lines if json.loads(line)["step"] <= self.step)
            )

    def pre_optim_step(self) -> None:
        """Check and log the step: the last place before the update is applied."""
        norm = gradient_norm(self.trainer.train_module.model.parameters())
        loss = self.trainer.get_metric(TRAIN_CE_LOSS_METRIC).double()
        dist.all_reduce(loss, group=self.trainer.dp_process_group)
        loss_nats = float(loss) / self.trainer.data_loader.dp_world_size
        stop_before_update(
            loss_nats, norm, self.step, SCHEDULE.warmup_steps, FROZEN.train_loss_above_nats
        )
        if get_rank() == 0:
            tokens = self.trainer.global_train_tokens_seen
            line = {
                "step": self.step,
                "train_loss_nats": loss_nats,
                "grad_norm": norm,
                "tokens": tokens,
            }
            with self.metrics_file.open("a") as file:
                file.write(json.dumps(line) + "\n")


@dataclass
class RunConfig(Config):
    """The configs of a run, with the digest of their frozen config and the number of ranks."""

    digest: str
    num_ranks: int
    model: TransformerConfig
    train_module: TransformerTrainModuleConfig
    trainer: TrainerConfig


def frozen_name(name: str) -> str:
    """Return the frozen config's name of a parameter, also if activation checkpointing wraps it."""
    name = name.replace("_checkpoint_wrapped_module.", "")
    for part, frozen_part in FROZEN.names:
        name = name.replace(part, frozen_part)
    return name


def find_misassigned(model: torch.nn.Module, config: RunConfig) -> list[str]:
    """Return a problem for each parameter that does not belong to exactly one optimizer group.

    OLMo-core would train a parameter without a group with default numbers.
    """
    groups = config.train_module.optim.group_overrides or []
    claims = {
        n: sum(any(fnmatch(n, glob) for glob in g.params) for g in groups)
        for n, _ in model.named_parameters()
    }
    return [f"{count} groups claim {name}" for name, count in claims.items() if count != 1]
