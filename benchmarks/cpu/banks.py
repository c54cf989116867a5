"""Trials per second against K and width: one after another, in a bank, by vmap, and each compiled.

    python benchmarks/cpu/banks.py --json benchmarks/results/banks.json

The demo's shape (2 layers, head dim 16, feed-forward twice the width, 256 tokens of vocabulary, 16
x 64 tokens a step) at widths 32 to 256 on random tokens, one thread. A figure is trial-steps per
CPU second. What is compared takes turns within a round, and a ratio is taken within a round: the
median over the rounds is told, with the least and the largest. `share` is the achieved FLOP/s
(`proxies.core.flops`, causal) over the rate of a 1024 x 1024 x 1024 float32 product timed in the
same round; `bfloat16_share` over that of a bfloat16 one.

- `solo`: K trials one after another, the same engine for all (`proxies.training.solo`). K = 1: what
  the others are held against.
- `bank`: `proxies.training.bank`, K slots.
- `vmap`: the model of one trial under torch.func (functional_call, grad_and_value, vmap), and AdamW
  as plain tensor code of the stacked weights, one rate for all and no clipping: less than what a
  bank does.
- `compiled`: each under `torch.compile` (inductor); `fused loss`, `medium` (products of float32
  through bfloat16) and `bfloat16`: of the bank and the trial alone.

Compiling takes most of the time: some 25 minutes of one core in all; `--quick` takes two widths,
two K and three modes, nothing compiled, in a minute or two.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from process_tree import machine

from proxies.core.flops import flops_per_token
from proxies.core.hyperparameters import Hparams
from proxies.core.rules import named
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.core.spec import Numerics, RunSpec
from proxies.data.corpus import tokenize
from proxies.data.tokens import TokenStore
from proxies.model import decoder
from proxies.training.bank import Bank
from proxies.training.solo import Solo
from proxies.training.trainable_model import our_model

WIDTHS, SLOTS = (32, 64, 128, 256), (1, 2, 4, 8)
BATCH_TOKENS, SEQ_LEN = 1024, 64
COMPILED_SLOTS = (1, 4)
ENDLESS_STEPS = 10**6
ROUND_SECONDS = 0.4
"""Of CPU time, that one figure of one round takes at least."""

Steps = Callable[[int], None]
MODES: dict[str, dict[str, Any]] = {
    "": {},
    "fused loss": {"fused_loss": True},
    "medium": {"matmul_precision": "medium"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, fused loss": {"dtype": "bfloat16", "fused_loss": True},
    "compiled": {"compiled": True},
    "compiled, fused loss": {"compiled": True, "fused_loss": True},
    "compiled, bfloat16": {"compiled": True, "dtype": "bfloat16"},
}


def corpus(folder: Path) -> TokenStore:
    """Some random text."""
    rng = np.random.default_rng(0)
    (folder / "texts").mkdir()
    for number in range(40):
        text = "".join(map(chr, rng.integers(97, 123, 60_000)))
        (folder / "texts" / f"{number}.txt").write_text(text)
    tokenize([folder / "texts"], folder / "tokens", validation_fraction=0.1)
    return TokenStore(folder / "tokens")


def run_of(store: TokenStore, width: int, seed: int, numerics: Numerics) -> RunSpec:
    """A run of the demo's shape that never ends."""
    base = Shape(
        num_layers=2,
        width=32,
        num_heads=2,
        num_kv_heads=2,
        ffn_width=64,
        vocab_size=256,
        seq_len=SEQ_LEN,
    )
    return RunSpec(
        optimizer="adamw",
        shape=base.at_width(width),
        base_shape=base,
        parametrization=named("mup"),
        hparams=Hparams(learning_rate=2.0**-7),
        schedule=Schedule(kind="constant", num_steps=ENDLESS_STEPS),
        batch_tokens=BATCH_TOKENS,
        data_id=store.manifest.data_id,
        seed=seed,
        numerics=numerics,
    )


def engine(store: TokenStore, width: int, num_slots: int, **mode: Any) -> Steps:
    """Steps of a bank of K, or of one trial alone: K of them one after another cost K times as
    much.
    """
    numerics = Numerics(num_slots=max(1, num_slots), **mode)
    spec = run_of(store, width, 0, numerics)
    # Process-wide: torch would keep the last engine's.
    precision, threads = numerics.matmul_precision, numerics.num_threads
    one: Solo | Bank = (
        Solo(store, device="cpu")
        if num_slots == 0
        else Bank(spec.shape, BATCH_TOKENS, numerics, store, optimizer="adamw", device="cpu")
    )
    for slot in range(max(1, num_slots)):
        one.admit(slot, dataclasses.replace(spec, seed=slot))

    def steps(count: int) -> None:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        one.advance(count)

    return steps


