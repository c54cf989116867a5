"""Initial weights of a frozen launch config of forerun, as a checkpoint for Megatron-LM.

`python seed_checkpoint.py FOLDER`, in one process; no GPU is needed, but memory for the whole
model. The checkpoint is of Megatron's own `torch_dist` format, which it loads at any tensor and
pipeline degrees. The numbers come from `forerun.json`. Written against Megatron-core's public
classes; nothing of theirs is copied.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from forerun_numbers import read_numbers
from forerun_torch import initial_value, set_value
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from torch import distributed
from torch.nn import functional

FROZEN = read_numbers()
SHAPE = FROZEN.shape


def drawn(name: str) -> torch.Tensor:
    """The initial value of a parameter, by the frozen config's name."""
    weight = FROZEN.weights[name]
    return initial_value(name, weight["size"], weight["init_std"], FROZEN.seed)


def queries_keys_values(attention: str) -> torch.Tensor:
    """One matrix: for each group of heads its queries, then its keys, then its values."""
    groups = SHAPE.num_kv_heads
    parts = [
        torch.unflatten(drawn(f"{attention}.{name}.weight"), 0, (groups, -1))
        for name in ("wq", "wk", "wv")
    ]
    return torch.cat(parts, dim=1).flatten(0, 1)


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    """Megatron's name and the value of every parameter."""
    yield "embedding.word_embeddings.weight", drawn("tok_embeddings.weight")
    for i in range(SHAPE.num_layers):
        ours, theirs = f"layers.{i}", f"decoder.layers.{i}"
        yield f"{theirs}.input_layernorm.weight", drawn(f"{ours}.attention_norm.weight")
        yield f"{theirs}.self_attention.linear_qkv.weight", queries_keys_values(f"{ours}.attention")
        if SHAPE.qk_norm:
            yield (
                f"{theirs}.self_attention.q_layernorm.weight",
                drawn(f"{ours}.attention.q_norm.weight"),
            )
            yield (
                f"{theirs}.self_attention.k_layernorm.weight",
                drawn(f"{ours}.attention.k_norm.weight"),
            )
        yield f"{theirs}.self_attention.linear_proj.weight", drawn(f"{ours}.attention.wo.weight")
        yield f"{theirs}.pre_mlp_layernorm.weight", drawn(f"{ours}.ffn_norm.weight")
        gate, up = (drawn(f"{ours}.feed_forward.{name}.weight") for name in ("w1", "w3"))
        yield f"{theirs}.mlp.linear_fc1.weight", torch.cat((gate, up))
        yield f"{theirs}.mlp.linear_fc2.weight", drawn(f"{ours}.feed_forward.w2.weight")
    yield "decoder.final_layernorm.weight", drawn("norm.weight")
    if not SHAPE.tied:
        yield "output_layer.weight", drawn("lm_head.weight")


def model() -> GPTModel:
    """Megatron's model with these weights; of plain layers: Transformer Engine's read the same
    checkpoint.
    """
    config = TransformerConfig(
        num_layers=SHAPE.num_layers,
        hidden_size=SHAPE.width,
        num_attention_heads=SHAPE.num_heads,
        num_query_groups=SHAPE.num_kv_heads,
        ffn_hidden_size=SHAPE.ffn_width,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        persist_layer_norm=False,
        qk_layernorm=SHAPE.qk_norm,
        use_cpu_initialization=True,
        perform_initialization=False,
    )
    built = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            qk_layernorm=SHAPE.qk_norm, normalization="RMSNorm"
        ),
        vocab_size=SHAPE.vocab_size,
        max_sequence_length=SHAPE.seq_len,
        share_embeddings_and_output_weights=SHAPE.tied,
        position_embedding_type="rope",
    )
    parameters = dict(built.named_parameters())
    for name, value in weights():
        set_value(parameters.pop(name), value)
    if parameters:
        raise ValueError(
            f"no initial value for {', '.join(parameters)}: another version of Megatron?"
        )
    return built


def main(folder: Path) -> None:
    """Write the checkpoint."""
    if not torch.cuda.is_available():  # Megatron asks for both, though nothing is computed here
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        torch.cuda.synchronize = lambda *device: None
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    parallel_state.initialize_model_parallel()
    (folder / "release").mkdir(parents=True)
    state = {"model": model().sharded_state_dict(), "checkpoint_version": 3.0, "iteration": 0}
    dist_checkpointing.save(state, str(folder / "release"))
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
