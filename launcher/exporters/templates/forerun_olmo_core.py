"""What a frozen launch config of forerun needs that OLMo-core lacks; `run.json` names these classes.

The numbers of the run stand in `run.json`, in the form of OLMo-core's own configs. Written against OLMo-core's public
classes; nothing of theirs is copied.
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
from forerun_torch import gradient_norm, initial_value, set_value, stop_before_update
from olmo_core.config import Config
from olmo_core.data.data_loader import DataLoaderBase
from olmo_core.distributed.utils import get_rank, get_world_size
from olmo_core.nn.attention import AttentionConfig
from olmo_core.nn.layer_norm import LayerNormConfig, RMSNorm
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.train import TrainerConfig
from olmo_core.train.callbacks import Callback
from olmo_core.train.common import TRAIN_CE_LOSS_METRIC
from olmo_core.train.train_module import TransformerTrainModuleConfig

from proxies.core.schedule import Schedule
from proxies.data.tokens import TokenStore

FROZEN = read_numbers()
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

    def build(self, size: int, init_device: str = "cpu", weight_shape: tuple[int, ...] | None = None) -> RMSNorm:
        """The norm."""
        norm = ScaledRMSNorm(size=size, eps=self.eps, bias=False, init_device=init_device, weight_shape=weight_shape)
        norm.multiplier = self.multiplier
        return norm


@dataclass
class InitialValues(Config):
    """Normal(0, std) of (seed, name) for the parameters that the globs match; std 0: ones, of a norm's gains."""

    params: list[str]
    std: float


@dataclass
class CorpusLoaderConfig(Config):
    """Which corpus, in which order; FORERUN_DATA is its folder."""

    data_id: str
    seed: int
    sequence_length: int
    batch_sequences: int
    num_steps: int
    batch_warmup_steps: int
    batch_warmup_stages: int
    weights: list[list[Any]]

    def build(self, dp_process_group: dist.ProcessGroup | None, work_dir: str) -> "CorpusLoader":
        """The loader of this rank."""
        store = open_corpus(os.environ.get("FORERUN_DATA"), self.data_id, dict(self.weights))
        return CorpusLoader(self, store, dp_process_group, work_dir)


class CorpusLoader(DataLoaderBase):
    """Batch t of the run is batch (seed, t) of the corpus, cut across ranks; resumes on any number of them."""

    def __init__(
        self, config: CorpusLoaderConfig, store: TokenStore, dp_process_group: dist.ProcessGroup | None, work_dir: str
    ) -> None:
        super().__init__(
            work_dir=work_dir,
            global_batch_size=config.batch_sequences * config.sequence_length,
            dp_world_size=get_world_size(dp_process_group),
            dp_rank=get_rank(dp_process_group),
        )
        self.config, self.store = config, store
        self.schedule = Schedule(
            kind="constant",
            num_steps=config.num_steps,
            batch_warmup_steps=config.batch_warmup_steps,
            batch_warmup_stages=config.batch_warmup_stages,
        )

    @property
    def total_batches(self) -> None:
        """Not told: the trainer's duration ends the run."""
        return None

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        for step in range(self.batches_processed, self.config.num_steps):
            first, count = self.schedule.sequences(step, self.config.batch_sequences)
            mine = count // self.dp_world_size
            rows = self.store.train_batch(
                seed=self.config.seed,
                first_sequence=first + self.dp_rank * mine,
                num_sequences=mine,
                seq_len=self.config.sequence_length,
            )
            ids = torch.from_numpy(rows)
            yield {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def get_mock_batch(self) -> dict[str, Any]:
        """A batch of zeros, for OLMo-core's dry run."""
        ids = torch.zeros(self.rank_batch_size, dtype=torch.int64).view(-1, self.config.sequence_length)
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
    """Stops before the update that must not be made; writes loss and gradient norm of every step to metrics.jsonl."""

    warmup_steps: int = 0
    train_loss_above_nats: float = 0.0

    @property
    def metrics_file(self) -> Path:
        """Beside the checkpoints."""
        return Path(self.trainer.save_folder, "metrics.jsonl")

    def pre_train(self) -> None:
        """Take the lines out of steps that a resumed run takes again."""
        if get_rank() == 0 and self.metrics_file.exists():
            lines = self.metrics_file.read_text().splitlines(keepends=True)
            self.metrics_file.write_text("".join(line for line in lines if json.loads(line)["step"] <= self.step))

    def pre_optim_step(self) -> None:
        """The last stop before the update."""
        norm = gradient_norm(self.trainer.train_module.model.parameters())
        loss = self.trainer.get_metric(TRAIN_CE_LOSS_METRIC).double()
        dist.all_reduce(loss, group=self.trainer.dp_process_group)
        loss_nats = float(loss) / self.trainer.data_loader.dp_world_size
        stop_before_update(loss_nats, norm, self.step, self.warmup_steps, self.train_loss_above_nats)
        if get_rank() == 0:
            tokens = self.trainer.global_train_tokens_seen
            line = {"step": self.step, "train_loss_nats": loss_nats, "grad_norm": norm, "tokens": tokens}
            with self.metrics_file.open("a") as file:
                file.write(json.dumps(line) + "\n")


@dataclass
class RunConfig(Config):
    """A run: OLMo-core's own configs, and what they cannot hold."""

    digest: str
    num_ranks: int
    seed: int
    model: TransformerConfig
    initial_values: list[InitialValues]
    train_module: TransformerTrainModuleConfig
    data_loader: CorpusLoaderConfig
    trainer: TrainerConfig


def frozen_name(name: str) -> str:
    """The frozen config's name of a parameter, with or without the wrappers of activation checkpointing."""
    name = name.replace("_checkpoint_wrapped_module.", "")
    for theirs, ours in FROZEN.names:
        name = name.replace(theirs, ours)
    return name


def set_initial_values(model: torch.nn.Module, config: RunConfig) -> None:
    """Give each parameter its value of (seed, name)."""
    for name, parameter in model.named_parameters():
        [std] = [v.std for v in config.initial_values if any(fnmatch(name, glob) for glob in v.params)]
        set_value(parameter, initial_value(frozen_name(name), parameter.shape, std, config.seed))


def unclaimed(model: torch.nn.Module, config: RunConfig) -> list[str]:
    """Parameters that not exactly one optimizer group claims: OLMo-core would give them its default numbers."""
    groups = config.train_module.optim.group_overrides or []
    claims = {n: sum(any(fnmatch(n, glob) for glob in g.params) for g in groups) for n, _ in model.named_parameters()}
    return [f"{count} groups claim {name}" for name, count in claims.items() if count != 1]
