"""How far a whole sweep is from what the machine's cores can multiply, and what is lost where.

    python benchmarks/cpu/distance.py --json benchmarks/results/distance.json

For each width and mode, in turns: the rate of products (a large square one, and one of the model's
own sizes), on as many processes of one thread as the sweep has workers, all at once; then `forerun
sweep` on Ray. FLOPs are the finished runs' own (training, causal convention, `proxies.core.flops`),
validation not counted. The time is that of the search: from Ray's workers being there to the last
outcome, loading torch in them and waiting for one another included; and that of the whole command.
A share is of the product's rate in the mode's own arithmetic, in the same round.

Then one call of a bank is profiled in this process, by kinds of operations. It takes some 40
minutes of two cores; `--quick` takes 3.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import json
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

from process_tree import machine, measure_command, together

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
NUM_STEPS = {32: 400, 64: 200, 128: 100, 256: 50}
"""By width: about a minute of two cores each."""
NUM_WORKERS, NUM_TRIALS, SQUARE, RATE_SECONDS, ROWS = 2, 24, 1024, 2.0, 1024
MODES = {
    "as init writes it": (),
    "auto": ('proxy.num_slots="auto"', 'proxy.compiled="auto"'),
    "medium": ('proxy.matmul_precision="medium"',),
    "bfloat16": ('proxy.dtype="bfloat16"',),
}
"""Keys of the plan."""
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
"""By parts of the names of operations; what is left is element by element: norms, positions,
activations, sums."""


def product_rate(dtype: str, precision: str, *size: float) -> float:
    """FLOP/s of one product on one thread; `size`: its rows, inner side, columns, and seconds to
    take.
    """
    import torch

    rows, inner, columns, seconds = int(size[0]), int(size[1]), int(size[2]), size[3]

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision(precision)
    kind = getattr(torch, dtype)
    a, b = torch.randn(rows, inner).to(kind), torch.randn(inner, columns).to(kind)
    a @ b
    print("ready", flush=True)
    sys.stdin.readline()
    began, number = time.perf_counter(), 0
    while time.perf_counter() < began + seconds:
        a @ b
        number += 1
    return 2 * rows * inner * columns * number / (time.perf_counter() - began)


def rates(mode: str, width: int, ffn_width: int, seconds: float) -> dict[str, float]:
    """Of all cores that the sweep has, together, in the mode's arithmetic."""
    dtype = "bfloat16" if mode == "bfloat16" else "float32"
    precision = "medium" if mode == "medium" else "highest"
    sizes = {"square": (SQUARE, SQUARE, SQUARE), "own": (ROWS, width, ffn_width)}
    return {
        name: together(
            [sys.executable, __file__, "rate", dtype, precision, *size, seconds], [NUM_WORKERS]
        )[0][0]
        for name, size in sizes.items()
    }


def write_plan(path: Path, corpus: Path, width: int, num_steps: int) -> Path:
    """As `forerun init` writes it, but for the width, the steps and rates at which nothing
    diverges.
    """
    path.write_text(
        f'[data]\npath = "{corpus}"\n[proxy]\nbase_width = {width}\nnum_steps = {num_steps}\n'
        f"[search]\nnum_trials = {NUM_TRIALS}\nlearning_rate = [0.001, 0.008]\n"
        f"[transfer]\nwidths = [{width}, {2 * width}]\n[cluster]\nnum_workers = {NUM_WORKERS}\n"
    )
    return path


def swept(
    folder: Path, corpus: Path, width: int, num_steps: int, keys: tuple[str, ...]
) -> dict[str, Any]:
    """One sweep: what it did, and in what time."""
    from sweeps.store.ledger import Ledger

    folder.mkdir()
    plan = write_plan(folder / "plan.toml", corpus, width, num_steps)
    command = [sys.executable, "-m", "launcher", "sweep", plan, "--study", folder / "study"]
    command += [part for key in keys for part in ("--set", key)]
    cost = measure_command(command, ENVIRONMENT, folder / "log", mark=f"{NUM_WORKERS} workers on")
    done = max(path.stat().st_mtime for path in (folder / "study" / "curves").iterdir())
    runs = Ledger.read(folder / "study").runs()
    engine_seconds = sum(run.result.seconds for run in runs)
    return {
        "flops": sum(run.result.flops for run in runs),
        "search_seconds": done - cost.marked,
        "command_seconds": cost.seconds,
        "cpu_seconds": cost.cpu_seconds,
        "outside_engines": 1 - engine_seconds / (NUM_WORKERS * (done - cost.marked)),
        "numerics": {
            name: getattr(runs[-1].spec.numerics, name)
            for name in ("num_slots", "compiled", "num_threads")
        },
        "num_diverged": sum(run.result.status != "finished" for run in runs),
    }


def one(folder: Path, corpus: Path, mode: str, width: int, share: float) -> dict[str, Any]:
    """A sweep between two looks at the machine's rate; the better look counts."""
    looks = [rates(mode, width, 2 * width, share * RATE_SECONDS)]
    row = swept(folder, corpus, width, max(4, round(share * NUM_STEPS[width])), MODES[mode])
    looks.append(rates(mode, width, 2 * width, share * RATE_SECONDS))
    best = {name: max(look[name] for look in looks) for name in looks[0]}
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
        "square product's, "
        f"{row['of_own']:.0%} of an own product's; with all starts "
        f"{row['of_square_with_start']:.0%}; inside engines "
        f"{row['of_square_in_engines']:.0%}; outside them {row['outside_engines']:.0%} of the time",
        flush=True,
    )
    return row


