"""What a frozen launch config of forerun needs that OLMo-core lacks; `run.json` names these
classes.

What OLMo-core has configs for stands there, the other numbers in `forerun.json`. Written against
OLMo-core's public classes; nothing of theirs is copied.
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
from forerun_torch import gradient_norm, muon, read_rows, stop_before_update
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

from proxies.core.schedule import Schedule

FROZEN = read_numbers()
SEQ_LEN = FROZEN.shape.seq_len
SCHEDULE = Schedule(**vars(FROZEN.schedule))
RUN_FILE = HERE / "run.json"


@dataclass
class ScaledAttentionConfig(AttentionConfig):
    """OLMo-core's attention, which takes a scale of q . k that its own config cannot tell."""

    softmax_scale: float | None = None


class ScaledRMSNorm(RMSNorm):
    """A norm whose output is multiplied: before the readout, so that the readout's input is."""

    multiplier = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm, multiplied."""
        return super().forward(x) * self.multiplier


@dataclass
class ScaledNormConfig(LayerNormConfig):
    """Of a `ScaledRMSNorm`."""

    multiplier: float = 1.0

    def build(
        self, size: int, init_device: str = "cpu", weight_shape: tuple[int, ...] | None = None
    ) -> RMSNorm:
        """The norm."""
        norm = ScaledRMSNorm(
            size=size, eps=self.eps, bias=False, init_device=init_device, weight_shape=weight_shape
        )
        norm.multiplier = self.multiplier
        return norm


@dataclass
class MuonConfig(OptimConfig):
    """Of the Muon that this export carries; every group has its own numbers."""

    @classmethod
    def optimizer(cls) -> Any:
        """Its class."""
        return muon()


class CorpusLoader(DataLoaderBase):
    """Batch t of the run is batch (seed, t) of the corpus, cut across ranks; resumes on any number
    of them.
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
        """Not told: the trainer's duration ends the run."""
        return None

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        for step in range(self.batches_processed, SCHEDULE.num_steps):
            first, count = SCHEDULE.sequences(step, FROZEN.batch_sequences)
            mine = count // self.dp_world_size
            ids = read_rows(FROZEN, self.store, first + self.dp_rank * mine, mine)
            yield {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def get_mock_batch(self) -> dict[str, Any]:
        """A batch of zeros, for OLMo-core's dry run."""
        ids = torch.zeros(self.rank_batch_size, dtype=torch.int64).view(-1, SEQ_LEN)
        return {"input_ids": ids, "labels": ids.clone()}

    def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int:
        """Of all ranks."""
        return int(batch["input_ids"].numel() * self.dp_world_size)

    def reshuffle(self, epoch: int | None = None, **unused: Any) -> None:
        """Nothing to shuffle: the order is frozen."""
        self._epoch = epoch or 1

    def state_dict(self) -> dict[str, Any]:
        """How far the run is, on any number of ranks."""
        return {"batches_processed": self.batches_processed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.batches_processed = state_dict["batches_processed"]


@dataclass
class Brakes(Callback):
    """Stops before the update that must not be made; writes loss and gradient norm of every step to
    metrics.jsonl.
    """

    @property
    def metrics_file(self) -> Path:
        """Beside the checkpoints."""
        return Path(self.trainer.save_folder, "metrics.jsonl")

    def pre_train(self) -> None:
        """Take the lines out of steps that a resumed run takes again."""
        if get_rank() == 0 and self.metrics_file.exists():
            lines = self.metrics_file.read_text().splitlines(keepends=True)
            self.metrics_file.write_text(
                "".join(line for line in lines if json.loads(line)["step"] <= self.step)
            )

    def pre_optim_step(self) -> None:
        """The last stop before the update."""
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
    """A run: OLMo-core's own configs, of which frozen config they are, and the ranks they are
    for.
    """

    digest: str
    num_ranks: int
    model: TransformerConfig
    train_module: TransformerTrainModuleConfig
    trainer: TrainerConfig


def frozen_name(name: str) -> str:
    """The frozen config's name of a parameter, with or without the wrappers of activation
    checkpointing.
    """
    name = name.replace("_checkpoint_wrapped_module.", "")
    for theirs, ours in FROZEN.names:
        name = name.replace(theirs, ours)
    return name


def unclaimed(model: torch.nn.Module, config: RunConfig) -> list[str]:
    """Parameters that not exactly one optimizer group claims: OLMo-core would give them its default
    numbers.
    """
    groups = config.train_module.optim.group_overrides or []
    claims = {
        n: sum(any(fnmatch(n, glob) for glob in g.params) for g in groups)
        for n, _ in model.named_parameters()
    }
    return [f"{count} groups claim {name}" for name, count in claims.items() if count != 1]
