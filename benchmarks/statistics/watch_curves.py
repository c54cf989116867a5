"""Record the curves that `watch.py` judges: a small ladder, and many healthy runs twice as long.

    OMP_NUM_THREADS=1 python benchmarks/statistics/watch_curves.py \
        benchmarks/grids/watch.safetensors

The runs train a tiny model on the source files of Python's standard library. They take some minutes
of one core. For each size the file has `loss/WIDTH/STEPS` and `grad/WIDTH/STEPS` [runs, steps] as
float16, and `final/WIDTH/STEPS` [runs], the validation loss at the end.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from demo_runs import train_runs

from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Numerics, RunSpec
from forerun._proxies.data.corpus import tokenize
from forerun._proxies.data.tokens import TokenStore

BATCH_TOKENS, SEQ_LEN, NUM_SLOTS = 512, 64, 8
"""Tokens of a batch and of a sequence, and runs that train together, for every size."""
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
"""Width, steps, runs, and first seed of each size."""
MAIN = (32, 640, 24, 6000)
"""Width, steps, runs, and first seed of the healthy runs."""
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
"""Packages of the standard library that make up the corpus; newer Pythons lack `lib2to3`."""


def write_corpus(folder: Path) -> TokenStore:
    """Tokenize the packages of `SOURCES` and return the corpus."""
    library = Path(sysconfig.get_paths()["stdlib"])
    packages = [path for name in SOURCES if (path := library / name).is_dir()]
    tokenize(packages, folder / "tokens", validation_fraction=0.1, suffixes=(".py",))
    return TokenStore(folder / "tokens")


def make_schedule(num_steps: int) -> Schedule:
    """Return the schedule of every run."""
    return Schedule(
        kind="cosine", num_steps=num_steps, warmup_steps=num_steps // 20, final_fraction=0.1
    )


def make_spec(store: TokenStore, width: int, num_steps: int, seed: int) -> RunSpec:
    """Return the specification of one run."""
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
        parametrization=get_parametrization("mup"),
        hparams=Hparams(learning_rate=2.0**-6, weight_decay=0.1, clip_norm=1.0),
        schedule=make_schedule(num_steps),
        batch_tokens=BATCH_TOKENS,
        data_id=store.manifest.data_id,
        seed=seed,
        numerics=Numerics(num_slots=NUM_SLOTS),
    )


def record_size(
    store: TokenStore, width: int, num_steps: int, seeds: range
) -> dict[str, np.ndarray]:
    """Train the runs of one size and return their curves, one row per seed."""
    specs = [make_spec(store, width, num_steps, seed) for seed in seeds]
    results, curves = zip(*train_runs(specs, store), strict=True)
    size = f"{width}/{num_steps}"
    return {
        f"loss/{size}": np.array([curve.train_loss_nats for curve in curves], dtype=np.float16),
        f"grad/{size}": np.array([curve.grad_norm for curve in curves], dtype=np.float16),
        f"final/{size}": np.array([result.loss_nats for result in results], dtype=np.float32),
    }


def main(out: Path) -> None:
    """Train all sizes and write the file."""
    tables: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as name:
        store = write_corpus(Path(name))
        for width, num_steps, num_runs, first_seed in [*LADDER, MAIN]:
            began = time.monotonic()
            tables |= record_size(store, width, num_steps, range(first_seed, first_seed + num_runs))
            final = tables[f"final/{width}/{num_steps}"]
            print(
                f"{width=} {num_steps=} {final.mean():.4f} sd {final.std():.4f}, "
                f"{time.monotonic() - began:.0f} s"
            )
    save_file(tables, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="File to write.")
    main(parser.parse_args().out)
