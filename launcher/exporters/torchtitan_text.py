"""The fixed text of the module that the torchtitan export writes: its imports, and what it builds from the numbers.

Text, not code, since torchtitan lives in an environment of its own. Between the two parts go the decision's numbers, as
literals. Written against torchtitan 0.3.0's public classes; nothing of theirs is copied.
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
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common import CosSinRoPE, Embedding, FeedForward, GQAttention, Linear, QKVLinear, RMSNorm
from torchtitan.models.common import ScaledDotProductAttention
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from proxies.data.tokens import TokenStore
"""

MACHINERY = '''

class MultEmbedding(Embedding):
    """A token embedding whose output is multiplied."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        multiplier: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.multiplier = config.multiplier

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * self.multiplier


class MultLinear(Linear):
    """A linear map whose input is multiplied."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        multiplier: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.multiplier = config.multiplier

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input * self.multiplier)


class ScaledAttention(GQAttention):
    """Attention with its own scale of q . k."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        scale: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scaling = config.scale


class FrozenModel(Llama3Model):
    """Starts from the initial values of (seed, name), whatever the number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        pass

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        super().init_states(buffer_device=buffer_device)
        with torch.no_grad():
            for fqn, parameter in self.named_parameters():
                parameter.copy_(initial_value(canonical_fqn(fqn), parameter))


def initial_value(fqn: str, parameter: torch.Tensor) -> torch.Tensor:
    """Ones for norm gains (std 0), else normal(0, init_std) drawn on the CPU from a seed of (SEED, name)."""
    init_std = next(group["init_std"] for group in GROUPS if re.search(group["pattern"], fqn))
    if init_std == 0:
        return torch.ones_like(parameter)
    name = fqn.replace(".qkv_linear.", ".")
    seed = int.from_bytes(hashlib.sha256(f"{SEED}/{name}".encode()).digest()[:7], "big")
    generator = torch.Generator().manual_seed(seed)
    full = (torch.randn(parameter.shape, generator=generator) * init_std).to(parameter.device)
    if isinstance(parameter, DTensor):
        full = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return full


class CorpusLoader(BaseDataLoader):
    """Batch t of the run is batch (SEED, t) of the corpus, cut across ranks; resumes on any number of them."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int,
                 **unused: object) -> None:
        if not config.dataset_path:
            raise ValueError("FORERUN_DATA is not set: the corpus folder is wanted")
        self.store = TokenStore(Path(config.dataset_path), weights=DATA_WEIGHTS or None)
        if self.store.manifest.data_id != DATA_ID:
            raise ValueError(f"{config.dataset_path} has data_id {self.store.manifest.data_id}, frozen as {DATA_ID}")
        self.num_ranks, self.rank, self.seq_len = dp_world_size, dp_rank, seq_len
        self.num_sequences = local_batch_size
        self.num_batches = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            part = self.num_batches * self.num_ranks + self.rank
            ids = torch.from_numpy(self.store.train_batch(
                seed=SEED, first_sequence=part * self.num_sequences, num_sequences=self.num_sequences,
                seq_len=self.seq_len))
            self.num_batches += 1
            yield {"input": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous()

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


def linear(in_features: int, out_features: int) -> Linear.Config:
    return Linear.Config(in_features=in_features, out_features=out_features)


def norm() -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=WIDTH, eps=NORM_EPS)


def block() -> Llama3TransformerBlock.Config:
    head_dim = WIDTH // NUM_HEADS
    return Llama3TransformerBlock.Config(
        attention_norm=norm(),
        attention=ScaledAttention.Config(
            n_heads=NUM_HEADS,
            n_kv_heads=NUM_KV_HEADS,
            dim=WIDTH,
            qkv_linear=QKVLinear.Config(
                head_dim=head_dim, wq=linear(WIDTH, WIDTH), wkv=linear(WIDTH, NUM_KV_HEADS * head_dim)
            ),
            wo=linear(WIDTH, WIDTH),
            inner_attention=ScaledDotProductAttention.Config(),
            rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=SEQ_LEN, theta=ROPE_BASE),
            scale=ATTENTION_SCALE,
        ),
        ffn_norm=norm(),
        feed_forward=FeedForward.Config(
            w1=linear(WIDTH, FFN_WIDTH), w2=linear(FFN_WIDTH, WIDTH), w3=linear(WIDTH, FFN_WIDTH)
        ),
    )


def model() -> FrozenModel.Config:
    return FrozenModel.Config(
        dim=WIDTH,
        vocab_size=VOCAB_SIZE,
        tok_embeddings=MultEmbedding.Config(
            num_embeddings=VOCAB_SIZE, embedding_dim=WIDTH, multiplier=EMBEDDING_MULTIPLIER
        ),
        layers=[block() for _ in range(NUM_LAYERS)],
        norm=norm(),
        lm_head=MultLinear.Config(in_features=WIDTH, out_features=VOCAB_SIZE, multiplier=OUTPUT_MULTIPLIER),
    )


def main_run() -> Trainer.Config:
    return Trainer.Config(
        model_spec=ModelSpec(
            name="forerun", flavor=DIGEST[:16], model=model(), parallelize_fn=parallelize_llama,
            pipelining_fn=None, post_optimizer_build_fn=None, state_dict_adapter=None,
        ),
        hf_assets_path=".",
        dump_folder=f"outputs/{DIGEST[:16]}",
        tokenizer=NoTokenizer.Config(),
        dataloader=CorpusLoader.Config(dataset="forerun", dataset_path=os.environ.get("FORERUN_DATA")),
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
            local_batch_size=LOCAL_SEQUENCES,
            global_batch_size=GLOBAL_SEQUENCES,
            seq_len=SEQ_LEN,
            max_norm=float("inf") if CLIP_NORM is None else CLIP_NORM,
            steps=NUM_STEPS,
            disable_cuda_graphs=True,
            mixed_precision_param=PRECISION,
        ),
        parallelism=ParallelismConfig(
            data_parallel_replicate_degree=DATA_PARALLEL_REPLICATE,
            data_parallel_shard_degree=DATA_PARALLEL_SHARD,
            spmd_backend="partial_dtensor",
        ),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=CHECKPOINT_EVERY_STEPS, keep_latest_k=CHECKPOINT_KEEP, last_save_model_only=False
        ),
        metrics=GuardedMetrics.Config(log_freq=1),
        debug=DebugConfig(seed=SEED, deterministic=True),
    )
'''
