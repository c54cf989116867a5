"""Training speed of one trial at a time, of a bank of trials, and of torch's vmap, on one thread.

    python benchmarks/cpu/banks.py --json benchmarks/results/banks.json

The model is the demo's: 2 layers, heads of 16, a feed-forward layer of twice the width, and 256
tokens of vocabulary. It trains on random tokens, 16 sequences of 64 tokens a step, at widths 32 to
256. A bank trains K trials of one shape as one batched model, for K = 1, 2, 4 and 8; the place of a
trial in the bank is a slot. The trials are trained in these ways:

- `solo`: one trial alone (`forerun._proxies.training.single_trial`). K trials one after another
  take K times as long, so all ratios are to this way.
- `bank`: `forerun._proxies.training.bank` with K slots.
- `vmap`: K copies of the model under torch.func (functional_call, grad_and_value, vmap), with AdamW
  written as plain tensor code. It has one learning rate for all trials and no clipping, so it does
  less than a bank.
- `compiled`, `fused loss`, `medium` (float32 products computed through bfloat16) and `bfloat16`:
  the same with these settings; only `compiled` also applies to vmap.

The script prints a line for each width and way, and writes: trial-steps per CPU second; the ratio
to `solo`, as median and range over rounds in which all ways take turns; and `share`, which is the
achieved FLOP/s (`forerun._proxies.core.flops`, causal) over the rate of a 1024 x 1024 x 1024
float32 product in the same round (`bfloat16_share`: of a bfloat16 product).

It takes about 25 minutes of one core, most of it for compiling. `--quick` takes one or two minutes:
two widths, two values of K and three modes, none of them compiled.
"""

from __future__ import annotations

import dataclasses
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

from result_files import describe_machine, make_parser, write_result

from forerun._proxies.core.flops import compute_flops_per_token
from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Numerics, RunSpec
from forerun._proxies.data.corpus import tokenize
from forerun._proxies.data.tokens import TokenStore
from forerun._proxies.model import rotary
from forerun._proxies.training.bank import Bank
from forerun._proxies.training.single_trial import SingleTrialEngine
from forerun._proxies.training.trainable_model import build_decoder

WIDTHS, SLOTS = (32, 64, 128, 256), (1, 2, 4, 8)
BATCH_TOKENS, SEQ_LEN = 1024, 64
COMPILED_SLOTS = (1, 4)
ENDLESS_STEPS = 10**6
ROUND_SECONDS = 0.4
"""CPU seconds, approximately, of one measurement of one way in one round."""

Steps = Callable[[int], None]
"""Function that trains a number of steps."""
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
"""Changes to the numerics, by mode."""


def write_random_corpus(folder: Path) -> TokenStore:
    """Write random text and return it tokenized."""
    rng = np.random.default_rng(0)
    (folder / "texts").mkdir()
    for number in range(40):
        text = "".join(map(chr, rng.integers(97, 123, 60_000)))
        (folder / "texts" / f"{number}.txt").write_text(text)
    tokenize([folder / "texts"], folder / "tokens", validation_fraction=0.1)
    return TokenStore(folder / "tokens")


def make_spec(store: TokenStore, width: int, seed: int, numerics: Numerics) -> RunSpec:
    """Return the spec of a run of the demo's model that never ends."""
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
        parametrization=get_parametrization("mup"),
        hparams=Hparams(learning_rate=2.0**-7),
        schedule=Schedule(kind="constant", num_steps=ENDLESS_STEPS),
        batch_tokens=BATCH_TOKENS,
        data_id=store.manifest.data_id,
        seed=seed,
        numerics=numerics,
    )


def make_engine_steps(store: TokenStore, width: int, num_slots: int, **mode: Any) -> Steps:
    """Return a function that trains a bank, or one trial alone if `num_slots` is 0."""
    numerics = Numerics(num_slots=max(1, num_slots), **mode)
    spec = make_spec(store, width, 0, numerics)
    # These settings belong to the process: set them again before each measurement.
    precision, threads = numerics.matmul_precision, numerics.num_threads
    trainer: SingleTrialEngine | Bank = (
        SingleTrialEngine(store, device="cpu")
        if num_slots == 0
        else Bank(spec.shape, BATCH_TOKENS, numerics, store, optimizer="adamw", device="cpu")
    )
    for slot in range(max(1, num_slots)):
        trainer.admit(slot, dataclasses.replace(spec, seed=slot))

    def train_steps(count: int) -> None:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        trainer.advance(count)

    return train_steps


