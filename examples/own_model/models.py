"""A Hugging Face model as a proxy: `factory = "models:llama"`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from forerun._proxies.core.numbers import ForwardNumbers
from forerun._proxies.core.shape import Shape


def llama(shape: Shape, forward: ForwardNumbers) -> LlamaForCausalLM:
    """Return Hugging Face's Llama.

    It uses `forward`, so the size of a head may grow, and CompleteP may scale the depth.
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
    # The default std, 0.02 for all matrices, is for widths in the thousands. At small widths the
    # branches would start near zero.
    if not shape.tied:
        nn.init.normal_(model.model.embed_tokens.weight)

    def scale_output(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output * forward.residual

    for block in model.model.layers:
        block.self_attn.scaling = forward.attention
        block.self_attn.o_proj.register_forward_hook(scale_output)
        block.mlp.down_proj.register_forward_hook(scale_output)
    return model
