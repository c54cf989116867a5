"""What one GPU gives: trials a second by slots and mode, share of its bfloat16 peak, memory a slot, what is chosen.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json

Needs a CUDA device, torch, numpy, safetensors, PyYAML and `mup` (pure Python: where nothing can be installed, copy it
from any site-packages and name its place in PYTHONPATH); no Ray, no Optuna. Without a device: exit code 2.

Proxies of 2, 10 and 40 million parameters (tables not counted) at batches of 8 and 32 sequences of 512 tokens, random
ids, bfloat16 autocast. Every mode is measured in turns with one eager trial (`proxies.calibration.measure`), and its
rate is a ratio to that one's in the same rounds. References: one eager process per trial, alone and four at a time on
the device, as somebody without a bank would run them. The peak is a product of 8192 x 8192 matrices in the same run;
a product of the model's own sizes is told beside it. FLOPs are of the causal convention (`proxies.flops`).

It stops asking for modes after `--seconds`; the most telling come first, for all proxies. A file of an earlier run
keeps the proxies that this one leaves out (`--models 40M`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_runs import TRIAL_STEPS, corpus_of, run_spec
from process_tree import together

from launcher.calibration_records import Asked, Work, mode_name
from launcher.choosing import Bench, choose
from proxies.calibration import Answer, Probe, measure
from proxies.flops import count_params, flops_per_token
from proxies.spec import Numerics, RunSpec

SEQ_LEN = 512
BATCHES = (8, 32)
"""Sequences."""
MODELS = {"2M": (128, 4, 512, 4096), "10M": (256, 12, 768, 32768), "40M": (512, 12, 1536, 32768)}
"""Width, layers, feed-forward width, vocabulary."""
TARGETS = {"10M": 0.35, "40M": 0.45}
"""Of the peak, on an H200 at 32 x 512."""
ALL = {"compiled": True, "cuda_graphs": True, "fused_loss": True}
TIERS: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"num_slots": 4}, {"num_slots": 8}, ALL),
    ({"compiled": True}, {"cuda_graphs": True}, {"num_slots": 4, **ALL}, {"num_slots": 8, **ALL}),
    ({"fused_loss": True}, {"num_slots": 2}, {"num_slots": 8, "cuda_graphs": True}),
    ({"compiled": True, "cuda_graphs": True},),
    ({"dtype": "float32"}, {"dtype": "float32", "matmul_precision": "high"}),
)  # fmt: skip
"""Changes to the eager trial, the most telling first."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How much is measured, and where."""

    device: str
    plain: Numerics
    models: dict[str, tuple[int, int, int, int]]
    batches: tuple[int, ...] = BATCHES
    tiers: tuple[tuple[dict[str, Any], ...], ...] = TIERS
    seq_len: int = SEQ_LEN
    mode_seconds: float = 2.0
    square: int = 8192
    num_processes: int = 4
    num_trials: int = 64
    """That what is chosen is chosen for."""
    num_ids: int = 2**22
    seconds: float
    """After which no further mode is begun."""
    until: float = 0.0
    """The same as `time.monotonic()`, once it has begun."""


def quick(settings: Settings) -> Settings:
    """The same paths in seconds, on a CPU: for the tests."""
    return replace(
        settings, plain=Numerics(), models={"tiny": (16, 1, 32, 64)}, batches=(2,), seq_len=16, mode_seconds=0.02,
        square=64, num_processes=2, num_trials=4, num_ids=2**14, tiers=(({"num_slots": 2},), ({"fused_loss": True},)),
    )  # fmt: skip


@dataclass(kw_only=True)
class Case:
    """One proxy at one batch, and what was measured of it."""

    model: str
    batch: int
    spec: RunSpec
    bench: Bench
    processes: dict[int, dict[str, float]] = field(default_factory=dict)
    unreached: set[Numerics] = field(default_factory=set)


