"""FLOP/s of a whole sweep, as a share of the rate at which the same cores multiply matrices.

    python benchmarks/cpu/sweep_flops.py --json benchmarks/results/sweep_flops.json

For each width and mode, the script measures in turns:

- the rate of matrix products, a large square one and one of the model's own sizes, on as many
  processes of one thread as the sweep has workers, all at once
- `forerun sweep` on Ray; its FLOPs are those of the finished runs (training only, causal
  convention, `forerun._proxies.core.flops`), and its time is that of the search, from the moment
  when Ray's workers are there to the last outcome, or that of the whole command

A share compares the sweep with the product in the mode's own arithmetic in the same round. After
that, one call of a bank is profiled in this process, by kinds of operations.

The script prints a line for each sweep and profile, and writes both with a summary. It takes about
40 minutes of two cores; `--quick` takes 3 minutes.
"""

from __future__ import annotations

import collections
import importlib.metadata
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from process_tree import measure_command, run_together
from result_files import describe_machine, make_parser, write_result

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
NUM_STEPS = {32: 400, 64: 200, 128: 100, 256: 50}
"""Steps of a run by width, so that each sweep takes about a minute of two cores."""
NUM_WORKERS, NUM_TRIALS = 2, 24
SQUARE, ROWS = 1024, 1024
"""Size of the square product, and rows of the product of the model's own sizes."""
RATE_SECONDS = 2.0
"""Seconds for which the rate of a product is measured."""
MODES = {
    "as init writes it": (),
    "auto": ('proxy.num_slots="auto"', 'proxy.compiled="auto"'),
    "medium": ('proxy.matmul_precision="medium"',),
    "bfloat16": ('proxy.dtype="bfloat16"',),
}
"""Plan keys that each mode changes."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONDONTWRITEBYTECODE": "",
}
KINDS = {
    "attention": ("scaled_dot_product", "flash_attention"),
    "loss": ("log_softmax", "nll_loss", "cross_entropy", "Loss"),
    "copies": ("aten::copy_", "aten::cat", "aten::stack", "aten::roll", "aten::fill_"),
    "products": (
        "aten::bmm",
        "aten::mm",
        "aten::matmul",
        "aten::addmm",
        "aten::baddbmm",
        "mkldnn",
        "onednn",
    ),
}
"""Parts of the names of operations, by kind; the first kind that matches counts, so the products of
an attention are attention. All other operations are element by element: norms, positions,
activations, sums.
"""


def measure_product_rate(
    dtype: str, precision: str, rows: int, inner: int, columns: int, seconds: float
) -> float:
    """Return the FLOP/s of one product on one thread.

    Print "ready" first, and begin when a line is read.

    Args:
        dtype: Name of the torch dtype.
        precision: Float32 matmul precision of torch.
        rows: Rows of the first matrix.
        inner: Columns of the first matrix and rows of the second.
        columns: Columns of the second matrix.
        seconds: Seconds to measure.
    """
    import torch

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(precision)
    torch_dtype = getattr(torch, dtype)
    a, b = torch.randn(rows, inner).to(torch_dtype), torch.randn(inner, columns).to(torch_dtype)
    a @ b
    print("ready", flush=True)
    sys.stdin.readline()
    began, num_products = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        a @ b
        num_products += 1
    return 2 * rows * inner * columns * num_products / (time.perf_counter() - began)


def measure_product_rates(
    mode: str, width: int, ffn_width: int, seconds: float
) -> dict[str, float]:
    """Return the FLOP/s of both products in the arithmetic of a mode, on all cores of the sweep
    together.
    """
    dtype = "bfloat16" if mode == "bfloat16" else "float32"
    precision = "medium" if mode == "medium" else "highest"
    sizes = {"square": (SQUARE, SQUARE, SQUARE), "own": (ROWS, width, ffn_width)}
    return {
        name: run_together(
            [sys.executable, __file__, "rate", dtype, precision, *size, seconds], [NUM_WORKERS]
        )[0][0]
        for name, size in sizes.items()
    }


def write_plan(path: Path, corpus: Path, width: int, num_steps: int) -> Path:
    """Write a plan with this width and length, and with rates at which no run diverges."""
    path.write_text(
        f'[data]\npath = "{corpus}"\n[proxy]\nbase_width = {width}\nnum_steps = {num_steps}\n'
        f"[search]\nnum_trials = {NUM_TRIALS}\nlearning_rate = [0.001, 0.008]\n"
        f"[transfer]\nwidths = [{width}, {2 * width}]\n[cluster]\nnum_workers = {NUM_WORKERS}\n"
    )
    return path


def run_sweep(
    folder: Path, corpus: Path, width: int, num_steps: int, keys: tuple[str, ...]
) -> dict[str, Any]:
    """Run one sweep and return its FLOPs and times."""
    from forerun._sweeps.store.ledger import Ledger

    folder.mkdir()
    plan = write_plan(folder / "plan.toml", corpus, width, num_steps)
    command = [sys.executable, "-m", "forerun", "sweep", plan, "--study", folder / "study"]
    command += [part for key in keys for part in ("--set", key)]
    cost = measure_command(command, ENVIRONMENT, folder / "log", mark=f"{NUM_WORKERS} workers on")
    last_outcome = max(path.stat().st_mtime for path in (folder / "study" / "curves").iterdir())
    runs = Ledger.read(folder / "study").read_runs()
    engine_seconds = sum(run.result.seconds for run in runs)
    return {
        "flops": sum(run.result.flops for run in runs),
        "search_seconds": last_outcome - cost.marked,
        "command_seconds": cost.seconds,
        "cpu_seconds": cost.cpu_seconds,
        "outside_engines": 1 - engine_seconds / (NUM_WORKERS * (last_outcome - cost.marked)),
        "numerics": {
            name: getattr(runs[-1].spec.numerics, name)
            for name in ("num_slots", "compiled", "num_threads")
        },
        "num_diverged": sum(run.result.status != "finished" for run in runs),
    }


def measure_mode(folder: Path, corpus: Path, mode: str, width: int, share: float) -> dict[str, Any]:
    """Run a sweep between two measurements of the products; the faster measurement counts.

    `share` shortens the run and the measurements for `--quick`.
    """
    measurements = [measure_product_rates(mode, width, 2 * width, share * RATE_SECONDS)]
    row = run_sweep(folder, corpus, width, max(4, round(share * NUM_STEPS[width])), MODES[mode])
    measurements.append(measure_product_rates(mode, width, 2 * width, share * RATE_SECONDS))
    best = {
        name: max(measurement[name] for measurement in measurements) for name in measurements[0]
    }
    row |= {"mode": mode, "width": width, "square_flops": best["square"], "own_flops": best["own"]}
    achieved = row["flops"] / row["search_seconds"]
    row |= {
        "achieved_flops": achieved,
        "of_square": achieved / best["square"],
        "of_own": achieved / best["own"],
        "of_square_with_start": row["flops"] / row["command_seconds"] / best["square"],
        "of_square_in_engines": achieved / best["square"] / (1 - row["outside_engines"]),
    }
    print(
        f"width {width:3}, {mode:18} {achieved / 1e9:6.1f} GFLOP/s: {row['of_square']:.0%} of the "
        f"rate of a square product, {row['of_own']:.0%} of a product of the model's size; "
        f"{row['of_square_with_start']:.0%} with all starts, {row['of_square_in_engines']:.0%} "
        f"inside the engines; {row['outside_engines']:.0%} of the time is outside them",
        flush=True,
    )
    return row


@contextmanager
def label_calls(owner: object, *names: str) -> Iterator[None]:
    """Label calls of these methods as "part: NAME" in a profile."""
    from torch.profiler import record_function

    def wrap(call: Any, name: str) -> Any:
        def call_labeled(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"part: {name}"):
                return call(*args, **kwargs)

        return call_labeled

    originals = {name: getattr(owner, name) for name in names}
    for name, call in originals.items():
        setattr(owner, name, wrap(call, name))
    yield
    for name, call in originals.items():
        setattr(owner, name, call)


def profile_bank(corpus: Path, width: int, num_steps: int) -> dict[str, Any]:
    """Profile a bank, which trains several trials as one batched model.

    Returns:
        The share of time of each kind of operation in its steps, and the time of a validation over
        that of a step.
    """
    import torch

    from forerun._launcher.study.stages.study_folder import read_study
    from forerun._proxies.data.tokens import TokenStore
    from forerun._proxies.training.bank import Bank

    # The last of these steps is followed by the validation, which is timed separately.
    num_warmup_steps, num_timed_steps, num_last_steps = 6, 5, 1
    num_run_steps = num_warmup_steps + num_timed_steps + num_steps + num_last_steps
    plan = write_plan(corpus.parent / "profile.toml", corpus, width, num_run_steps)
    study, store = read_study(plan, corpus.parent / "none"), TokenStore(corpus, trusted=True)
    spec = study.build_trial({"learning_rate": 0.002, "warmup_fraction": 0.1, "clip_norm": 1.0})
    bank = Bank(spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="adamw")
    for slot in range(spec.numerics.num_slots):
        bank.admit(slot, replace(spec, seed=slot))
    bank.advance(num_warmup_steps)
    began = time.perf_counter()
    bank.advance(num_timed_steps)
    step_seconds = (time.perf_counter() - began) / num_timed_steps
    with (
        label_calls(store, "read_train_batch"),
        label_calls(bank.optimizer, "gather_gradients", "step"),
    ):
        began = time.perf_counter()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            bank.advance(num_steps)
            profile_seconds = time.perf_counter() - began
    began = time.perf_counter()
    bank.advance(num_last_steps)
    validation_seconds = time.perf_counter() - began - step_seconds
    parts: collections.Counter[str] = collections.Counter()
    for event in profiler.events() or ():
        parts[classify_event(event)] += event.self_cpu_time_total
    total = max(1e6 * profile_seconds, parts.total())
    parts["Python and autograd"] += max(0, round(total - parts.total()))
    shares = {name: value / total for name, value in parts.most_common()}
    share_texts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    print(
        f"width {width:3}, a bank of {spec.numerics.num_slots}: {1e3 * step_seconds:.1f} ms per "
        f"step; {share_texts}; a validation takes {validation_seconds / step_seconds:.1f} steps",
        flush=True,
    )
    return {
        "width": width,
        "step_ms": 1e3 * step_seconds,
        "shares": shares,
        "validation_over_step": validation_seconds / step_seconds,
    }


def classify_event(event: Any) -> str:
    """Return the kind of an operation of a profile."""
    names, parent = [event.name], event.cpu_parent
    while parent is not None:
        names.append(parent.name)
        parent = parent.cpu_parent
    if any(name.startswith("part: read_train_batch") for name in names):
        return "data"
    if any(name.startswith("part: ") for name in names):
        return "optimizer"
    return next(
        (
            kind
            for kind, parts in KINDS.items()
            if any(part in name for name in names for part in parts)
        ),
        "rest",
    )


def summarize(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the minimum, median and maximum of each share over the rounds, by width and mode."""
    summaries = []
    for width, mode in dict.fromkeys((row["width"], row["mode"]) for row in rows):
        mode_rows = [row for row in rows if (row["width"], row["mode"]) == (width, mode)]
        ranges = {}
        for name in (
            "of_square",
            "of_own",
            "of_square_with_start",
            "of_square_in_engines",
            "outside_engines",
        ):
            shares = sorted(row[name] for row in mode_rows)
            ranges[name] = [shares[0], statistics.median(shares), shares[-1]]
        summaries.append({"width": width, "mode": mode, **ranges})
    return summaries


