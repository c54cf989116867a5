"""A frozen launch config of forerun as a module of torchtitan.

torchtitan reads it by `--module forerun_torchtitan --config main_run`. The numbers come from
`forerun.json`. Blocks, AdamW groups, scheduler, clipping, checkpoints, and parallelism are
torchtitan's own. Small subclasses add what torchtitan lacks: forward multipliers, initial values by
(seed, name), the frozen data order, and the abort policy. The code uses the public classes of
torchtitan and copies nothing from it.
"""

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import forerun_versions  # noqa: F401  (It must be first: it refuses other versions.)
import torch
from forerun_numbers import open_corpus, read_numbers
from forerun_torch import (
    gradient_norm,
    import_muon,
    initial_value,
    optimizer_arguments,
    read_rows,
    set_value,
    uses_muon,
)
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    ParamGroupConfig,
)
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common import (
    CosSinRoPE,
    Embedding,
    FeedForward,
    GQAttention,
    Linear,
    QKVLinear,
    RMSNorm,
    ScaledDotProductAttention,
)
from torchtitan.models.llama3 import Llama3Model, parallelize_llama
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

FROZEN = read_numbers()
SHAPE, SCHEDULE, MESH = FROZEN.shape, FROZEN.schedule, FROZEN.parallelism
VALIDATION_SEQUENCES = 64
"""Maximum number of different windows of the validation split that a validation reads."""
MUON = "forerun's Muon"
OPTIMIZER = MUON if uses_muon(FROZEN.groups) else "AdamW"


class MultEmbedding(Embedding):
    """A token embedding whose output is multiplied."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        """Configuration with the multiplier."""

        multiplier: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.multiplier = config.multiplier

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the embedding, multiplied."""
        return super().forward(input) * self.multiplier


class MultLinear(Linear):
    """A linear map whose input is multiplied."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """Configuration with the multiplier."""

        multiplier: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.multiplier = config.multiplier

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map the multiplied input."""
        return super().forward(input * self.multiplier)


