"""A training script with five lines of forerun's, and one planted mistake of the user's choice."""

import argparse
import math

import torch
from torch import nn

from forerun.hook import prove


class Model(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.tokens = nn.Embedding(256, a.width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(a.width), nn.Linear(a.width, a.width)) for _ in range(2)
        )
        self.readout = nn.Linear(a.width, 256, bias=False)
        self.scale = a.base_width / a.width
        for block in self.blocks:
            nn.init.normal_(block[1].weight, std=0.02 if a.mistake == "init" else a.width**-0.5)
            nn.init.zeros_(block[1].bias)
        nn.init.normal_(self.readout.weight, std=a.base_width**-0.5)  # its 1 / m is the multiplier
        nn.init.normal_(self.tokens.weight)
        if a.mistake == "tied":
            self.readout.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.readout(x) * self.scale


def groups_of(model, a, lr):
    """muP's: matrices inside at lr / m, their decay times m; gains and biases do not decay."""
    hidden = [block[1].weight for block in model.blocks]
    plain = [p for p in model.parameters() if p.ndim < 2]
    tables = [model.tokens.weight]
    once = {"scaled twice": model.scale**2, "left unscaled": 1.0}.get(a.mistake, model.scale)
    groups = [
        {
            "params": hidden[1:] if a.mistake == "group missed" else hidden,
            "lr": lr * once,
            "weight_decay": a.wd / model.scale,
        },
        {"params": plain, "lr": lr, "weight_decay": a.wd if a.mistake == "decay on gains" else 0.0},
        {"params": tables, "lr": lr, "weight_decay": 0.0},
    ]
    if a.mistake != "tied":
        groups.append({"params": [model.readout.weight], "lr": lr, "weight_decay": a.wd})
    return groups


def main(argv=None):
    parser = argparse.ArgumentParser()
    for name in (
        "width",
        "base-width",
        "num-steps",
        "warmup",
        "seed",
        "batch-sequences",
        "seq-len",
    ):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("lr", "wd", "eps", "clip"):
        parser.add_argument(f"--{name}", type=float, required=True)
    parser.add_argument("--mistake", default="")
    parser.add_argument("--out", required=True)
    a = parser.parse_args(argv)
    torch.manual_seed(a.seed)
    model = Model(a)
    lr = {"lr ignored": 1e-3, "lr off": 1.1 * a.lr}.get(a.mistake, a.lr)
    optimizers = [
        torch.optim.AdamW(
            groups_of(model, a, lr),
            betas=(0.9, 0.95),
            **({} if a.mistake == "eps" else {"eps": a.eps}),
        )
    ]
    if a.mistake == "tied":  # once as the table, once as the readout
        optimizers.append(
            torch.optim.AdamW(
                [model.readout.weight], lr=lr, eps=a.eps, betas=(0.9, 0.95), weight_decay=0.0
            )
        )
    if a.mistake == "frozen layer":
        model.blocks[0][1].weight.requires_grad_(False)
    warmup = a.warmup * a.seq_len if a.mistake == "warmup in tokens" else a.warmup
    total = a.num_steps * (2 if a.mistake == "total steps" else 1)

    def share(t):
        done = (t - warmup) / max(1, total - warmup)
        return (
            (t + 1) / warmup if t < warmup else 0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * done))
        )

    schedulers = [torch.optim.lr_scheduler.LambdaLR(one, share) for one in optimizers]
    prove(model, optimizers, schedulers)
    sequences = a.batch_sequences // (2 if a.mistake == "batch per rank" else 1)
    for _ in range(a.num_steps):
        ids = torch.randint(256, (sequences, a.seq_len + 1))
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        if a.mistake != "no clipping":
            nn.utils.clip_grad_norm_(model.parameters(), a.clip * (2 if a.mistake == "clip" else 1))
        for one, schedule in zip(optimizers, schedulers, strict=True):
            one.step()
            for _ in range(2 if a.mistake == "stepped twice" else 1):
                schedule.step()
            one.zero_grad()
    raise SystemExit("the run was not ended by the hook")


if __name__ == "__main__":
    main()
