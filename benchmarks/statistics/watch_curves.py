"""Record the curves that `watch.py` judges: a small ladder, and many healthy runs twice as long.

    OMP_NUM_THREADS=1 python benchmarks/statistics/watch_curves.py \\
        benchmarks/grids/watch.safetensors

The runs train a tiny model on the source files of Python's standard library. It takes some minutes
of one core. For each size the file has `loss/WIDTH/STEPS` and `grad/WIDTH/STEPS` [runs, steps] as
float16, and `final/WIDTH/STEPS` [runs], the validation loss at the end.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from proxies.core.hyperparameters import Hparams
from proxies.core.rules import named
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.core.spec import Numerics, RunSpec
from proxies.data.corpus import tokenize
from proxies.data.tokens import TokenStore
from proxies.training.bank import Bank

BATCH_TOKENS, SEQ_LEN, NUM_SLOTS = 512, 64, 8
LADDER = [
    (16, 80, 4, 0),
    (16, 160, 4, 1000),
    (16, 320, 4, 2000),
    (32, 80, 4, 3000),
    (32, 160, 4, 4000),
    (32, 320, 4, 5000),
    (48, 80, 4, 7000),
    (48, 160, 4, 8000),
]
MAIN = (32, 640, 24, 6000)
"""Width, steps, runs, seed of the first."""
SOURCES = (
    "asyncio",
    "email",
    "idlelib",
    "unittest",
    "multiprocessing",
    "importlib",
    "json",
    "http",
    "xml",
    "lib2to3",
)


def corpus(folder: Path) -> TokenStore:
    """Packages of the standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = [path for name in SOURCES if (path := library / name).is_dir()]
    tokenize(found, folder / "tokens", validation_fraction=0.1, suffixes=(".py",))
    return TokenStore(folder / "tokens")


def schedule_of(num_steps: int) -> Schedule:
    """Return the schedule of every run."""
    return Schedule(
        kind="cosine", num_steps=num_steps, warmup_steps=num_steps // 20, final_fraction=0.1
    )


def run_of(store: TokenStore, width: int, num_steps: int, seed: int) -> RunSpec:
    """One run of the recipe."""
    base = Shape(
        num_layers=2,
        width=16,
        num_heads=1,
        num_kv_heads=1,
        ffn_width=32,
        vocab_size=256,
        seq_len=SEQ_LEN,
    )
    return RunSpec(
        optimizer="adamw",
        shape=base.at_width(width),
        base_shape=base,
        parametrization=named("mup"),
        hparams=Hparams(learning_rate=2.0**-6, weight_decay=0.1, clip_norm=1.0),
        schedule=schedule_of(num_steps),
        batch_tokens=BATCH_TOKENS,
        data_id=store.manifest.data_id,
        seed=seed,
        numerics=Numerics(num_slots=NUM_SLOTS),
    )


def recorded(store: TokenStore, width: int, num_steps: int, seeds: range) -> dict[str, np.ndarray]:
    """The curves of one size, a row a seed."""
    bank = Bank(
        run_of(store, width, num_steps, 0).shape,
        BATCH_TOKENS,
        Numerics(num_slots=NUM_SLOTS),
        store,
        optimizer="adamw",
    )
    rows = {}
    for first in range(seeds.start, seeds.stop, NUM_SLOTS):
        waiting = min(NUM_SLOTS, seeds.stop - first)
        for slot in range(waiting):
            bank.admit(slot, run_of(store, width, num_steps, first + slot))
        while waiting:
            for slot, result, curve in bank.advance(num_steps):
                rows[first + slot] = (curve.train_loss_nats, curve.grad_norm, result.loss_nats)
                waiting -= 1
    losses, norms, finals = zip(*(rows[seed] for seed in seeds), strict=True)
    at = f"{width}/{num_steps}"
    return {
        f"loss/{at}": np.array(losses, dtype=np.float16),
        f"grad/{at}": np.array(norms, dtype=np.float16),
        f"final/{at}": np.array(finals, dtype=np.float32),
    }


def main(out: Path) -> None:
    tables: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as name:
        store = corpus(Path(name))
        for width, num_steps, num_runs, first in [*LADDER, MAIN]:
            began = time.monotonic()
            tables |= recorded(store, width, num_steps, range(first, first + num_runs))
            final = tables[f"final/{width}/{num_steps}"]
            print(
                f"{width=} {num_steps=} {final.mean():.4f} sd {final.std():.4f}, "
                f"{time.monotonic() - began:.0f} s"
            )
    save_file(tables, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