def main(arguments: list[str]) -> int:
    """Measure all cases, print them, and write the result."""
    if arguments[:1] == ["rate"]:
        dtype, precision, *size, seconds = arguments[1:]
        print(measure_product_rate(dtype, precision, *map(int, size), float(seconds)), flush=True)
        return 0
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="Sweeps per case.")
    parser.add_argument(
        "--modes", help=f"Modes to measure, separated by commas: {', '.join(MODES)}."
    )
    parser.add_argument("--widths", default="32,64,128,256", help="Widths to measure.")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="Measure one round with a tenth of the steps, only in the plan's own mode.",
    )
    options = parser.parse_args(arguments)
    share, num_rounds = (0.1, 1) if options.quick else (1.0, options.rounds)
    modes = (
        options.modes.split(",") if options.modes else list(MODES)[: 1 if options.quick else None]
    )
    widths, began = [int(width) for width in options.widths.split(",")], time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus"
        library = Path(sysconfig.get_paths()["stdlib"], "asyncio")
        command = [sys.executable, "-m", "forerun", "tokenize", library]
        command += ["--out", corpus, "--suffix", ".py"]
        measure_command(command, ENVIRONMENT, folder / "log")
        rows = [
            measure_mode(folder / f"{number}-{width}-{mode}", corpus, mode, width, share)
            for number in range(num_rounds)
            for width in widths
            for mode in modes
        ]
        profiles = [profile_bank(corpus, width, 4 if options.quick else 16) for width in widths]
    result = {
        "rounds": rows,
        "summary": summarize(rows),
        "profiles": profiles,
        "num_workers": NUM_WORKERS,
        "seconds": round(time.monotonic() - began),
        "machine": describe_machine(),
        "versions": {name: importlib.metadata.version(name) for name in ("ray", "optuna", "torch")},
    }
    write_result(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
