"""Training rates on one GPU, by slots and mode.

    python benchmarks/gpu/gpu.py --json benchmarks/results/gpu.json

It measures trial-steps per second, the share of the GPU's bfloat16 peak, memory per slot, and the
mode that calibration chooses. `make gpu` runs it after the tests marked `gpu`.

Needs a CUDA device, torch, numpy, safetensors, PyYAML and `mup` (pure Python: where nothing can be
installed, copy it from any site-packages and name its place in PYTHONPATH); no Ray, Optuna, W&B,
pydantic. Without a device: exit code 2.

Proxies of 1, 10 and 40 million parameters (tables not counted) at batches of 8 and 32 sequences of
512 tokens, random ids, bfloat16. Every mode is measured in turns with one eager trial
(`proxies.training.calibration.measure`), and its rate is a ratio to that one's in the same rounds.
References: one eager process per trial, alone and four at a time on the device, as somebody without
a bank would run them; and a plain loop, compiled, with autocast and fused AdamW. The peak is a
product of 8192 x 8192 matrices in the same run; a product of the model's own sizes is told beside
it. FLOPs are of the causal convention (`proxies.core.flops`).

The most telling modes come first, for all proxies. No step (one mode, or one set of processes) is
begun after `--seconds`: the exit code is then 3, and the same command resumes. The file is written
after each step, so a killed call loses one step. Steps of another device, torch, Python or source
are measured again; to measure all again, remove the file. Proxies that a call leaves out (`--models
40M`) stay in it.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_runs import TRIAL_STEPS, corpus_of, engine, machine, run_spec, write
from process_tree import together

from launcher.calibration.mode_choice import Bench, choose
from launcher.plan.calibration_records import ModeRequest, PlannedWork, mode_name
from proxies.core import canon
from proxies.core.flops import count_params, flops_per_token
from proxies.core.spec import Numerics, RunSpec
from proxies.training.calibration import Answer, CalibrationProbe, measure

SEQ_LEN = 512
BATCHES = (8, 32)
"""Sequences per step."""
MODELS = {"1M": (128, 4, 512, 4096), "10M": (256, 12, 768, 32768), "40M": (512, 12, 1536, 32768)}
"""Width, layers, feed-forward width, vocabulary."""
TARGETS = {"10M": 0.35, "40M": 0.45}
"""Aims by model: share of the peak on an H200 at 32 sequences of 512 tokens."""
ALL = {"compiled": True, "cuda_graphs": True, "fused_loss": True}
TIERS: tuple[tuple[dict[str, Any], ...], ...] = (
    (ALL,),
    ({"num_slots": 4}, {"num_slots": 8}, {"num_slots": 4, **ALL}),
    ({"compiled": True}, {"cuda_graphs": True}, {"num_slots": 8, **ALL}),
    ({"fused_loss": True}, {"num_slots": 2}, {"num_slots": 8, "cuda_graphs": True}),
    ({"compiled": True, "cuda_graphs": True},),
    ({"dtype": "float32"}, {"dtype": "float32", "matmul_precision": "high"}),
)
"""Modes to measure, as changes to the eager trial, the most important first."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Device, models, modes and time limits of the measurement."""

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
    """Trials of the planned search for which calibration chooses a mode."""
    num_ids: int = 2**22
    seconds: float
    """Time limit for starting new steps, in seconds."""


def quick(settings: Settings) -> Settings:
    """Return settings that take the same paths in seconds on a CPU, for the tests."""
    return replace(
        settings,
        device="cpu",
        plain=Numerics(),
        models={"tiny": (16, 1, 32, 64)},
        batches=(2,),
        seq_len=16,
        mode_seconds=0.02,
        square=64,
        num_processes=2,
        num_trials=4,
        num_ids=2**14,
        tiers=(({"num_slots": 2},), ({"fused_loss": True},), ()),
    )


