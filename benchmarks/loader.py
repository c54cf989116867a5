"""How long the loader takes for a batch, and what share of a training step that is.

    python benchmarks/loader.py --out benchmarks/results/loader-cpu.json

Times batches of several shapes from one source and from a mixture of four, each at places all over a corpus that is in
the page cache; then the loader's share of the bank's steps at the demo's shapes, measured; then its share of a step of
an accelerator, by arithmetic: a step takes 6 * params * tokens / (peak * MFU) seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from launcher.base.talk import say
from launcher.plan.plan import Plan
from proxies.core.flops import count_params
from proxies.core.hyperparameters import Hparams
from proxies.core.spec import RunSpec
from proxies.data.corpus import tokenize
from proxies.data.tokens import TokenStore
from proxies.training.bank import Bank

SHAPES = ((16, 64), (32, 256), (64, 1024), (512, 1024), (64, 4096), (1024, 2048))  # sequences, tokens each
WIDTHS = (32, 128)
PEAK_FLOPS, MFU = 989e12, 0.4  # an H100's dense bfloat16, and a good run's share of it
DEVICE_RUNS = ((124e6, 512, 1024), (1.3e9, 16, 2048))  # params, sequences and tokens each, per device
NUM_IDS = 2**26


class TimedStore(TokenStore):
    """Knows how long its batches took."""

    seconds = 0.0

    def train_batch(self, **options: int) -> NDArray[np.int64]:
        started = time.perf_counter()
        batch_BT = super().train_batch(**options)
        self.seconds += time.perf_counter() - started
        return batch_BT


def batch_ms(store: TokenStore, num_sequences: int, seq_len: int) -> dict[str, float]:
    """Median and slowest of batches at places all over the first epochs; the first, untimed, warms up."""
    places = np.random.default_rng(0).integers(0, 2 * NUM_IDS // seq_len, 21)
    times = []
    for first in places.tolist():
        started = time.perf_counter()
        store.train_batch(seed=1, first_sequence=first, num_sequences=num_sequences, seq_len=seq_len)
        times.append(1e3 * (time.perf_counter() - started))
    return {"median_ms": statistics.median(times[1:]), "slowest_ms": max(times[1:])}


def bank_share(folder: Path, width: int, num_steps: int) -> dict[str, float]:
    """The loader's share of a bank's steps at the demo's shape, all slots busy."""
    plan, store = Plan(), TimedStore(folder)
    spec = RunSpec(
        shape=plan.shape(width, 256),
        base_shape=plan.shape(plan.proxy.base_width, 256),
        parametrization=plan.parametrization,
        hparams=Hparams(learning_rate=1e-2),
        schedule=plan.schedule(num_steps + 10, 0.0),
        batch_tokens=plan.proxy.batch_tokens,
        data_id=store.manifest.data_id,
        seed=0,
        numerics=plan.numerics("proxy"),
    )
    bank = Bank(spec.shape, spec.batch_tokens, spec.numerics, store)
    for slot in range(spec.numerics.num_slots):
        bank.admit(slot, spec)
    bank.advance(5)
    store.seconds, started = 0.0, time.perf_counter()
    bank.advance(num_steps)
    seconds = time.perf_counter() - started
    return {
        "width": width,
        "num_slots": spec.numerics.num_slots,
        "batch_sequences": spec.batch_sequences,
        "seq_len": spec.shape.seq_len,
        "params": count_params(spec.shape).total,
        "step_ms": 1e3 * seconds / num_steps,
        "loader_ms": 1e3 * store.seconds / num_steps,
        "share": store.seconds / seconds,
    }


def device_share(store: TokenStore, params: float, num_sequences: int, seq_len: int) -> dict[str, float]:
    """By arithmetic, with the loader as measured here and nothing read ahead."""
    step_ms = 1e3 * 6 * params * num_sequences * seq_len / (PEAK_FLOPS * MFU)
    loader_ms = batch_ms(store, num_sequences, seq_len)["median_ms"]
    return {
        "params": params, "batch_sequences": num_sequences, "seq_len": seq_len, "step_ms": step_ms,
        "loader_ms": loader_ms, "share": loader_ms / (step_ms + loader_ms),
    }  # fmt: skip