def vmapped(store: TokenStore, width: int, num_slots: int, *, compiled: bool) -> Steps:
    """K models of one trial under vmap, with a plain functional AdamW."""
    built = [our_model(run_of(store, width, seed, Numerics())) for seed in range(num_slots)]
    weights, _ = stack_module_state([one.module for one in built])
    module, multipliers = built[0].module, built[0].multipliers
    weights = {name: weight.detach() for name, weight in weights.items()}
    first, second = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    rates = {n.name: (n.learning_rate, n.settings["eps"]) for n in built[0].numbers}

    def loss(one: dict[str, Tensor], ids_BT: Tensor) -> Tensor:
        return functional_call(module, one, (ids_BT[:, :-1], multipliers, ids_BT[:, 1:]))

    gradients_of = vmap(grad_and_value(loss))
    if compiled:
        gradients_of = torch.compile(gradients_of, fullgraph=True, dynamic=False)
    head_dim, done = 16, 0
    tables = decoder._rotary_tables(
        SEQ_LEN, width // head_dim, head_dim, torch.device("cpu"), torch.float32
    )
    fixed = lambda *_: tables  # noqa: E731 (a constant of a compiled graph cannot pass through vmap)

    def steps(count: int) -> None:
        torch.set_float32_matmul_precision("highest")
        with mock.patch.object(decoder, "_constant_tables", fixed):
            for _ in range(count):
                step()

    def step() -> None:
        nonlocal done
        batches = [
            store.train_batch(
                seed=seed,
                first_sequence=done * (BATCH_TOKENS // SEQ_LEN),
                num_sequences=BATCH_TOKENS // SEQ_LEN,
                seq_len=SEQ_LEN,
            )
            for seed in range(num_slots)
        ]
        gradients, losses = gradients_of(weights, torch.from_numpy(np.stack(batches)))
        done += 1
        with torch.no_grad():
            for name, (rate, eps) in rates.items():
                first[name].lerp_(gradients[name], 0.1)
                second[name].lerp_(gradients[name].square(), 0.05)
                root = (second[name] / (1 - 0.95**done)).sqrt_().add_(eps)
                weights[name].addcdiv_(first[name], root, value=-rate / (1 - 0.9**done))
        losses.tolist()

    return steps


def product_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a square product, the best of a few."""
    a, b = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        began = time.process_time()
        a @ b
        best = min(best, time.process_time() - began)
    return 2 * 1024**3 / best


def rate(steps: Steps, count: int, num_trials: int) -> float:
    """Trial-steps per CPU second."""
    began = time.process_time()
    steps(count)
    return count * num_trials / (time.process_time() - began)


def table(
    store: TokenStore, width: int, arms: dict[str, tuple[int, Callable[[], Steps]]], num_rounds: int
) -> Any:
    """Every arm's rate, as a ratio to the first one's and as a share of the machine's, in turns."""
    built: dict[str, tuple[int, Steps, int]] = {}
    for name, (num_trials, make) in arms.items():
        steps = make()
        steps(2)
        spent = num_trials * 2 / rate(steps, 2, num_trials)
        built[name] = (num_trials, steps, max(1, round(2 * ROUND_SECONDS / spent)))
    rates: dict[str, list[float]] = {name: [] for name in built}
    products, rounded = [], []
    for _ in range(num_rounds):
        torch.set_float32_matmul_precision("highest")
        products.append(product_rate(torch.float32))
        rounded.append(product_rate(torch.bfloat16))
        for name, (num_trials, steps, count) in built.items():
            rates[name].append(rate(steps, count, num_trials))
    flops = flops_per_token(run_of(store, width, 0, Numerics()).shape) * BATCH_TOKENS
    alone = rates[next(iter(built))]
    rows = []
    for name, found in rates.items():
        ratios = [ours / theirs for ours, theirs in zip(found, alone, strict=True)]
        row = {
            "width": width,
            "arm": name,
            "trial_steps_per_cpu_second": statistics.median(found),
            "to_solo": statistics.median(ratios),
            "to_solo_range": [min(ratios), max(ratios)],
            "share": statistics.median(r * flops / p for r, p in zip(found, products, strict=True)),
            "bfloat16_share": statistics.median(
                r * flops / p for r, p in zip(found, rounded, strict=True)
            ),
        }
        rows.append(row)
        print(
            f"width {width:4}  {name:34} {row['trial_steps_per_cpu_second']:8.2f} steps/s  "
            f"{row['to_solo']:5.2f} of "
            f"solo ({min(ratios):.2f} to {max(ratios):.2f})  {row['share']:4.0%} of the machine",
            flush=True,
        )
    print(f"width {width:4}  product {statistics.median(products) / 1e9:.0f} GFLOP/s", flush=True)
    return rows


def arms_of(
    store: TokenStore,
    width: int,
    slots: Sequence[int],
    modes: Sequence[str],
    compiled_slots: Sequence[int],
) -> dict[str, tuple[int, Callable[[], Steps]]]:
    """Trials of each arm, and what makes it."""
    arms: dict[str, tuple[int, Callable[[], Steps]]] = {}
    for mode in modes:
        options, compiled = MODES[mode], "compiled" in mode
        label = f", {mode}" if mode else ""
        arms[f"solo{label}"] = (1, lambda options=options: engine(store, width, 0, **options))
        for k in compiled_slots if compiled or mode else slots:
            arms[f"bank K={k}{label}"] = (
                k,
                lambda k=k, options=options: engine(store, width, k, **options),
            )
    for k in slots:
        if k > 1:
            arms[f"vmap K={k}"] = (k, lambda k=k: vmapped(store, width, k, compiled=False))
    for k in compiled_slots if "compiled" in modes else ():
        arms[f"vmap K={k}, compiled"] = (k, lambda k=k: vmapped(store, width, k, compiled=True))
    return arms


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="Where the numbers go.")
    parser.add_argument("--widths", help="Some others than 32,64,128,256.")
    parser.add_argument(
        "--quick", action="store_true", help="Two widths, two K, three modes, two rounds."
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.monotonic()
    widths, slots = ((32, 256), (1, 4)) if options.quick else (WIDTHS, SLOTS)
    widths = tuple(map(int, options.widths.split(","))) if options.widths else widths
    modes = ["", "fused loss", "bfloat16"] if options.quick else list(MODES)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        store = corpus(Path(folder))
        for width in widths:
            rows += table(
                store,
                width,
                arms_of(store, width, slots, modes, COMPILED_SLOTS),
                2 if options.quick else 7,
            )
            body = {
                "rows": rows,
                "quick": options.quick,
                "machine": {**machine(), "torch": str(torch.__version__)},
                "seconds": time.monotonic() - began,
            }
            if options.json:  # after each width: the wide ones take most of the time
                options.json.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
