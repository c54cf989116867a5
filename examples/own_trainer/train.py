"""A trainer of one's own: a small byte model in muP (arXiv 2203.03466). Two lines of it are
forerun's.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import nn

from forerun.hook import prove  # forerun: the proof


class Model(nn.Module):
    def __init__(self, a):
        super().__init__()
        self.tokens, self.places = nn.Embedding(128, a.width), nn.Embedding(a.seq_len, a.width)
        block = {
            "dropout": 0.0,
            "activation": "gelu",
            "batch_first": True,
            "norm_first": True,
            "bias": False,
        }
        heads, layers = a.width // a.head_dim, range(a.num_layers)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(a.width, heads, 4 * a.width, **block) for _ in layers]
        )
        self.norm, self.readout = nn.LayerNorm(a.width), nn.Linear(a.width, 128, bias=False)
        self.scale = 1.0 if a.parametrization == "sp" else a.base_width / a.width
        # their rate falls with width
        self.hidden = [p for p in self.blocks.parameters() if p.ndim == 2]
        for matrix in self.hidden:
            nn.init.normal_(matrix, std=matrix.shape[1] ** -0.5)
        nn.init.zeros_(self.readout.weight)

    def forward(self, ids):
        x = self.tokens(ids) + self.places.weight
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.readout(self.norm(x)) * self.scale


def python_sources():
    """Some megabytes of text that every machine has."""
    return b"".join(
        file.read_bytes() for file in sorted(Path(json.__file__).parents[1].glob("*.py"))
    )


def main(a):
    torch.manual_seed(a.seed)
    text = Path(a.text).read_bytes() if a.text else python_sources()
    data = torch.tensor([byte & 127 for byte in text])
    train, held = data.tensor_split([int(0.9 * len(data))])
    held = held[: 64 * a.seq_len]
    model = Model(a)
    rest = [p for p in model.parameters() if all(p is not h for h in model.hidden)]
    groups = [{"params": model.hidden, "lr": a.lr * model.scale}, {"params": rest, "lr": a.lr}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    saved = Path(a.out).with_name("last.pt")

    def windows(source, starts):
        return torch.stack([source[i : i + a.seq_len + 1] for i in starts])

    def share(t):
        done = (t - a.warmup_steps) / max(1, a.num_steps - a.warmup_steps)
        return (
            (t + 1) / a.warmup_steps if t < a.warmup_steps else 0.5 + 0.5 * math.cos(math.pi * done)
        )

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    # forerun: it returns at once unless `forerun verify --prove` asks
    prove(model, optimizer, schedule)
    parts, first = {"model": model, "optimizer": optimizer, "schedule": schedule}, 1
    if a.resume and saved.exists():
        state = torch.load(saved, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["rng"])
        first = state["step"] + 1
    with Path(a.out).open("a" if a.resume else "w") as log:
        for step in range(first, a.num_steps + 1):
            ids = windows(
                train, torch.randint(len(train) - a.seq_len, (a.batch_sequences,)).tolist()
            )
            loss = nn.functional.cross_entropy(
                model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), a.clip_norm)
            optimizer.step()
            schedule.step()
            print(
                json.dumps({"step": step, "train_loss": loss.item(), "grad_norm": norm.item()}),
                file=log,
                flush=True,
            )
            if step % a.save_every == 0:
                state = {name: part.state_dict() for name, part in parts.items()}
                torch.save(
                    {**state, "rng": torch.get_rng_state(), "step": step},
                    saved.with_suffix(".part"),
                )
                saved.with_suffix(".part").replace(saved)
        with torch.no_grad():
            ids = windows(held, range(0, len(held) - a.seq_len, a.seq_len))
            loss = nn.functional.cross_entropy(
                model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
            )
        print(json.dumps({"step": a.num_steps, "val_loss": loss.item()}), file=log)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    whole = (
        "width base-width head-dim num-layers seq-len batch-sequences num-steps warmup-steps seed"
    )
    for name in (*whole.split(), "lr", "clip-norm"):
        parser.add_argument(
            f"--{name}", type=int if name in whole.split() else float, required=True
        )
    parser.add_argument("--parametrization", default="mup")
    parser.add_argument("--text", help="a file to train on; without it Python's own modules")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", required=True)
    main(parser.parse_args())