def corpora(folder: Path) -> tuple[Path, Path, Path]:
    """Large corpora of one source and of four, and a small one of bytes."""
    rng = np.random.default_rng(0)
    paths = [folder / f"{number}.bin" for number in range(4)]
    for path in paths:
        ids = rng.integers(0, 50_000, NUM_IDS // 4, dtype=np.uint16)
        ids[rng.integers(0, ids.size, ids.size // 700)] = 50_256
        path.write_bytes(ids.astype("<u2").tobytes())
    tokenize(paths, folder / "one", vocab_size=50_257)
    weights = {"a": 0.4, "b": 0.3, "c": 0.2, "d": 0.1}
    tokenize({name: [path] for name, path in zip("abcd", paths, strict=True)}, folder / "four", vocab_size=50_257,
             weights=weights)  # fmt: skip
    text = folder / "text.txt"
    text.write_bytes(bytes(rng.integers(97, 123, 2**22, dtype=np.uint8)))
    tokenize([text], folder / "bytes")
    return folder / "one", folder / "four", folder / "bytes"


def measure(num_steps: int) -> dict[str, Any]:
    """Everything, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        say("making corpora")
        one, four, text = corpora(Path(folder))
        single, mixture = TokenStore(one, trusted=True), TokenStore(four, trusted=True)
        batches = [
            {
                "sequences": b,
                "seq_len": t,
                "one_source": batch_ms(single, b, t),
                "four_sources": batch_ms(mixture, b, t),
            }
            for b, t in SHAPES
        ]
        say("training")
        banks = [bank_share(text, width, num_steps) for width in WIDTHS]
        devices = [device_share(single, *run) for run in DEVICE_RUNS]
    return {
        "command": f"OMP_NUM_THREADS={torch.get_num_threads()} python benchmarks/loader.py",
        "machine": {
            "system": platform.system(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__},
        "corpus_tokens": NUM_IDS,
        "batches": batches,
        "bank_steps_measured": banks,
        "device_steps_by_arithmetic": {"peak_flops": PEAK_FLOPS, "mfu": MFU, "runs": devices},
    }


def table(result: dict[str, Any]) -> str:
    """The same for people."""
    lines = ["batch            one source   four sources   (median ms; slowest in brackets)"]
    for row in result["batches"]:
        cells = [f"{row[k]['median_ms']:7.2f} ({row[k]['slowest_ms']:.1f})" for k in ("one_source", "four_sources")]
        lines.append(f"{row['sequences']:5} x {row['seq_len']:<6} {cells[0]:>14} {cells[1]:>14}")
    lines.append("\nsteps of the bank, measured")
    lines += [
        f"  width {row['width']:4}, {row['num_slots']} slots: step {row['step_ms']:.2f} ms, loader "
        f"{row['loader_ms']:.2f} ms, {row['share']:.1%} of it"
        for row in result["bank_steps_measured"]
    ]
    devices = result["device_steps_by_arithmetic"]
    lines.append(
        f"\nsteps of a device of {devices['peak_flops'] / 1e12:.0f} TFLOP/s at MFU {devices['mfu']}, by arithmetic"
    )
    lines += [
        f"  {row['params'] / 1e6:,.0f} M params, {row['batch_sequences']} x {row['seq_len']}: step "
        f"{row['step_ms']:.0f} ms, loader {row['loader_ms']:.2f} ms, {row['share']:.2%} of both together"
        for row in devices["runs"]
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Time of the loader, and its share of a training step.")
    parser.add_argument("--out", type=Path, help="JSON file to write.")
    parser.add_argument("--steps", type=int, default=200, help="Steps of the bank to time.")
    options = parser.parse_args()
    result = measure(options.steps)
    print(table(result))
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")
        print(f"\nwrote {options.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
