"""Time that a main run waits for its checkpoints, and time that they take in the background.

    python benchmarks/cpu/saving.py [WIDTH] [NUM_SAVES]

One rank has the weights and AdamW's moments of a llama-like model of 8 layers and saves them while
it trains. For each save the script prints its size, the seconds from the copy to the rename, and
the seconds that the training waited.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.trainer.checkpoint_saver import Saver
from launcher.trainer.checkpoints import folder_of
from proxies.core.shape import Shape
from proxies.model.decoder import Decoder, Multipliers
from proxies.model.loss import token_loss


def main() -> None:
    """Print one line a save."""
    width, num_saves = (int(word) for word in [*sys.argv[1:], *("512", "3")[len(sys.argv) - 1 :]])
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
        saver = Saver(Path(folder), "d" * 64, keep=2)
        for step in range(1, num_saves + 1):
            busy = time.perf_counter()
            for _ in range(4):
                ids = torch.randint(shape.vocab_size, (2, shape.seq_len + 1), device=device)
                optimizer.zero_grad()
                token_loss(model(ids[:, :-1], Multipliers(attention=0.1)), ids[:, 1:]).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            train_seconds = time.perf_counter() - busy
            saver.settle()
            saver.save(step, model, optimizer, {}, 0)
            saver.settle()
            (saved,) = saver.finished()
            size = sum(file.stat().st_size for file in folder_of(Path(folder), step).iterdir())
            print(
                f"step {step}: {size / 1e9:.2f} GB, {saved.seconds:.2f} s, of which training "
                "waited "
                f"{saved.wait_seconds:.2f} s; four steps take {train_seconds:.2f} s"
            )


if __name__ == "__main__":
    main()
