"""The fixed text of the module that the torchtitan export writes: its imports, and what it builds from the numbers.

Text, not code, since torchtitan lives in an environment of its own. Between the two parts go the decision's numbers, as
literals; what its versions call differently stands as `<<NAME>>` (torchtitan_versions.py). Written against torchtitan's
public classes; nothing of theirs is copied.
"""

IMPORTS = """import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.utils import canonical_fqn
<<IMPORT_LOADER>>
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import CosSinRoPE, Embedding, FeedForward, GQAttention, Linear, QKVLinear, RMSNorm
from torchtitan.models.common import ScaledDotProductAttention
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from proxies.data.tokens import TokenStore
"""

RUN = '''

class CorpusLoader(BaseDataLoader):
    """Batch t of the run is batch (SEED, t) of the corpus, cut across ranks; resumes on any number of them."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        corpus: str | None

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, <<SIZES>>, **unused: object) -> None:
        if not config.corpus:
            raise ValueError("FORERUN_DATA is not set: the corpus folder is wanted")
        self.store = TokenStore(Path(config.corpus), weights=DATA_WEIGHTS or None)
        if self.store.manifest.data_id != DATA_ID:
            raise ValueError(f"{config.corpus} has data_id {self.store.manifest.data_id}, frozen as {DATA_ID}")
        self.num_ranks, self.rank = dp_world_size, dp_rank
        self.num_sequences = <<SEQUENCES>>
        self.num_batches = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            part = self.num_batches * self.num_ranks + self.rank
            ids = torch.from_numpy(self.store.train_batch(
                seed=SEED, first_sequence=part * self.num_sequences, num_sequences=self.num_sequences,
                seq_len=SEQ_LEN))
            self.num_batches += 1
            <<BATCH>>

    def state_dict(self) -> dict[str, int]:
        return {"num_sequences_read": self.num_batches * self.num_ranks * self.num_sequences}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        num_read, per_batch = state_dict["num_sequences_read"], self.num_ranks * self.num_sequences
        if num_read % per_batch:
            raise ValueError(f"{num_read} sequences were read: no multiple of {per_batch}, what the ranks now read")
        self.num_batches = num_read // per_batch


class NoTokenizer(BaseTokenizer):
    """The corpus is tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **unused: object) -> None:
        super().__init__()

    def encode(self, *args: object, **kwargs: object) -> list[int]:
        raise NotImplementedError("the corpus is tokens already")

    def decode(self, *args: object, **kwargs: object) -> str:
        raise NotImplementedError("the corpus is tokens already")

    def get_vocab_size(self) -> int:
        return VOCAB_SIZE


class GuardedOptimizers(OptimizersContainer):
    """Stops before a step on gradients that are not finite: neither weights nor checkpoints take harm."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _build_param_groups(model: torch.nn.Module, groups: list[ParamGroupConfig], kwargs: dict[str, object]) -> tuple:
        # A pipeline stage lacks the embedding or the readout; torchtitan takes a pattern without parameters for dead.
        names = [name for name, _ in model.named_parameters()]
        if PIPELINE_PARALLEL > 1:
            groups = [group for group in groups if any(re.search(group.pattern, name) for name in names)]
        return OptimizersContainer._build_param_groups(model, groups, kwargs)

    def step(self, closure: None = None) -> None:
        gradients = [p.grad for part in self.model_parts for p in part.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, foreach=True)
        if not torch.isfinite(norm.full_tensor() if isinstance(norm, DTensor) else norm):
            raise RuntimeError("the gradient is not finite: stopped before the step")
        super().step(closure)


class GuardedMetrics(MetricsProcessor):
    """Stops, before anything more is saved, when past the warmup the training loss exceeds the frozen ceiling."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, global_avg_loss: float, *args: object, **kwargs: object) -> None:
        super().log(step, global_avg_loss, *args, **kwargs)
        if step > WARMUP_STEPS + 1 and global_avg_loss > ABORT_ABOVE_NATS:
            raise RuntimeError(f"training loss {global_avg_loss} > {ABORT_ABOVE_NATS} nats at step {step}: stopped")


def main_run() -> Trainer.Config:
    return Trainer.Config(
        model_spec=ModelSpec(
            name="forerun", flavor=DIGEST[:16], model=model(), parallelize_fn=parallelize_llama,
            pipelining_fn=pipeline_llm, post_optimizer_build_fn=None, state_dict_adapter=None,
        ),
        hf_assets_path=".",
        dump_folder=f"outputs/{DIGEST[:16]}",
        tokenizer=NoTokenizer.Config(),
        dataloader=CorpusLoader.Config(corpus=os.environ.get("FORERUN_DATA")),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCAB_SIZE),
        optimizer=GuardedOptimizers.Config(
            param_groups=[
                ParamGroupConfig(
                    pattern=group["pattern"], optimizer_name="AdamW", optimizer_kwargs=group["optimizer_kwargs"]
                )
                for group in GROUPS
            ],
            implementation="foreach",
        ),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=WARMUP_STEPS, total_steps=NUM_STEPS, decay_ratio=DECAY_RATIO, decay_type=DECAY_TYPE,
            min_lr_factor=FINAL_FRACTION,
        ),
        training=TrainingConfig(
            <<TRAINING>>
            max_norm=float("inf") if CLIP_NORM is None else CLIP_NORM,
            steps=NUM_STEPS,
            disable_cuda_graphs=True,
            mixed_precision_param=PRECISION,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=DATA_PARALLEL_REPLICATE,
            data_parallel_shard_degree=DATA_PARALLEL_SHARD,
            tensor_parallel_degree=TENSOR_PARALLEL,
            pipeline_parallel_degree=PIPELINE_PARALLEL,
            <<PIPELINE>>
            spmd_backend="partial_dtensor",
        ),
        activation_checkpoint={
            "none": None, "selective": SelectiveAC.Config(), "full": FullAC.Config()
        }[ACTIVATION_CHECKPOINTING],
        checkpoint=CheckpointManager.Config(
            enable=True, interval=CHECKPOINT_EVERY_STEPS, keep_latest_k=CHECKPOINT_KEEP, last_save_model_only=False
        ),
        metrics=GuardedMetrics.Config(log_freq=1),
        debug=DebugConfig(seed=SEED, deterministic=True),
    )
'''