class ScaledAttention(GQAttention):
    """Attention with a scale of q . k."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        """Configuration with the scale."""

        scale: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.scaling = config.scale


class ScaledBlock(Llama3TransformerBlock):
    """A Llama 3 block whose branches are multiplied before they join the residual stream."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3TransformerBlock.Config):
        """Configuration with the multiplier."""

        multiplier: float

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.multiplier = config.multiplier

    def forward(
        self, x: torch.Tensor, attention_masks: object, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Add both branches to the residual stream."""
        x = x + self.attention(self.attention_norm(x), attention_masks, positions) * self.multiplier
        return x + self.feed_forward(self.ffn_norm(x)) * self.multiplier


class FrozenModel(Llama3Model):
    """A Llama 3 model that starts from the frozen initial values, at any number of ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        """Configuration with the fields of the base class."""

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Set the buffers and the frozen initial values."""
        super().init_states(buffer_device=buffer_device)
        for fqn, parameter in self.named_parameters():
            set_value(parameter, draw_value(canonical_fqn(fqn), parameter.shape))


def draw_value(fqn: str, size: torch.Size) -> torch.Tensor:
    """Draw the initial value of the parameter that has this name in torchtitan."""
    init_std = next(
        group["init_std"] for group in FROZEN.groups if re.search(group["pattern"], fqn)
    )
    return initial_value(fqn.replace(".qkv_linear.", "."), size, init_std, FROZEN.seed)


def linear(in_features: int, out_features: int) -> Linear.Config:
    """Configure a matrix."""
    return Linear.Config(in_features=in_features, out_features=out_features)


def norm(width: int = SHAPE.width) -> RMSNorm.Config:
    """Configure a norm with the frozen eps."""
    return RMSNorm.Config(normalized_shape=width, eps=FROZEN.norm_eps)


def block() -> ScaledBlock.Config:
    """Configure a layer."""
    width, head_dim = SHAPE.width, SHAPE.width // SHAPE.num_heads
    return ScaledBlock.Config(
        multiplier=FROZEN.forward.residual,
        attention_norm=norm(),
        attention=ScaledAttention.Config(
            n_heads=SHAPE.num_heads,
            n_kv_heads=SHAPE.num_kv_heads,
            dim=width,
            qkv_linear=QKVLinear.Config(
                head_dim=head_dim,
                wq=linear(width, width),
                wkv=linear(width, SHAPE.num_kv_heads * head_dim),
            ),
            wo=linear(width, width),
            qk_norm=norm(head_dim) if SHAPE.qk_norm else None,
            inner_attention=ScaledDotProductAttention.Config(),
            rope=CosSinRoPE.Config(dim=head_dim, theta=FROZEN.rope_base, max_seq_len=SHAPE.seq_len),
            scale=FROZEN.forward.attention,
        ),
        ffn_norm=norm(),
        feed_forward=FeedForward.Config(
            w1=linear(width, SHAPE.ffn_width),
            w2=linear(SHAPE.ffn_width, width),
            w3=linear(width, SHAPE.ffn_width),
        ),
    )


def model() -> FrozenModel.Config:
    """Configure the model with the frozen shape."""
    return FrozenModel.Config(
        dim=SHAPE.width,
        vocab_size=SHAPE.vocab_size,
        enable_weight_tying=SHAPE.tied,
        tok_embeddings=MultEmbedding.Config(
            num_embeddings=SHAPE.vocab_size,
            embedding_dim=SHAPE.width,
            multiplier=FROZEN.forward.embedding,
        ),
        layers=[block() for _ in range(SHAPE.num_layers)],
        norm=norm(),
        lm_head=MultLinear.Config(
            in_features=SHAPE.width, out_features=SHAPE.vocab_size, multiplier=FROZEN.forward.output
        ),
    )


class CorpusLoader(BaseDataLoader):
    """A loader that divides each batch of the frozen data order among the ranks.

    A run can resume on another number of ranks.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Configuration with the corpus folder."""

        corpus: str | None

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        local_batch_size: int,
        **unused: Any,
    ) -> None:
        self.store = open_corpus(FROZEN, config.corpus)
        self.num_ranks, self.rank = dp_world_size, dp_rank
        self.num_sequences = local_batch_size
        self.num_batches = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield this rank's rows of each batch."""
        while True:
            part = self.num_batches * self.num_ranks + self.rank
            first, size = part * self.num_sequences, self.num_sequences
            ids = read_rows(FROZEN, self.store, first, size)
            self.num_batches += 1
            yield {"input": ids[:, :-1].contiguous()}, ids[:, 1:]

    def state_dict(self) -> dict[str, int]:
        """Return the position in the data, which fits any number of ranks."""
        return {"num_sequences_read": self.num_batches * self.num_ranks * self.num_sequences}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue from a position in the data.

        Raises:
            ValueError: The sequences that the ranks now read per step do not divide the position.
        """
        num_read, per_batch = state_dict["num_sequences_read"], self.num_ranks * self.num_sequences
        if num_read % per_batch:
            raise ValueError(
                f"{num_read} sequences were read: must be a multiple of {per_batch}, which the "
                "ranks now read per step"
            )
        self.num_batches = num_read // per_batch


class ValidationLoader(BaseDataLoader):
    """A loader that divides the validation windows among the ranks.

    Every validation begins with the first window.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Configuration with the corpus folder."""

        corpus: str | None
        infinite: bool = True

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        local_batch_size: int,
        **unused: Any,
    ) -> None:
        store = open_corpus(FROZEN, config.corpus)
        count = min(VALIDATION_SEQUENCES, store.count_windows("validation", SHAPE.seq_len))
        self.windows = torch.from_numpy(
            store.read_validation_batch(num_sequences=count, seq_len=SHAPE.seq_len)
        )
        self.num_ranks, self.rank, self.num_sequences = dp_world_size, dp_rank, local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield this rank's rows of each batch."""
        first = self.rank * self.num_sequences
        while True:
            rows = torch.arange(first, first + self.num_sequences) % len(self.windows)
            ids = self.windows[rows]
            first += self.num_ranks * self.num_sequences
            yield {"input": ids[:, :-1].contiguous()}, ids[:, 1:]

    def state_dict(self) -> dict[str, int]:
        """Return an empty state: every validation starts with the first window."""
        return {}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Ignore the state."""


class NoTokenizer(BaseTokenizer):
    """A placeholder for the tokenizer: the corpus is already tokenized."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """Configuration with the fields of the base class."""

    def __init__(self, config: Config, **unused: object) -> None:
        super().__init__()

    def encode(self, *args: object, **kwargs: object) -> list[int]:
        """Refuse: the corpus is already tokenized."""
        raise NotImplementedError("the corpus is already tokenized")

    def decode(self, *args: object, **kwargs: object) -> str:
        """Refuse: the corpus is already tokenized."""
        raise NotImplementedError("the corpus is already tokenized")

    def get_vocab_size(self) -> int:
        """Return the vocabulary size of the corpus."""
        return int(SHAPE.vocab_size)


class GuardedOptimizers(OptimizersContainer):
    """Optimizers that stop before a step if the gradient is not finite, so that neither weights nor
    checkpoints are damaged.
    """

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        """Return torchtitan's own optimizers, or the Muon that this export carries."""
        if name == MUON:
            return import_muon()
        return OptimizersContainer._resolve_optimizer_factory(name)

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Configuration with the fields of the base class."""

    def step(self, closure: None = None) -> None:
        """Apply the update, unless the gradient is not finite."""
        if not math.isfinite(
            gradient_norm(p for part in self.model_parts for p in part.parameters())
        ):
            raise RuntimeError("the gradient is not finite: stopped before the step")
        super().step(closure)


class GuardedMetrics(MetricsProcessor):
    """Metrics that stop the run before the next save if, after the warmup, the loss is above the
    frozen limit.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        """Configuration with the fields of the base class."""

    def log(self, step: int, global_avg_loss: float, *args: object, **kwargs: object) -> None:
        """Log a step, and compare its loss with the limit."""
        super().log(step, global_avg_loss, *args, **kwargs)
        limit = FROZEN.train_loss_above_nats
        if step > SCHEDULE.warmup_steps + 1 and global_avg_loss > limit:
            raise RuntimeError(
                f"training loss {global_avg_loss} > {limit} nats at step {step}: stopped"
            )


def training() -> TrainingConfig:
    """Configure steps, batch, clipping, and precision."""
    return TrainingConfig(
        max_norm=math.inf if FROZEN.clip_norm is None else FROZEN.clip_norm,
        steps=SCHEDULE.num_steps,
        disable_cuda_graphs=os.environ.get("FORERUN_CUDA_GRAPHS") == "0"
        or not torch.cuda.is_available(),
        mixed_precision_param=FROZEN.precision,
        local_batch_size=FROZEN.rank_microbatch_sequences,
        global_batch_size=FROZEN.batch_sequences,
        seq_len=SHAPE.seq_len,
    )


def parallelism() -> ParallelismConfig:
    """Configure the frozen degrees of parallelism."""
    return ParallelismConfig(
        data_parallel_replicate_degree=MESH.data_parallel_replicate,
        data_parallel_shard_degree=MESH.data_parallel_shard,
        tensor_parallel_degree=MESH.tensor,
        spmd_backend="partial_dtensor",
    )


class LastStepValidator(Validator):
    """A validator that also validates at the last step, whose loss was forecast."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        """Configuration with the fields of the base class."""

    def should_validate(self, step: int) -> bool:
        """Return whether to validate at a step: the base class chooses, or the step is the last."""
        return bool(super().should_validate(step)) or step == SCHEDULE.num_steps


def validator() -> LastStepValidator.Config:
    """Configure validation: before every checkpoint, after the first step, and after the last."""
    per_step = (
        FROZEN.rank_microbatch_sequences * MESH.data_parallel_replicate * MESH.data_parallel_shard
    )
    return LastStepValidator.Config(
        enable=True,
        freq=FROZEN.checkpointing.every_steps,
        steps=max(1, math.ceil(VALIDATION_SEQUENCES / per_step)),
        dataloader=ValidationLoader.Config(corpus=os.environ.get("FORERUN_DATA")),
    )


def log_every_steps() -> int:
    """Return the steps between log lines.

    Logging makes a GPU wait, but the abort policy needs a line before every checkpoint.
    """
    interval = os.environ.get("FORERUN_LOG_EVERY_STEPS")
    return int(interval) if interval else math.gcd(10, FROZEN.checkpointing.every_steps)


def main_run() -> Trainer.Config:
    """Configure the frozen run."""
    return Trainer.Config(
        model_spec=ModelSpec(
            name="forerun",
            flavor=FROZEN.digest[:16],
            model=model(),
            parallelize_fn=parallelize_llama,
            pipelining_fn=None,
            post_optimizer_build_fn=None,
            state_dict_adapter=None,
        ),
        hf_assets_path=".",
        dump_folder=f"outputs/{FROZEN.digest[:16]}",
        tokenizer=NoTokenizer.Config(),
        dataloader=CorpusLoader.Config(corpus=os.environ.get("FORERUN_DATA")),
        loss=CrossEntropyLoss.Config(global_vocab_size=SHAPE.vocab_size),
        optimizer=GuardedOptimizers.Config(
            param_groups=[
                ParamGroupConfig(
                    pattern=group["pattern"],
                    optimizer_name=OPTIMIZER,
                    optimizer_kwargs=optimizer_arguments(group),
                )
                for group in FROZEN.groups
            ],
            implementation="foreach",
        ),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=SCHEDULE.warmup_steps,
            total_steps=SCHEDULE.num_steps,
            decay_ratio=FROZEN.decay_ratio,
            decay_type=FROZEN.decay_type,
            min_lr_factor=SCHEDULE.final_fraction,
        ),
        training=training(),
        parallelism=parallelism(),
        activation_checkpoint={
            "none": None,
            "selective": SelectiveAC.Config(),
            "full": FullAC.Config(),
        }[MESH.activation_checkpointing],
        checkpoint=CheckpointManager.Config(
            enable=True,
            interval=FROZEN.checkpointing.every_steps,
            keep_latest_k=FROZEN.checkpointing.keep,
            last_save_model_only=False,
            async_mode="async",
        ),
        validator=validator(),
        compile=CompileConfig(enable=FROZEN.compiled),
        # `forerun watch --metrics` reads the event files in `tb/` below the dump folder.
        metrics=GuardedMetrics.Config(log_freq=log_every_steps(), enable_tensorboard=True),
        # Deterministic kernels repeat a run to the bit, but are slower.
        debug=DebugConfig(
            seed=FROZEN.seed, deterministic=os.environ.get("FORERUN_DETERMINISTIC") == "1"
        ),
    )
