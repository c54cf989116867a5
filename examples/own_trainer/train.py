"""Your own trainer: a small byte model in muP (arXiv 2203.03466).

Comments mark the two lines for forerun.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import nn

from forerun.hook import prove  # forerun: compares this run with the frozen config

VOCAB_SIZE = 128
"""Number of tokens: bytes of ASCII. Any other byte is taken modulo this number."""


class Model(nn.Module):
    """A decoder with learned positions, in muP."""

    def __init__(self, options):
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(VOCAB_SIZE, options.width),
            nn.Embedding(options.seq_len, options.width),
        )
        block_options = {
            "dropout": 0.0,
            "activation": "gelu",
            "batch_first": True,
            "norm_first": True,
            "bias": False,
        }
        width, num_heads = options.width, options.width // options.head_dim
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, num_heads, 4 * width, **block_options)
            for _ in range(options.num_layers)
        )
        self.norm, self.readout = nn.LayerNorm(width), nn.Linear(width, VOCAB_SIZE, bias=False)
        self.logit_factor = compute_width_factor(options)
        for matrix in self.list_hidden_matrices():
            nn.init.normal_(matrix, std=matrix.shape[1] ** -0.5)
        nn.init.zeros_(self.readout.weight)

    def list_hidden_matrices(self):
        """Return the matrices of the blocks, whose learning rate depends on the width."""
        return [parameter for parameter in self.blocks.parameters() if parameter.ndim == 2]

    def forward(self, ids):
        """Map ids [B, T] to logits [B, T, VOCAB_SIZE]: B sequences of T tokens."""
        x = self.tokens(ids) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.readout(self.norm(x)) * self.logit_factor


def compute_width_factor(options):
    """Return base width / width, by which muP multiplies the logits and the learning rate of hidden
    matrices; 1 in the standard parametrization (sp).
    """
    return 1.0 if options.parametrization == "sp" else options.base_width / options.width


def read_python_sources():
    """Return some megabytes of text that every machine has: the modules of its Python."""
    return b"".join(
        file.read_bytes() for file in sorted(Path(json.__file__).parents[1].glob("*.py"))
    )


def make_optimizer(model, options):
    """Return AdamW in muP, and its learning rate schedule."""
    hidden = model.list_hidden_matrices()
    # By identity: `in` would compare tensors element by element
    hidden_ids = set(map(id, hidden))
    unscaled = [parameter for parameter in model.parameters() if id(parameter) not in hidden_ids]
    groups = [
        {"params": hidden, "lr": options.lr * compute_width_factor(options)},
        {"params": unscaled, "lr": options.lr},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)

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

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, compute_rate_factor)


def main(options):
    """Train, log each step as JSON, and save the state."""
    torch.manual_seed(options.seed)
    text = Path(options.text).read_bytes() if options.text else read_python_sources()
    data = torch.tensor([byte % VOCAB_SIZE for byte in text])
    train, validation = data.tensor_split([int(0.9 * len(data))])
    validation = validation[: 64 * options.seq_len]  # 64 rows keep the evaluation short
    model = Model(options)
    optimizer, schedule = make_optimizer(model, options)
    saved = Path(options.out).with_name("last.pt")

    def stack_windows(source, starts):
        """Return windows of T + 1 tokens: the inputs, and the targets one token later."""
        return torch.stack([source[i : i + options.seq_len + 1] for i in starts])

    # forerun: returns at once unless `forerun verify --prove` runs this script
    prove(model, optimizer, schedule)
    parts, first_step = {"model": model, "optimizer": optimizer, "schedule": schedule}, 1
    if options.resume and saved.exists():
        state = torch.load(saved, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["rng"])
        first_step = state["step"] + 1
    with Path(options.out).open("a" if options.resume else "w") as log:
        for step in range(first_step, options.num_steps + 1):
            ids = stack_windows(
                train,
                torch.randint(len(train) - options.seq_len, (options.batch_sequences,)).tolist(),
            )
            loss = nn.functional.cross_entropy(
                model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
            )
            optimizer.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
            optimizer.step()
            schedule.step()
            print(
                json.dumps({"step": step, "train_loss": loss.item(), "grad_norm": norm.item()}),
                file=log,
                flush=True,
            )
            if step % options.save_every == 0:
                state = {name: part.state_dict() for name, part in parts.items()}
                torch.save(
                    {**state, "rng": torch.get_rng_state(), "step": step},
                    saved.with_suffix(".part"),
                )
                saved.with_suffix(".part").replace(saved)
        with torch.no_grad():
            ids = stack_windows(
                validation, range(0, len(validation) - options.seq_len, options.seq_len)
            )
            loss = nn.functional.cross_entropy(
                model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
            )
        print(json.dumps({"step": options.num_steps, "val_loss": loss.item()}), file=log)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    integers = (
        "width base-width head-dim num-layers seq-len batch-sequences num-steps warmup-steps seed"
    )
    for name in (*integers.split(), "lr", "clip-norm"):
        parser.add_argument(
            f"--{name}", type=int if name in integers.split() else float, required=True
        )
    parser.add_argument("--parametrization", choices=("mup", "sp"), default="mup")
    parser.add_argument("--text", help="File to train on; by default the modules of Python.")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--out", required=True)
    main(parser.parse_args())
