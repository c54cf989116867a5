"""A byte model with a mixture of experts: Muon for matrices, AdamW for the rest. Some lines of it
are forerun's.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from forerun.hook import prove  # forerun: the proof

NUM_EXPERTS = 4


class Experts(nn.Module):
    """Each token goes through the expert that the router prefers, weighted by its probability."""

    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, NUM_EXPERTS, bias=False)
        self.up = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(NUM_EXPERTS))
        self.down = nn.ModuleList(
            nn.Linear(2 * width, width, bias=False) for _ in range(NUM_EXPERTS)
        )

    def forward(self, x):
        share, chosen = self.router(x).softmax(-1).max(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            out = out + (chosen == number) * share * down(functional.gelu(up(x)))
        return out


class Block(nn.Module):
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
    def __init__(self, a):
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, a.width), nn.Embedding(a.seq_len, a.width)
        self.blocks = nn.ModuleList(Block(a.width, a.head_dim) for _ in range(a.num_layers))
        self.norm, self.readout = nn.RMSNorm(a.width), nn.Linear(a.width, 128, bias=False)
        self.scale = a.base_width / a.width
        for block in self.blocks:
            for matrix in (p for p in block.parameters() if p.ndim == 2):
                nn.init.normal_(matrix, std=matrix.shape[1] ** -0.5)
        nn.init.zeros_(self.readout.weight)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.readout(self.norm(x)) * self.scale


def optimizers_of(model, a):
    """Muon's update has one size at every width, so its rate stays; AdamW's falls with it for the
    routers.
    """
    inside = dict(model.blocks.named_parameters())
    routers = [p for name, p in inside.items() if "router" in name]
    matrices = [p for name, p in inside.items() if p.ndim == 2 and "router" not in name]
    rest = [p for p in model.parameters() if all(p is not other for other in (*routers, *matrices))]
    groups = [{"params": rest, "lr": a.lr}, {"params": routers, "lr": a.lr * model.scale}]
    muon = torch.optim.Muon(matrices, lr=a.muon_lr, weight_decay=0.0, momentum=0.95)
    return [torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0), muon]


def describe(model):
    """What forerun counts by: a token goes through one expert of each block, so the others cost it
    nothing.
    """
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".up." in name or ".down." in name)
    active = sum(sizes.values()) - experts * (NUM_EXPERTS - 1) // NUM_EXPERTS
    print(json.dumps({"params": sum(sizes.values()), "flops_per_token": 6 * active}))


def main(a):
    torch.manual_seed(a.seed)
    text = b"".join(
        file.read_bytes() for file in sorted(Path(json.__file__).parents[1].glob("*.py"))
    )
    data = torch.tensor([byte & 127 for byte in text])
    train, held = data.tensor_split([int(0.9 * len(data))])
    held = held[: 64 * a.seq_len]
    model = Model(a)

    def loss_of(source, starts):
        ids = torch.stack([source[i : i + a.seq_len + 1] for i in starts])
        return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def share(t):
        done = (t - a.warmup_steps) / max(1, a.num_steps - a.warmup_steps)
        return (
            (t + 1) / a.warmup_steps if t < a.warmup_steps else 0.5 + 0.5 * math.cos(math.pi * done)
        )

    optimizers = optimizers_of(model, a)
    schedules = [torch.optim.lr_scheduler.LambdaLR(one, share) for one in optimizers]
    # forerun: it returns at once unless `forerun verify --prove` asks
    prove(model, optimizers, schedules)
    with Path(a.out).open("w") as log:
        for step in range(1, a.num_steps + 1):
            loss = loss_of(
                train, torch.randint(len(train) - a.seq_len, (a.batch_sequences,)).tolist()
            )
            model.zero_grad()
            loss.backward()
            for one in (*optimizers, *schedules):
                one.step()
            print(json.dumps({"step": step, "train_loss": loss.item()}), file=log, flush=True)
        with torch.no_grad():
            loss = loss_of(held, range(0, len(held) - a.seq_len, a.seq_len))
        print(json.dumps({"step": step, "val_loss": loss.item()}), file=log)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    whole = (
        "width base-width head-dim num-layers seq-len batch-sequences num-steps warmup-steps seed"
    )
    for name in (*whole.split(), "lr", "muon-lr"):
        parser.add_argument(
            f"--{name}", type=int if name in whole.split() else float, required=True
        )
    parser.add_argument("--out", required=True)
    parser.add_argument("--describe", action="store_true")  # forerun: how large it is
    given = parser.parse_args()
    describe(Model(given)) if given.describe else main(given)
