"""A user's training script that calls `forerun.hook.prove`, with a mistake that a test chooses.

`forerun.hook` compares the optimizer and the learning rates of the script with the frozen ones.
Here m is the width divided by the base width, and `--mistake` names the mistake.
"""

import argparse
import math

import torch
from torch import nn

from forerun.hook import prove


class Model(nn.Module):
    """A residual network over token embeddings, with muP's initial values and output multiplier."""

    def __init__(self, args):
        super().__init__()
        self.tokens = nn.Embedding(256, args.width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(args.width), nn.Linear(args.width, args.width))
            for _ in range(2)
        )
        self.readout = nn.Linear(args.width, 256, bias=False)
        self.scale = args.base_width / args.width  # 1 / m
        for block in self.blocks:
            nn.init.normal_(
                block[1].weight, std=0.02 if args.mistake == "init" else args.width**-0.5
            )
            nn.init.zeros_(block[1].bias)
        # The readout's 1 / m is the forward multiplier.
        nn.init.normal_(self.readout.weight, std=args.base_width**-0.5)
        nn.init.normal_(self.tokens.weight)
        if args.mistake == "tied":
            self.readout.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.readout(x) * self.scale


def build_groups(model, args, lr):
    """Return the groups of muP: hidden matrices train at lr / m with decay times m; gains and
    biases do not decay.
    """
    hidden = [block[1].weight for block in model.blocks]
    gains_and_biases = [p for p in model.parameters() if p.ndim < 2]
    tables = [model.tokens.weight]
    hidden_scale = {"scaled twice": model.scale**2, "left unscaled": 1.0}.get(
        args.mistake, model.scale
    )
    groups = [
        {
            "params": hidden[1:] if args.mistake == "group missed" else hidden,
            "lr": lr * hidden_scale,
            "weight_decay": args.wd / model.scale,
        },
        {
            "params": gains_and_biases,
            "lr": lr,
            "weight_decay": args.wd if args.mistake == "decay on gains" else 0.0,
        },
        {"params": tables, "lr": lr, "weight_decay": 0.0},
    ]
    if args.mistake != "tied":
        groups.append({"params": [model.readout.weight], "lr": lr, "weight_decay": args.wd})
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
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    model = Model(args)
    lr = {"lr ignored": 1e-3, "lr off": 1.1 * args.lr}.get(args.mistake, args.lr)
    optimizers = [
        torch.optim.AdamW(
            build_groups(model, args, lr),
            betas=(0.9, 0.95),
            **({} if args.mistake == "eps" else {"eps": args.eps}),
        )
    ]
    if args.mistake == "tied":  # a second optimizer holds the shared matrix, as the readout
        optimizers.append(
            torch.optim.AdamW(
                [model.readout.weight], lr=lr, eps=args.eps, betas=(0.9, 0.95), weight_decay=0.0
            )
        )
    if args.mistake == "frozen layer":
        model.blocks[0][1].weight.requires_grad_(False)
    warmup = args.warmup * args.seq_len if args.mistake == "warmup in tokens" else args.warmup
    total = args.num_steps * (2 if args.mistake == "total steps" else 1)

    def compute_rate_share(t):
        if t < warmup:
            return (t + 1) / warmup
        progress = (t - warmup) / max(1, total - warmup)
        return 0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * progress))

    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, compute_rate_share) for optimizer in optimizers
    ]
    prove(model, optimizers, schedulers)
    sequences = args.batch_sequences // (2 if args.mistake == "batch per rank" else 1)
    for _ in range(args.num_steps):
        ids = torch.randint(256, (sequences, args.seq_len + 1))
        loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        if args.mistake != "no clipping":
            nn.utils.clip_grad_norm_(
                model.parameters(), args.clip * (2 if args.mistake == "clip" else 1)
            )
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            for _ in range(2 if args.mistake == "stepped twice" else 1):
                scheduler.step()
            optimizer.zero_grad()
    raise SystemExit("the run was not ended by the hook")


if __name__ == "__main__":
    main()