@dataclass(kw_only=True)
class Steps:
    """Results of one proxy, step by step, from this call and earlier ones."""

    model: str
    body: dict[str, Any]
    """The proxy's part of the file: `steps` by name, and the `seconds` that they took."""
    deadline: float
    """Time on `time.monotonic()` after which no step starts."""
    save: Callable[[], None]
    """Function that writes the file."""
    finished: bool = True
    failures: list[str] = field(default_factory=list)
    """A line for each requested step that failed, in this call or an earlier one."""

    def once(self, name: str, measure_step: Callable[[], Any], *, needed: bool = False) -> Any:
        """Return a step's figures as JSON, and measure them unless the file has them.

        A step that is not `needed` returns None after the deadline.
        """
        done = self.body.setdefault("steps", {})
        if name not in done:
            if not needed and time.monotonic() > self.deadline:
                self.finished = False
                return None
            start = time.monotonic()
            done[name] = measure_step()
            self.body["seconds"] = self.body.get("seconds", 0.0) + time.monotonic() - start
            self.save()
            print(f"measured: {self.model}, {name}", flush=True)
        if isinstance(done[name], dict) and "error" in done[name]:
            self.failures.append(
                f"{self.model}, {name}: FAILED: {done[name]['error'].splitlines()[0]}"
            )
        return done[name]


def exit_code(all_steps: Sequence[Steps]) -> int:
    """Print the failures and return 1 if there are any, 3 if steps are left, else 0."""
    failures = [line for steps in all_steps for line in steps.failures]
    if failures:
        print("\n".join(failures), flush=True)
        return 1
    if all(steps.finished for steps in all_steps):
        return 0
    print("not finished within --seconds: run the same command again to resume", file=sys.stderr)
    return 3


@dataclass(kw_only=True)
class Case:
    """One proxy at one batch size, with its results."""

    model: str
    batch: int
    spec: RunSpec
    bench: Bench
    steps: Steps
    processes: dict[int, dict[str, Any]] = field(default_factory=dict)
    plain_loop: dict[str, Any] = field(default_factory=dict)
    unreached: set[Numerics] = field(default_factory=set)


def make_case(settings: Settings, steps: Steps, batch: int, corpus: Path) -> Case:
    """A mode is measured when it is first asked for; one that is asked for too late is said to be
    unreached.
    """
    from proxies.data.tokens import TokenStore
    from proxies.training.torch_device import TorchDevice

    store = TokenStore(corpus, trusted=True)
    spec = run_spec(
        settings.models[steps.model],
        settings.seq_len,
        batch,
        settings.plain,
        store.manifest.data_id,
    )

    def ask(modes: tuple[Numerics, ...]) -> tuple[Answer, ...]:
        probe = CalibrationProbe(
            spec=spec, modes=modes, seconds=settings.mode_seconds, worker_gpus=1.0
        )
        names = " | ".join(name_of(mode, settings.plain) for mode in modes)
        answer = steps.once(
            f"{batch} sequences, {names}",
            lambda: canon.to_json(
                measure(probe, lambda run: engine(run, store), TorchDevice(probe))
            ),
        )
        if answer is None:
            case.unreached.add(modes[-1])
            return ()
        return (canon.decode(Answer, answer),)

    case = Case(
        model=steps.model, batch=batch, spec=spec, bench=Bench(settings.plain, ask), steps=steps
    )
    return case


def name_of(mode: Numerics, plain: Numerics) -> str:
    """A mode in words, its dtype included where it differs from the plain one's."""
    return mode_name(mode, plain) + (f", {mode.dtype}" if mode.dtype != plain.dtype else "")


def product_flops(device: str, rows: int, inner: int, columns: int) -> float:
    """FLOP/s of a bfloat16 product of random matrices, the best of three times some."""
    import torch

    a, b = (
        torch.randn(*size, device=device, dtype=torch.bfloat16)
        for size in ((rows, inner), (inner, columns))
    )
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


