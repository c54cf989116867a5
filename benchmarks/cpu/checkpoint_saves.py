"""Seconds that a main run waits for its checkpoints, and seconds that they take in the background.

    python benchmarks/cpu/checkpoint_saves.py [WIDTH] [NUM_SAVES]

One rank trains a llama-like model of 8 layers with AdamW, four steps at a time, and saves the
weights and AdamW's moments after them. For each save the script prints its size, the seconds from
the copy to the rename, the seconds that the training waited, and the seconds of the four steps. It
writes no file. With the defaults (width 512, 3 saves) it takes less than a minute; it uses a GPU if
there is one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from forerun._launcher.main_run.trainer.checkpoint_saver import Saver
from forerun._launcher.main_run.trainer.checkpoints import Manifest, get_checkpoint_folder
from forerun._proxies.core.shape import Shape
from forerun._proxies.model.decoder import Decoder, Multipliers
from forerun._proxies.model.loss import compute_token_loss

DEFAULT_WIDTH, DEFAULT_NUM_SAVES = 512, 3
STEPS_PER_SAVE = 4


def train_steps(model: Decoder, optimizer: torch.optim.Optimizer, shape: Shape) -> float:
    """Train some steps on random tokens and return their seconds."""
    began = time.perf_counter()
    for _ in range(STEPS_PER_SAVE):
        size = (2, shape.seq_len + 1)
        ids_BT = torch.randint(shape.vocab_size, size, device=next(model.parameters()).device)
        optimizer.zero_grad()
        logits = model(ids_BT[:, :-1], Multipliers(attention=0.1))
        compute_token_loss(logits, ids_BT[:, 1:]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return time.perf_counter() - began


def main() -> None:
    """Train and save, and print one line per save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("width", type=int, nargs="?", default=DEFAULT_WIDTH)
    parser.add_argument("num_saves", type=int, nargs="?", default=DEFAULT_NUM_SAVES)
    options = parser.parse_args()
    width: int = options.width
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    shape = Shape(
        num_layers=8,
        width=width,
        num_heads=8,
        num_kv_heads=8,
        ffn_width=3 * width,
        vocab_size=8192,
        seq_len=128,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Decoder(shape, device=device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        events: list[Any] = []
        saver = Saver(Path(folder), keep=2, report=events.append)
        for step in range(1, options.num_saves + 1):
            train_seconds = train_steps(model, optimizer, shape)
            saver.settle()
            saver.save(Manifest(digest="d" * 64, step=step), model, optimizer)
            saver.settle()
            saved = events[-1]
            size = sum(
                file.stat().st_size for file in get_checkpoint_folder(Path(folder), step).iterdir()
            )
            print(
                f"step {step}: {size / 1e9:.2f} GB, {saved['seconds']:.2f} s, of which training "
                "waited "
                f"{saved['wait_seconds']:.2f} s; four steps take {train_seconds:.2f} s"
            )


if __name__ == "__main__":
    main()
