"""A small Llama over bytes, its parameter groups in muP (arXiv 2203.03466), its data and its
schedule.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def options():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    whole = (
        "width base-width head-dim num-layers seq-len batch-sequences num-steps warmup-steps seed"
    )
    for name in (*whole.split(), "lr", "clip-norm"):
        parser.add_argument(
            f"--{name}", type=int if name in whole.split() else float, required=True
        )
    parser.add_argument("--parametrization", default="mup")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def model_of(a):
    """Matrices start by their fan-in, the readout at zero."""
    torch.manual_seed(a.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=a.width,
            intermediate_size=2 * a.width,
            num_hidden_layers=a.num_layers,
            num_attention_heads=a.width // a.head_dim,
            max_position_embeddings=a.seq_len,
            use_cache=False,
        )
    )
    for matrix in hidden_of(model):
        nn.init.normal_(matrix, std=matrix.shape[1] ** -0.5)
    nn.init.normal_(model.model.embed_tokens.weight)
    nn.init.zeros_(model.lm_head.weight)
    return model


def hidden_of(model):
    """The matrices of the blocks."""
    return [p for p in model.model.layers.parameters() if p.ndim == 2]


def optimizer_of(model, a):
    """In muP the rate of whatever reads from the width falls with it. No weight decay."""
    scale = 1.0 if a.parametrization == "sp" else a.base_width / a.width
    falling = [*hidden_of(model), model.lm_head.weight]
    rest = [p for p in model.parameters() if all(p is not other for other in falling)]
    groups = [{"params": falling, "lr": a.lr * scale}, {"params": rest, "lr": a.lr}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)

    def share(t):
        done = (t - a.warmup_steps) / max(1, a.num_steps - a.warmup_steps)
        return (
            (t + 1) / a.warmup_steps if t < a.warmup_steps else 0.5 + 0.5 * math.cos(math.pi * done)
        )

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def data_of(a):
    """Training rows in the order of the seed, enough for every step, and held-out rows."""
    text = b"".join(
        file.read_bytes() for file in sorted(Path(json.__file__).parents[1].glob("*.py"))
    )
    rows = torch.tensor([byte & 127 for byte in text])[: len(text) // a.seq_len * a.seq_len].view(
        -1, a.seq_len
    )
    train, held = rows.tensor_split([int(0.9 * len(rows))])
    draw = torch.Generator().manual_seed(a.seed)
    order = torch.randint(len(train), (a.num_steps * a.batch_sequences,), generator=draw)
    return Rows(train[order]), Rows(held[:128])


class Rows(torch.utils.data.Dataset):
    """As a causal model of transformers wants them: it shifts the labels itself."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}