def make_vmap_steps(store: TokenStore, width: int, num_slots: int, *, compiled: bool) -> Steps:
    """Return a function that trains K models under vmap with a plain functional AdamW."""
    models = [build_decoder(make_spec(store, width, seed, Numerics())) for seed in range(num_slots)]
    weights, _ = stack_module_state([model.module for model in models])
    module, multipliers = models[0].module, models[0].multipliers
    weights = {name: weight.detach() for name, weight in weights.items()}
    first_moments, second_moments = (
        {name: torch.zeros_like(weight) for name, weight in weights.items()} for _ in range(2)
    )
    settings = {
        numbers.name: (numbers.learning_rate, numbers.settings["eps"])
        for numbers in models[0].numbers
    }

    def compute_loss(weights: dict[str, Tensor], ids_BT: Tensor) -> Tensor:
        return functional_call(module, weights, (ids_BT[:, :-1], multipliers, ids_BT[:, 1:]))

    gradients_of = vmap(grad_and_value(compute_loss))
    if compiled:
        gradients_of = torch.compile(gradients_of, fullgraph=True, dynamic=False)
    head_dim = 16
    beta1, beta2 = 0.9, 0.95
    num_done = 0
    tables = rotary._compute_tables(
        SEQ_LEN, width // head_dim, head_dim, torch.device("cpu"), torch.float32
    )
    get_tables = lambda *_: tables  # noqa: E731 (a constant of a compiled graph cannot pass through vmap)

    def train_steps(count: int) -> None:
        torch.set_float32_matmul_precision("highest")
        with mock.patch.object(rotary, "_get_constant_tables", get_tables):
            for _ in range(count):
                step()

    def step() -> None:
        nonlocal num_done
        batches = [
            store.read_train_batch(
                seed=seed,
                first_sequence=num_done * (BATCH_TOKENS // SEQ_LEN),
                num_sequences=BATCH_TOKENS // SEQ_LEN,
                seq_len=SEQ_LEN,
            )
            for seed in range(num_slots)
        ]
        gradients, losses = gradients_of(weights, torch.from_numpy(np.stack(batches)))
        num_done += 1
        # AdamW without weight decay: moments, bias correction, update
        with torch.no_grad():
            for name, (learning_rate, eps) in settings.items():
                first_moments[name].lerp_(gradients[name], 1 - beta1)
                second_moments[name].lerp_(gradients[name].square(), 1 - beta2)
                root = (second_moments[name] / (1 - beta2**num_done)).sqrt_().add_(eps)
                weights[name].addcdiv_(
                    first_moments[name], root, value=-learning_rate / (1 - beta1**num_done)
                )
        losses.tolist()

    return train_steps


def measure_product_rate(dtype: torch.dtype) -> float:
    """Return the best FLOP/s of several products of two square matrices."""
    size = 1024
    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        began = time.process_time()
        a @ b
        best = min(best, time.process_time() - began)
    return 2 * size**3 / best


def measure_rate(steps: Steps, count: int, num_trials: int) -> float:
    """Train and return the trial-steps per CPU second."""
    began = time.process_time()
    steps(count)
    return count * num_trials / (time.process_time() - began)


def measure_width(
    store: TokenStore, width: int, ways: dict[str, tuple[int, Callable[[], Steps]]], num_rounds: int
) -> Any:
    """Measure all ways at one width in turns, print a line for each, and return the rows."""
    # Build and warm up each way, and choose how many steps make one measurement
    prepared: dict[str, tuple[int, Steps, int]] = {}
    for name, (num_trials, build) in ways.items():
        steps = build()
        steps(2)
        step_seconds = num_trials / measure_rate(steps, 2, num_trials)
        prepared[name] = (num_trials, steps, max(1, round(ROUND_SECONDS / step_seconds)))
    rates: dict[str, list[float]] = {name: [] for name in prepared}
    products, bfloat16_products = [], []
    # All ways in turns
    for _ in range(num_rounds):
        torch.set_float32_matmul_precision("highest")
        products.append(measure_product_rate(torch.float32))
        bfloat16_products.append(measure_product_rate(torch.bfloat16))
        for name, (num_trials, steps, count) in prepared.items():
            rates[name].append(measure_rate(steps, count, num_trials))
    # Shares of the machine's rate, and ratios to one trial alone, within each round
    flops = compute_flops_per_token(make_spec(store, width, 0, Numerics()).shape) * BATCH_TOKENS
    solo_rates = rates["solo"]
    rows = []
    for name, way_rates in rates.items():
        ratios = [way / solo for way, solo in zip(way_rates, solo_rates, strict=True)]
        row = {
            "width": width,
            "arm": name,
            "trial_steps_per_cpu_second": statistics.median(way_rates),
            "to_solo": statistics.median(ratios),
            "to_solo_range": [min(ratios), max(ratios)],
            "share": statistics.median(
                rate * flops / product for rate, product in zip(way_rates, products, strict=True)
            ),
            "bfloat16_share": statistics.median(
                rate * flops / product
                for rate, product in zip(way_rates, bfloat16_products, strict=True)
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


def list_ways(
    store: TokenStore,
    width: int,
    slots: Sequence[int],
    modes: Sequence[str],
    compiled_slots: Sequence[int],
) -> dict[str, tuple[int, Callable[[], Steps]]]:
    """Return the ways to train, by name: the number of trials, and a function that builds the
    steps. The first way is `solo`.

    Args:
        store: corpus.
        width: width of the model.
        slots: numbers of slots of the plain banks and of vmap.
        modes: keys of `MODES`.
        compiled_slots: numbers of slots of the banks in all other modes, and of compiled vmap.
    """
    ways: dict[str, tuple[int, Callable[[], Steps]]] = {}
    for mode in modes:
        options, compiled = MODES[mode], "compiled" in mode
        label = f", {mode}" if mode else ""
        ways[f"solo{label}"] = (
            1,
            lambda options=options: make_engine_steps(store, width, 0, **options),
        )
        for k in compiled_slots if compiled or mode else slots:
            ways[f"bank K={k}{label}"] = (
                k,
                lambda k=k, options=options: make_engine_steps(store, width, k, **options),
            )
    for k in slots:
        if k > 1:
            ways[f"vmap K={k}"] = (k, lambda k=k: make_vmap_steps(store, width, k, compiled=False))
    for k in compiled_slots if "compiled" in modes else ():
        ways[f"vmap K={k}, compiled"] = (
            k,
            lambda k=k: make_vmap_steps(store, width, k, compiled=True),
        )
    return ways


def main() -> None:
    """Measure all widths, and write the result after each of them."""
    parser = make_parser(__doc__, quick="Two widths, two K, three modes, two rounds.")
    parser.add_argument("--widths", help="Widths, such as 32,64; default 32,64,128,256.")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.monotonic()
    widths, slots = ((32, 256), (1, 4)) if options.quick else (WIDTHS, SLOTS)
    widths = tuple(map(int, options.widths.split(","))) if options.widths else widths
    modes = ["", "fused loss", "bfloat16"] if options.quick else list(MODES)
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as folder:
        store = write_random_corpus(Path(folder))
        for width in widths:
            rows += measure_width(
                store,
                width,
                list_ways(store, width, slots, modes, COMPILED_SLOTS),
                2 if options.quick else 7,
            )
            result = {
                "rows": rows,
                "quick": options.quick,
                "machine": {**describe_machine(), "torch": str(torch.__version__)},
                "seconds": time.monotonic() - began,
            }
            # After each width, because the large widths take most of the time
            write_result(options.json, result)


if __name__ == "__main__":
    main()
