"""A Hugging Face model as a proxy: `factory = "models:llama"`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from proxies.core.numbers import ForwardNumbers
from proxies.core.shape import Shape


def llama(shape: Shape, forward: ForwardNumbers) -> LlamaForCausalLM:
    """Hugging Face's Llama. It takes `forward`, so heads may grow in size, and CompleteP may scale
    the depth.
    """
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape.width,
            intermediate_size=shape.ffn_width,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            vocab_size=shape.vocab_size,
            max_position_embeddings=shape.seq_len,
            tie_word_embeddings=shape.tied,
            initializer_range=shape.width**-0.5,
            use_cache=False,
        )
    )
    # Its default, 0.02 everywhere, is meant for widths in the thousands: here, branches would start
    # next to nothing.
    if not shape.tied:
        nn.init.normal_(model.model.embed_tokens.weight)

    def scaled(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * forward.residual

    for block in model.model.layers:
        block.self_attn.scaling = forward.attention
        block.self_attn.o_proj.register_forward_hook(scaled)
        block.mlp.down_proj.register_forward_hook(scaled)
    return model