def processes(
    settings: Settings,
    model: str,
    batch: int,
    corpus: Path,
    numbers: Sequence[int],
    numerics: Numerics | None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Processes of a trial each, of a plain loop each without numerics: for each of `numbers`, the
    trial-steps a second of so many at once, together; and seconds until all had begun to train.

    Raises:
        RuntimeError: one of them failed.
    """
    run = {
        "model": settings.models[model],
        "batch": batch,
        "seq_len": settings.seq_len,
        "corpus": str(corpus),
        "numerics": numerics and canon.to_json(numerics),
        "seconds": 2 * settings.mode_seconds,
    }
    command = [sys.executable, Path(__file__).with_name("gpu_runs.py"), json.dumps(run)]
    rates, start_seconds = together(command, numbers, environment=environment)
    return {"trial_steps_per_second": rates, "start_seconds": start_seconds}


def attempt(measure_step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a measurement, or its error, and free the device's memory."""
    import torch

    try:
        return measure_step()
    except Exception as error:  # the other steps still run
        return {"error": f"{type(error).__name__}: {error}"[:2000]}
    finally:
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def row_of(settings: Settings, case: Case, peak_flops: float) -> dict[str, Any]:
    """Return all results of a case."""
    plain, spec, bench = settings.plain, case.spec, case.bench
    work = PlannedWork(
        kinds=("",), phases=((settings.num_trials, (TRIAL_STEPS,) * settings.num_trials),)
    )
    asked = ModeRequest(
        part="proxy",
        shape=spec.shape,
        batch_tokens=spec.batch_tokens,
        given=plain,
        open=("num_slots", "compiled"),
    )
    chosen = choose(asked, work, bench)
    step_flops = flops_per_token(spec.shape) * spec.batch_tokens
    (loop,) = case.plain_loop.get("trial_steps_per_second", [0.0])
    modes = []
    for mode in bench.modes:
        figure = bench.figure(mode, work)
        modes.append(
            {
                "mode": name_of(mode, plain),
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
        "batch_sequences": case.batch,
        "params": count_params(spec.shape).total,
        "modes": modes,
        "params_without_tables": count_params(spec.shape).non_embedding,
        "plain_loop": {"steps_per_second": loop, "share_of_peak": loop * step_flops / peak_flops},
        "chosen": mode_name(chosen.chosen, plain),
        "why": chosen.why,
        "processes": case.processes,
        "trials_per_hour": trials_per_hour(
            case, max(modes, key=lambda mode: mode["trial_steps_per_second"])
        ),
    }


def trials_per_hour(case: Case, best: dict[str, Any]) -> dict[str, float]:
    """Return trials of `TRIAL_STEPS` steps per hour on one device, for eager processes (one or
    several at a time) and for the best mode.
    """
    rates = {}
    for number, result in case.processes.items():
        if "error" not in result:
            seconds = TRIAL_STEPS * number / result["trial_steps_per_second"][0]
            rates[f"{number} eager processes"] = 3600 * number / (result["start_seconds"] + seconds)
    rates[f"best: {best['mode']}"] = 3600 * best["trial_steps_per_second"] / TRIAL_STEPS
    return rates


def say(model: str, row: dict[str, Any]) -> None:
    """Print one case."""
    print(f"\n{model}, {row['batch_sequences']} sequences: chosen: {row['chosen']} ({row['why']})")
    print(
        "| mode | trial-steps a second | over one eager trial | of the peak | MiB a slot | first "
        "step (s) |"
    )
    print("|" + " --- |" * 6)
    for mode in row["modes"]:
        if mode["refused"]:
            print(f"| {mode['mode']} | {mode['refused']} | | | | |")
        else:
            print(
                f"| {mode['mode']} | {mode['trial_steps_per_second']:.1f} | "
                f"{mode['over_one_eager_trial']:.2f} | "
                f"{mode['share_of_peak']:.1%} | {mode['mib_per_slot']:.0f} | "
                f"{mode['first_step_seconds']:.1f} |"
            )
    if (loop := row["plain_loop"])["steps_per_second"]:
        print(
            f"  a plain compiled loop: {loop['steps_per_second']:.1f} steps/s, "
            f"{loop['share_of_peak']:.1%} of the peak"
        )
    alone = row["trials_per_hour"].get("1 eager processes", float("nan"))
    for name, rate in row["trials_per_hour"].items():
        print(
            f"  {name}: {rate:.1f} trials of {TRIAL_STEPS} steps an hour, {rate / alone:.1f} times "
            "one process"
        )
    target = TARGETS.get(model)
    if target and row["batch_sequences"] == BATCHES[-1]:
        reached = max(mode["share_of_peak"] for mode in row["modes"])
        print(f"  aim: {target:.0%} of the peak; reached: {reached:.1%}", flush=True)


def start_steps(
    settings: Settings, folder: Path, file: dict[str, Any], save: Callable[[], None]
) -> tuple[list[Steps], dict[str, Path]]:
    """Return the steps of all models, and each model's corpus."""
    places = {
        size: corpus_of(folder, size, settings.num_ids)
        for size in {model[3] for model in settings.models.values()}
    }
    corpora = {model: places[size] for model, (*_, size) in settings.models.items()}
    deadline = time.monotonic() + settings.seconds
    all_steps = [
        Steps(model=model, body=file["models"][model], deadline=deadline, save=save)
        for model in settings.models
    ]
    return all_steps, corpora


def measure_all(
    settings: Settings, folder: Path, file: dict[str, Any], save: Callable[[], None]
) -> list[Steps]:
    """Measure all cases, tier by tier, and write them into the file."""
    all_steps, corpora = start_steps(settings, folder, file, save)
    cases = [
        make_case(settings, steps, batch, corpora[steps.model])
        for steps in all_steps
        for batch in settings.batches
    ]
    for tier, changes in enumerate(settings.tiers):
        for case in cases:
            case.bench.measure(settings.plain)
            if tier == 0:
                case.plain_loop = (
                    reference(settings, case, corpora[case.model], "plain loop", 1, None) or {}
                )
            for change in changes:
                case.bench.measure(replace(settings.plain, **change))
            if number := {1: 1, 2: settings.num_processes}.get(tier):
                name = f"{number} processes"
                if result := reference(
                    settings, case, corpora[case.model], name, number, settings.plain
                ):
                    case.processes[number] = result
    for steps in all_steps:
        square = (settings.square,) * 3
        peak_flops = steps.once(
            "peak", lambda square=square: product_flops(settings.device, *square), needed=True
        )
        measured_cases = [
            case for case in cases if case.steps is steps and settings.plain not in case.unreached
        ]
        rows = [report_case(settings, case, peak_flops) for case in measured_cases]
        steps.body |= {"peak_flops": peak_flops, "cases": rows}
        save()
    return all_steps


def reference(
    settings: Settings, case: Case, corpus: Path, name: str, number: int, numerics: Numerics | None
) -> dict[str, Any] | None:
    """Measure a number of processes at a time; return None if it is too late."""
    run = partial(processes, settings, case.model, case.batch, corpus, [number], numerics)
    result: dict[str, Any] | None = case.steps.once(
        f"{case.batch} sequences, {name}", lambda: attempt(run)
    )
    return result


def report_case(settings: Settings, case: Case, peak_flops: float) -> dict[str, Any]:
    """Print and return all results of a case."""
    row = row_of(settings, case, peak_flops)
    sizes = (case.spec.batch_tokens, case.spec.shape.width, case.spec.shape.ffn_width)
    own = case.steps.once(
        f"{case.batch} sequences, own product",
        lambda: product_flops(settings.device, *sizes),
        needed=True,
    )
    row["own_product_share_of_peak"] = own / peak_flops
    say(case.model, row)
    return row


def open_results(
    path: Path | None, here: dict[str, Any], models: Sequence[str]
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return the file's content and a function that writes it.

    Steps of these models are dropped if they were measured on another machine.
    """
    content = json.loads(path.read_text()) if path and path.exists() else {"models": {}}
    for model in models:
        if content["models"].get(model, {}).get("machine") != here:
            content["models"][model] = {"machine": here}

    def save() -> None:
        if path:
            write(path, content)

    return content, save


Measured = Callable[[Settings, Path, dict[str, Any], Callable[[], None]], list[Steps]]
"""Function of the settings, a folder for corpora, the file's content and its writer."""


def main(
    arguments: list[str], measure_models: Measured = measure_all, description: str | None = __doc__
) -> int:
    """Measure, print and write the results.

    Returns:
        1 if a step failed, 2 without a device, 3 if steps are left, else 0.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default=",".join(MODELS), help="Models, such as 1M,10M.")
    parser.add_argument(
        "--batches",
        default=",".join(map(str, BATCHES)),
        help="Sequences per step, such as 32 or 32,8.",
    )
    parser.add_argument(
        "--seconds", type=float, default=400.0, help="No step starts after this time."
    )
    parser.add_argument("--quick", action="store_true", help="Run a tiny proxy, as the tests do.")
    asked = parser.parse_args(arguments)
    import torch

    if not asked.quick and not torch.cuda.is_available():
        print("needs a CUDA device; not measured", file=sys.stderr)
        return 2
    settings = Settings(
        device="cuda",
        plain=Numerics(dtype="bfloat16"),
        seconds=asked.seconds,
        models={name: MODELS[name] for name in asked.models.split(",")},
        batches=tuple(map(int, asked.batches.split(","))),
    )
    settings = quick(settings) if asked.quick else settings
    content, save = open_results(asked.json, machine(), list(settings.models))
    with tempfile.TemporaryDirectory() as name:
        return exit_code(measure_models(settings, Path(name), content, save))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
