"""The fixed text of the module that the olmo-core export writes beside its JSON: what OLMo-core lacks.

Text, not code, since OLMo-core lives in an environment of its own. Written against OLMo-core's public classes; nothing
of theirs is copied. `<<NAME>>` stands for what an export fills in.
"""

MODULE_TEXT = '''"""What a frozen launch config of forerun needs that OLMo-core lacks; `run.json` names these classes.

Generated for OLMo-core <<VERSION>>: an edit makes it another run. digest <<DIGEST>>
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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
from torch.distributed.tensor import DTensor, distribute_tensor

from proxies.data.tokens import TokenStore
from proxies.core.schedule import Schedule

RUN_FILE = Path(__file__).resolve().with_name("run.json")
NAMES = <<NAMES>>


@dataclass
class ScaledAttentionConfig(AttentionConfig):
    """OLMo-core's attention, which takes a scale of q . k that its own config cannot tell."""

    softmax_scale: float | None = None


class ScaledRMSNorm(RMSNorm):
    """A norm whose output is multiplied: before the readout, so that the readout's input is."""

    multiplier = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.multiplier


@dataclass
class ScaledNormConfig(LayerNormConfig):
    """Of a `ScaledRMSNorm`."""

    multiplier: float = 1.0

    def build(self, size: int, init_device: str = "cpu", weight_shape: tuple[int, ...] | None = None) -> RMSNorm:
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
        store = TokenStore(Path(os.environ["FORERUN_DATA"]), weights=dict(self.weights) or None)
        if store.manifest.data_id != self.data_id:
            raise ValueError(f"the corpus has data_id {store.manifest.data_id}, frozen as {self.data_id}")
        return CorpusLoader(self, store, dp_process_group, work_dir)


class CorpusLoader(DataLoaderBase):
    """Batch t of the run is batch (seed, t) of the corpus, cut across ranks; resumes on any number of them."""

    def __init__(
        self, config: CorpusLoaderConfig, store: TokenStore, dp_process_group: dist.ProcessGroup | None, work_dir: str
    ) -> None:
        super().__init__(
            work_dir=work_dir, global_batch_size=config.batch_sequences * config.sequence_length,
            dp_world_size=get_world_size(dp_process_group), dp_rank=get_rank(dp_process_group),
        )
        self.config, self.store = config, store
        self.schedule = Schedule(
            kind="constant", num_steps=config.num_steps, batch_warmup_steps=config.batch_warmup_steps,
            batch_warmup_stages=config.batch_warmup_stages,
        )

    @property
    def total_batches(self) -> None:
        return None

    def _iter_batches(self) -> Iterator[dict[str, Any]]:
        for step in range(self.batches_processed, self.config.num_steps):
            first, count = self.schedule.sequences(step, self.config.batch_sequences)
            mine = count // self.dp_world_size
            ids = torch.from_numpy(self.store.train_batch(
                seed=self.config.seed, first_sequence=first + self.dp_rank * mine, num_sequences=mine,
                seq_len=self.config.sequence_length))
            yield {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    def get_mock_batch(self) -> dict[str, Any]:
        ids = torch.zeros(self.rank_batch_size, dtype=torch.int64).view(-1, self.config.sequence_length)
        return {"input_ids": ids, "labels": ids.clone()}

    def global_num_tokens_in_batch(self, batch: dict[str, Any]) -> int:
        return batch["input_ids"].numel() * self.dp_world_size

    def reshuffle(self, epoch: int | None = None, **unused: Any) -> None:
        self._epoch = epoch or 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches_processed": self.batches_processed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches_processed = state_dict["batches_processed"]


@dataclass
class Brakes(Callback):
    """Stops before the update that must not be made; writes loss and gradient norm of every step to metrics.jsonl."""

    warmup_steps: int = 0
    train_loss_above_nats: float = 0.0

    @property
    def metrics_file(self) -> Path:
        return Path(self.trainer.save_folder, "metrics.jsonl")

    def pre_train(self) -> None:
        if get_rank() == 0 and self.metrics_file.exists():  # of steps that a resumed run takes again
            lines = self.metrics_file.read_text().splitlines(keepends=True)
            self.metrics_file.write_text("".join(line for line in lines if json.loads(line)["step"] <= self.step))

    def pre_optim_step(self) -> None:
        parameters = self.trainer.train_module.model.parameters()
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        loss = self.trainer.get_metric(TRAIN_CE_LOSS_METRIC).double()
        dist.all_reduce(loss, group=self.trainer.dp_process_group)
        loss_nats = float(loss) / self.trainer.data_loader.dp_world_size
        if not (math.isfinite(loss_nats) and math.isfinite(norm)):
            raise RuntimeError(
                f"loss {loss_nats} or gradient norm {norm} not finite at step {self.step}, before its update")
        if self.step - 1 > self.warmup_steps and loss_nats > self.train_loss_above_nats:
            raise RuntimeError(
                f"loss {loss_nats} over {self.train_loss_above_nats} nats at step {self.step}, before its update")
        if get_rank() == 0:
            line = {"step": self.step, "train_loss_nats": loss_nats, "grad_norm": norm,
                    "tokens": self.trainer.global_train_tokens_seen}
            with self.metrics_file.open("a") as file:
                file.write(json.dumps(line) + "\\n")


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


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers of activation checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")


def frozen_name(name: str) -> str:
    """The frozen config's name of a parameter."""
    name = plain_name(name)
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


@torch.no_grad()
def set_initial_values(model: torch.nn.Module, config: RunConfig) -> None:
    """Draw each parameter on the CPU from a seed of (seed, name); every rank keeps its own part."""
    for name, parameter in model.named_parameters():
        [std] = [v.std for v in config.initial_values if any(fnmatch(name, glob) for glob in v.params)]
        seed = int.from_bytes(hashlib.sha256(f"{config.seed}/{frozen_name(name)}".encode()).digest()[:7], "big")
        full = torch.ones(parameter.shape)
        if std:
            full = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * std
        full = full.to(parameter.device)
        if isinstance(parameter, DTensor):
            full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(full)


def unclaimed(model: torch.nn.Module, config: RunConfig) -> list[str]:
    """Parameters that not exactly one optimizer group claims: OLMo-core would give them its default numbers."""
    groups = config.train_module.optim.group_overrides or []
    claims = {n: sum(any(fnmatch(n, glob) for glob in g.params) for g in groups) for n, _ in model.named_parameters()}
    return [f"{count} groups claim {name}" for name, count in claims.items() if count != 1]
'''
