"""Write the initial weights of a frozen launch config of forerun as a checkpoint for Megatron-LM.

Run `python seed_checkpoint.py FOLDER` in one process, without a GPU, but with memory for the whole
model. The checkpoint has Megatron's own `torch_dist` format. Megatron loads it at any tensor and
pipeline degrees. The numbers come from `forerun.json`. The code uses the public classes of
Megatron-core and copies nothing from it.
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


def draw_value(name: str) -> torch.Tensor:
    """Draw the initial value of the parameter that has this name in the frozen config."""
    weight = FROZEN.weights[name]
    return initial_value(name, weight["size"], weight["init_std"], FROZEN.seed)


def fuse_attention(attention: str) -> torch.Tensor:
    """Fuse the matrices of an attention: queries, keys, and values of each group of heads."""
    groups = SHAPE.num_kv_heads
    parts = [
        torch.unflatten(draw_value(f"{attention}.{name}.weight"), 0, (groups, -1))
        for name in ("wq", "wk", "wv")
    ]
    return torch.cat(parts, dim=1).flatten(0, 1)


def generate_weights() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield Megatron's name and the value of every parameter."""
    yield "embedding.word_embeddings.weight", draw_value("tok_embeddings.weight")
    for i in range(SHAPE.num_layers):
        frozen, layer = f"layers.{i}", f"decoder.layers.{i}"
        yield f"{layer}.input_layernorm.weight", draw_value(f"{frozen}.attention_norm.weight")
        yield f"{layer}.self_attention.linear_qkv.weight", fuse_attention(f"{frozen}.attention")
        if SHAPE.qk_norm:
            yield (
                f"{layer}.self_attention.q_layernorm.weight",
                draw_value(f"{frozen}.attention.q_norm.weight"),
            )
            yield (
                f"{layer}.self_attention.k_layernorm.weight",
                draw_value(f"{frozen}.attention.k_norm.weight"),
            )
        yield (
            f"{layer}.self_attention.linear_proj.weight",
            draw_value(f"{frozen}.attention.wo.weight"),
        )
        yield f"{layer}.pre_mlp_layernorm.weight", draw_value(f"{frozen}.ffn_norm.weight")
        gate, up = (draw_value(f"{frozen}.feed_forward.{name}.weight") for name in ("w1", "w3"))
        yield f"{layer}.mlp.linear_fc1.weight", torch.cat((gate, up))
        yield f"{layer}.mlp.linear_fc2.weight", draw_value(f"{frozen}.feed_forward.w2.weight")
    yield "decoder.final_layernorm.weight", draw_value("norm.weight")
    if not SHAPE.tied:
        yield "output_layer.weight", draw_value("lm_head.weight")


def build_model() -> GPTModel:
    """Build Megatron's model with these weights and with plain layers.

    The layers of Transformer Engine read the same checkpoint.
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
    for name, value in generate_weights():
        set_value(parameters.pop(name), value)
    if parameters:
        raise ValueError(
            f"no initial value for {', '.join(parameters)}: another version of Megatron?"
        )
    return built


def main(folder: Path) -> None:
    """Write the checkpoint."""
    # Megatron calls these two functions although nothing is computed on a device.
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        torch.cuda.synchronize = lambda *device: None
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    parallel_state.initialize_model_parallel()
    (folder / "release").mkdir(parents=True)
    state = {"model": build_model().sharded_state_dict(), "checkpoint_version": 3.0, "iteration": 0}
    dist_checkpointing.save(state, str(folder / "release"))
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