@contextmanager
def named(owner: object, *names: str) -> Iterator[None]:
    """Have calls of these methods show up in a profile, under "part: NAME"."""
    from torch.profiler import record_function

    def wrapped(call: Any, name: str) -> Any:
        def inner(*args: Any, **kwargs: Any) -> Any:
            with record_function(f"part: {name}"):
                return call(*args, **kwargs)

        return inner

    before = {name: getattr(owner, name) for name in names}
    for name, call in before.items():
        setattr(owner, name, wrapped(call, name))
    yield
    for name, call in before.items():
        setattr(owner, name, call)


def profile(corpus: Path, width: int, num_steps: int) -> dict[str, Any]:
    """Where a bank's steps go, as shares of their time; and a validation over a step."""
    import torch

    from launcher.study.study_folder import plan_study
    from proxies.data.tokens import TokenStore
    from proxies.training.bank import Bank

    plan = write_plan(corpus.parent / "profile.toml", corpus, width, num_steps + 12)
    study, store = plan_study(plan, corpus.parent / "none"), TokenStore(corpus, trusted=True)
    spec = study.trial({"learning_rate": 0.002, "warmup_fraction": 0.1, "clip_norm": 1.0})
    bank = Bank(spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="adamw")
    for slot in range(spec.numerics.num_slots):
        bank.admit(slot, replace(spec, seed=slot))
    bank.advance(6)
    began = time.perf_counter()
    bank.advance(5)
    step_seconds = (time.perf_counter() - began) / 5
    with named(store, "train_batch"), named(bank.optimizer, "gather_gradients", "step"):
        began = time.perf_counter()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            bank.advance(num_steps)
            spent = time.perf_counter() - began
    began = time.perf_counter()
    bank.advance(1)
    validation_seconds = time.perf_counter() - began - step_seconds
    parts: collections.Counter[str] = collections.Counter()
    for event in seen.events() or ():
        parts[kind_of(event)] += event.self_cpu_time_total
    total = max(1e6 * spent, parts.total())
    parts["Python and autograd"] += max(0, round(total - parts.total()))
    shares = {name: value / total for name, value in parts.most_common()}
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    print(
        f"width {width:3}, a bank of {spec.numerics.num_slots}: {1e3 * step_seconds:.1f} ms a "
        f"step; {told}; "
        f"validation is {validation_seconds / step_seconds:.1f} steps",
        flush=True,
    )
    return {
        "width": width,
        "step_ms": 1e3 * step_seconds,
        "shares": shares,
        "validation_over_step": validation_seconds / step_seconds,
    }


def kind_of(event: Any) -> str:
    """What an operation of a profile is part of."""
    names, above = [event.name], event.cpu_parent
    while above is not None:
        names.append(above.name)
        above = above.cpu_parent
    if any(name.startswith("part: train_batch") for name in names):
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


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Least, median and largest share over the rounds, by width and mode."""
    found = []
    for width, mode in dict.fromkeys((row["width"], row["mode"]) for row in rows):
        mine = [row for row in rows if (row["width"], row["mode"]) == (width, mode)]
        spans = {}
        for name in (
            "of_square",
            "of_own",
            "of_square_with_start",
            "of_square_in_engines",
            "outside_engines",
        ):
            each = sorted(row[name] for row in mine)
            spans[name] = [each[0], statistics.median(each), each[-1]]
        found.append({"width": width, "mode": mode, **spans})
    return found


def main(arguments: list[str]) -> int:
    """Measure, print, write."""
    if arguments[:1] == ["rate"]:
        dtype, precision, *size, seconds = arguments[1:]
        print(product_rate(dtype, precision, *map(int, size), float(seconds)), flush=True)
        return 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--modes", help=f"Some of: {', '.join(MODES)}.")
    parser.add_argument("--widths", default="32,64,128,256")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="One round, a tenth of the steps, with the plan unchanged.",
    )
    asked = parser.parse_args(arguments)
    share, num_rounds = (0.1, 1) if asked.quick else (1.0, asked.rounds)
    modes = asked.modes.split(",") if asked.modes else list(MODES)[: 1 if asked.quick else None]
    widths, began = [int(width) for width in asked.widths.split(",")], time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = folder / "corpus"
        library = Path(sysconfig.get_paths()["stdlib"], "asyncio")
        tokenized = [
            sys.executable,
            "-m",
            "launcher",
            "tokenize",
            library,
            "--out",
            corpus,
            "--suffix",
            ".py",
        ]
        measure_command(tokenized, ENVIRONMENT, folder / "log")
        rows = [
            one(folder / f"{number}-{width}-{mode}", corpus, mode, width, share)
            for number in range(num_rounds)
            for width in widths
            for mode in modes
        ]
        profiles = [profile(corpus, width, 4 if asked.quick else 16) for width in widths]
    body = {
        "rounds": rows,
        "summary": summary(rows),
        "profiles": profiles,
        "num_workers": NUM_WORKERS,
        "seconds": round(time.monotonic() - began),
        "machine": machine(),
        "versions": {name: importlib.metadata.version(name) for name in ("ray", "optuna", "torch")},
    }
    if asked.json:
        asked.json.write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