def make_case(settings: Settings, model: str, batch: int, corpus: Path) -> Case:
    """Nothing measured yet; a mode that is asked for too late is said to be unreached."""
    from proxies.data.tokens import TokenStore
    from proxies.torch_device import TorchDevice

    store = TokenStore(corpus, trusted=True)
    spec = run_spec(settings.models[model], settings.seq_len, batch, settings.plain, store.manifest.data_id)

    def ask(modes: tuple[Numerics, ...]) -> tuple[Answer, ...]:
        if time.monotonic() > settings.until:
            case.unreached.add(modes[-1])
            return ()
        probe = Probe(spec=spec, modes=modes, seconds=settings.mode_seconds, worker_gpus=1.0)
        return (measure(probe, lambda one: engine(one, store), TorchDevice(probe)),)

    case = Case(model=model, batch=batch, spec=spec, bench=Bench(settings.plain, ask))
    return case


def engine(spec: RunSpec, store: Any) -> Any:
    """What a worker would train this run with (`launcher.host`)."""
    if spec.numerics.num_slots == 1 and not spec.numerics.cuda_graphs:
        from proxies.solo import Solo

        return Solo(store)
    from proxies.bank import Bank

    return Bank(spec.shape, spec.batch_tokens, spec.numerics, store)


def product_flops(device: str, rows: int, inner: int, columns: int) -> float:
    """FLOP/s of a bfloat16 product of random matrices, the best of three times some."""
    import torch

    a, b = (torch.randn(*size, device=device, dtype=torch.bfloat16) for size in ((rows, inner), (inner, columns)))
    best = 0.0
    for _ in range(3):
        done = [a @ b for _ in range(2)][-1]
        done[0, 0].item()
        began = time.perf_counter()
        for _ in range(10):
            done = a @ b
        done[0, 0].item()
        best = max(best, 10 * 2 * rows * inner * columns / (time.perf_counter() - began))
    return best


def processes(settings: Settings, case: Case, corpus: Path, number: int) -> dict[str, float]:
    """So many eager processes at once: their steps a second together, and seconds until all had begun to train."""
    run = {
        "model": settings.models[case.model], "batch": case.batch, "seq_len": settings.seq_len, "corpus": str(corpus),
        "dtype": settings.plain.dtype, "seconds": 2 * settings.mode_seconds,
    }  # fmt: skip
    command = [sys.executable, Path(__file__).with_name("gpu_runs.py"), json.dumps(run)]
    rates, start_seconds = together(command, number)
    return {"trial_steps_per_second": sum(rates), "start_seconds": start_seconds} if rates else {}


def row_of(settings: Settings, case: Case, peak_flops: float) -> dict[str, Any]:
    """Everything that was measured of a case."""
    plain, spec, bench = settings.plain, case.spec, case.bench
    work = Work(num_workers=1, phases=((settings.num_trials, (TRIAL_STEPS,) * settings.num_trials),))
    asked = Asked(
        part="proxy", shape=spec.shape, batch_tokens=spec.batch_tokens, given=plain, open=("num_slots", "compiled")
    )
    chosen = choose(asked, work, bench)
    step_flops = flops_per_token(spec.shape) * spec.batch_tokens
    modes = []
    for mode in bench.modes:
        figure = bench.figure(mode, work)
        modes.append(
            {
                "mode": mode_name(mode, plain) + (f", {mode.dtype}" if mode.dtype != plain.dtype else ""),
                "num_slots": mode.num_slots,
                "refused": "not reached" if mode in case.unreached else figure.refused,
                "trial_steps_per_second": figure.trial_steps_per_second,
                "over_one_eager_trial": figure.ratio,
                "share_of_peak": figure.trial_steps_per_second * step_flops / peak_flops,
                "first_step_seconds": figure.first_seconds,
                "mib_per_slot": figure.peak_bytes / mode.num_slots / 2**20,
            }
        )
    return {
        "batch_sequences": case.batch, "params": count_params(spec.shape).total, "modes": modes,
        "params_without_tables": count_params(spec.shape).non_embedding,
        "chosen": mode_name(chosen.chosen, plain), "why": chosen.why, "processes": case.processes,
        "trials_per_hour": trials_per_hour(case, max(modes, key=lambda one: one["trial_steps_per_second"])),
    }  # fmt: skip


def trials_per_hour(case: Case, best: dict[str, Any]) -> dict[str, float]:
    """Of `TRIAL_STEPS` steps on one device: eager processes one by one, some at a time, and the best mode."""
    found = {}
    for number, one in case.processes.items():
        if one:
            seconds = TRIAL_STEPS * number / one["trial_steps_per_second"]
            found[f"{number} eager processes"] = 3600 * number / (one["start_seconds"] + seconds)
    found[f"best: {best['mode']}"] = 3600 * best["trial_steps_per_second"] / TRIAL_STEPS
    return found


