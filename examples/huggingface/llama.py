"""A small Llama over bytes in muP (arXiv 2203.03466): model, optimizer, schedule, data and options.

with_trainer.py and with_accelerate.py import this module. It trains on Python's own sources.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 128
"""Number of tokens: bytes of ASCII. Any other byte is taken modulo this number."""
NUM_VALIDATION_ROWS = 128


def parse_options():
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    integers = (
        "width base-width head-dim num-layers seq-len batch-sequences num-steps warmup-steps seed"
    )
    for name in (*integers.split(), "lr", "clip-norm"):
        parser.add_argument(
            f"--{name}", type=int if name in integers.split() else float, required=True
        )
    parser.add_argument("--parametrization", choices=("mup", "sp"), default="mup")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def make_model(options):
    """Return the model, with matrices scaled by their fan-in and a readout of zeros."""
    torch.manual_seed(options.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=options.width,
            intermediate_size=2 * options.width,
            num_hidden_layers=options.num_layers,
            num_attention_heads=options.width // options.head_dim,
            max_position_embeddings=options.seq_len,
            use_cache=False,
        )
    )
    for matrix in list_hidden_matrices(model):
        nn.init.normal_(matrix, std=matrix.shape[1] ** -0.5)
    nn.init.normal_(model.model.embed_tokens.weight)
    nn.init.zeros_(model.lm_head.weight)
    return model


def list_hidden_matrices(model):
    """Return the matrices of the blocks."""
    return [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]


def make_optimizer(model, options):
    """Return the optimizer and the learning rate schedule.

    In muP the rate of each matrix that reads from the width is divided by the width ratio. There is
    no weight decay.
    """
    rate_factor = 1.0 if options.parametrization == "sp" else options.base_width / options.width
    scaled = [*list_hidden_matrices(model), model.lm_head.weight]
    # By identity: `in` would compare tensors element by element
    scaled_ids = set(map(id, scaled))
    unscaled = [parameter for parameter in model.parameters() if id(parameter) not in scaled_ids]
    groups = [
        {"params": scaled, "lr": options.lr * rate_factor},
        {"params": unscaled, "lr": options.lr},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)

    def compute_rate_factor(step):
        """Return the factor of the peak rate at a step: linear warmup, then a cosine to zero."""
        progress = (step - options.warmup_steps) / max(1, options.num_steps - options.warmup_steps)
        return (
            (step + 1) / options.warmup_steps
            if step < options.warmup_steps
            else 0.5 + 0.5 * math.cos(math.pi * progress)
        )

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, compute_rate_factor)


def make_data(options):
    """Return training rows in the order of the seed, enough for every step, and validation rows."""
    text = b"".join(
        file.read_bytes() for file in sorted(Path(json.__file__).parents[1].glob("*.py"))
    )
    num_rows = len(text) // options.seq_len
    tokens = torch.tensor([byte % VOCAB_SIZE for byte in text])
    rows = tokens[: num_rows * options.seq_len].view(num_rows, options.seq_len)
    train, validation = rows.tensor_split([int(0.9 * len(rows))])
    generator = torch.Generator().manual_seed(options.seed)
    order = torch.randint(
        len(train), (options.num_steps * options.batch_sequences,), generator=generator
    )
    return Rows(train[order]), Rows(validation[:NUM_VALIDATION_ROWS])


class Rows(torch.utils.data.Dataset):
    """Rows of tokens in the form that transformers expects. The labels equal the inputs, since the
    model shifts them itself.
    """

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}
