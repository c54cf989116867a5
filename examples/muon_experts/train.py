"""Train a byte model with a mixture of experts: Muon for matrices, AdamW for everything else.

Comments mark the lines for forerun.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from forerun.hook import prove  # forerun: compares this run with the frozen config

VOCAB_SIZE = 128
"""Number of tokens: bytes of ASCII. Any other byte is taken modulo this number."""
NUM_EXPERTS = 4


class Experts(nn.Module):
    """A feed-forward layer of several experts.

    The output of a token is that of the expert that the router prefers, weighted by the router's
    probability. For simplicity every expert computes every token, and the outputs of the experts
    that were not chosen are multiplied by 0.
    """

    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, NUM_EXPERTS, bias=False)
        self.up = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(NUM_EXPERTS))
        self.down = nn.ModuleList(
            nn.Linear(2 * width, width, bias=False) for _ in range(NUM_EXPERTS)
        )

    def forward(self, x):
        """Map [B, T, width] to the same shape."""
        probability, chosen = self.router(x).softmax(-1).max(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            out = out + (chosen == expert) * probability * down(functional.gelu(up(x)))
        return out


class Block(nn.Module):
    """Attention and experts, each added to the residual stream."""

    def __init__(self, width, head_dim):
        super().__init__()
        self.num_heads = width // head_dim
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.mix = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.experts = Experts(width)

    def forward(self, x):
        """Map [B, T, width] to the same shape."""
        q, k, v = (
            self.qkv(self.norm1(x))
            .unflatten(-1, (3 * self.num_heads, -1))
            .transpose(1, 2)
            .chunk(3, dim=1)
        )
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(heads.transpose(1, 2).flatten(-2))
        return x + self.experts(self.norm2(x))


class Model(nn.Module):
    """A decoder with learned positions, in muP."""

    def __init__(self, options):
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(VOCAB_SIZE, options.width),
            nn.Embedding(options.seq_len, options.width),
        )
        self.blocks = nn.ModuleList(
            Block(options.width, options.head_dim) for _ in range(options.num_layers)
        )
        self.norm, self.readout = (
            nn.RMSNorm(options.width),
            nn.Linear(options.width, VOCAB_SIZE, bias=False),
        )
        self.logit_factor = compute_width_factor(options)
        for block in self.blocks:
            for matrix in (p for p in block.parameters() if p.ndim == 2):
                nn.init.normal_(matrix, std=matrix.shape[1] ** -0.5)
        nn.init.zeros_(self.readout.weight)

    def forward(self, ids):
        """Map ids [B, T] to logits [B, T, VOCAB_SIZE]: B sequences of T tokens."""
        x = self.tokens(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.readout(self.norm(x)) * self.logit_factor


def compute_width_factor(options):
    """Return base width / width, by which muP multiplies the logits and AdamW's rate for matrices
    that read from the width.
    """
    return options.base_width / options.width


def make_optimizers(model, options):
    """Return AdamW and Muon.

    Muon's update has the same size at every width, so its rate does not change. AdamW's rate for
    the routers is multiplied by `compute_width_factor`.
    """
    block_parameters = dict(model.blocks.named_parameters())
    routers = [p for name, p in block_parameters.items() if "router" in name]
    matrices = [p for name, p in block_parameters.items() if p.ndim == 2 and "router" not in name]
    # By identity: `in` would compare tensors element by element
    other_ids = set(map(id, (*routers, *matrices)))
    unscaled = [p for p in model.parameters() if id(p) not in other_ids]
    groups = [
        {"params": unscaled, "lr": options.lr},
        {"params": routers, "lr": options.lr * compute_width_factor(options)},
    ]
    muon = torch.optim.Muon(matrices, lr=options.muon_lr, weight_decay=0.0, momentum=0.95)
    return [torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0), muon]


def print_size(model):
    """Print the number of parameters, and the FLOPs per token that forerun counts by.

    Only one expert of each block counts: a trainer for large models would compute no other. Each
    parameter that counts takes 6 FLOPs per token: 2 forward, 4 backward.
    """
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    num_params = sum(sizes.values())
    num_expert_params = sum(
        size for name, size in sizes.items() if ".up." in name or ".down." in name
    )
    num_active_params = num_params - num_expert_params * (NUM_EXPERTS - 1) // NUM_EXPERTS
    print(json.dumps({"params": num_params, "flops_per_token": 6 * num_active_params}))


def main(options):
    """Train and log each step as JSON."""
    torch.manual_seed(options.seed)
    text = b"".join(
        file.read_bytes() for file in sorted(Path(json.__file__).parents[1].glob("*.py"))
    )
    data = torch.tensor([byte % VOCAB_SIZE for byte in text])
    train, validation = data.tensor_split([int(0.9 * len(data))])
    validation = validation[: 64 * options.seq_len]  # 64 rows keep the evaluation short
    model = Model(options)

    def compute_loss(source, starts):
        ids = torch.stack([source[i : i + options.seq_len + 1] for i in starts])
        return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def compute_rate_factor(step_index):
        """Return the factor of the peak rate at a step: linear warmup, then a cosine to zero."""
        progress = (step_index - options.warmup_steps) / max(
            1, options.num_steps - options.warmup_steps
        )
        return (
            (step_index + 1) / options.warmup_steps
            if step_index < options.warmup_steps
            else 0.5 + 0.5 * math.cos(math.pi * progress)
        )

    optimizers = make_optimizers(model, options)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(stepper, compute_rate_factor) for stepper in optimizers
    ]
    # forerun: returns at once unless `forerun verify --prove` runs this script
    prove(model, optimizers, schedules)
    with Path(options.out).open("w") as log:
        for step in range(1, options.num_steps + 1):
            loss = compute_loss(
                train,
                torch.randint(len(train) - options.seq_len, (options.batch_sequences,)).tolist(),
            )
            model.zero_grad()
            loss.backward()
            for stepper in (*optimizers, *schedules):
                stepper.step()
            print(json.dumps({"step": step, "train_loss": loss.item()}), file=log, flush=True)
        with torch.no_grad():
            loss = compute_loss(
                validation, range(0, len(validation) - options.seq_len, options.seq_len)
            )
        print(json.dumps({"step": options.num_steps, "val_loss": loss.item()}), file=log)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    integers = (
        "width base-width head-dim num-layers seq-len batch-sequences num-steps warmup-steps seed"
    )
    for name in (*integers.split(), "lr", "muon-lr"):
        parser.add_argument(
            f"--{name}", type=int if name in integers.split() else float, required=True
        )
    parser.add_argument("--out", required=True)
    parser.add_argument("--describe", action="store_true")  # forerun: size of the model
    options = parser.parse_args()
    print_size(Model(options)) if options.describe else main(options)