def say(model: str, row: dict[str, Any]) -> None:
    """One case as text."""
    print(f"\n{model}, {row['batch_sequences']} sequences: chosen: {row['chosen']} ({row['why']})")
    print("| mode | trial-steps a second | over one eager trial | of the peak | MiB a slot | first step (s) |")
    print("|" + " --- |" * 6)
    for one in row["modes"]:
        if one["refused"]:
            print(f"| {one['mode']} | {one['refused']} | | | | |")
        else:
            print(
                f"| {one['mode']} | {one['trial_steps_per_second']:.1f} | {one['over_one_eager_trial']:.2f} | "
                f"{one['share_of_peak']:.1%} | {one['mib_per_slot']:.0f} | {one['first_step_seconds']:.1f} |"
            )
    alone = row["trials_per_hour"].get("1 eager processes", float("nan"))
    for name, rate in row["trials_per_hour"].items():
        print(f"  {name}: {rate:.1f} trials of {TRIAL_STEPS} steps an hour, {rate / alone:.1f} times one process")
    wanted = TARGETS.get(model)
    if wanted and row["batch_sequences"] == BATCHES[-1]:
        reached = max(one["share_of_peak"] for one in row["modes"])
        print(f"  aim: {wanted:.0%} of the peak; reached: {reached:.1%}", flush=True)


def measured(settings: Settings, folder: Path) -> dict[str, Any]:
    """All cases, tier by tier."""
    peak_flops = product_flops(settings.device, settings.square, settings.square, settings.square)
    places = {
        size: corpus_of(folder, size, settings.num_ids) for size in {model[3] for model in settings.models.values()}
    }
    corpora = {model: places[size] for model, (*_, size) in settings.models.items()}
    settings = replace(settings, until=time.monotonic() + settings.seconds)
    cases = [
        make_case(settings, model, batch, corpora[model]) for model in settings.models for batch in settings.batches
    ]
    for tier, changes in enumerate(settings.tiers):
        for case in cases:
            case.bench.measure(settings.plain)
            for change in changes:
                case.bench.measure(replace(settings.plain, **change))
            number = {0: 1, 1: settings.num_processes}.get(tier)
            if number and time.monotonic() < settings.until:
                case.processes[number] = processes(settings, case, corpora[case.model], number)
    models: dict[str, Any] = {}
    for case in cases:
        row = row_of(settings, case, peak_flops)
        tokens, shape = case.spec.batch_tokens, case.spec.shape
        row["own_product_share_of_peak"] = (
            product_flops(settings.device, tokens, shape.width, shape.ffn_width) / peak_flops
        )
        models.setdefault(case.model, {"peak_flops": peak_flops, "cases": []})["cases"].append(row)
        say(case.model, row)
    return models


def main(arguments: list[str]) -> int:
    """Measure, print, write; 2 where there is no device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default=",".join(MODELS), help="Some of them, as 2M,10M.")
    parser.add_argument("--seconds", type=float, default=400.0, help="After which no further mode is begun.")
    parser.add_argument("--quick", action="store_true", help="A tiny proxy, as the tests do it.")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    import torch

    if asked.device == "cuda" and not torch.cuda.is_available():
        print("needs a CUDA device; not measured", file=sys.stderr)
        return 2
    settings = Settings(
        device=asked.device, plain=Numerics(dtype="bfloat16"), seconds=asked.seconds,
        models={name: MODELS[name] for name in asked.models.split(",")},
    )  # fmt: skip
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        models = measured(quick(settings) if asked.quick else settings, Path(name))
    name = torch.cuda.get_device_name() if asked.device == "cuda" else platform.machine()
    machine = {"device": name, "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__,
               "seconds": round(time.monotonic() - began)}  # fmt: skip
    if asked.json:
        before = json.loads(asked.json.read_text())["models"] if asked.json.exists() else {}
        told = {model: {"machine": machine, **body} for model, body in models.items()}
        asked.json.write_text(json.dumps({"models": {**before, **told}}, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
