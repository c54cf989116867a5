"""Training speed of banks, compiled steps and plain loops on one GPU.

    python benchmarks/gpu/gpu_modes.py --json benchmarks/results/gpu_modes.json

The script measures trial-steps per second, the share of the GPU's bfloat16 peak, memory per slot,
and the mode that calibration chooses, for proxies of 1, 10 and 40 million parameters (without
embedding tables) with batches of 8 and 32 sequences of 512 random ids. `make gpu` runs it after the
tests marked `gpu`.

Each mode is measured in turns with one eager trial
(`forerun._proxies.training.calibration.measure_modes`), and its rate is a ratio to that trial's in
the same rounds. For comparison, the script also measures one eager process, four such processes
that run together, and a plain loop with torch.compile, autocast and fused AdamW. The peak is that
of a product of 8192 x 8192 matrices in the same run. The result also has the rate of a product of
the model's own sizes. FLOPs follow the causal convention (`forerun._proxies.core.flops`).

The most important modes come first, for all proxies. No step (one mode, or one set of processes)
starts after `--seconds` (400 by default); the exit code is then 3, and the same command resumes.
The file is written after each step. Steps that were measured with another device, torch, Python or
source are measured again; to measure all steps again, remove the file. Proxies that a call leaves
out (`--models 40M`) stay in the file.

The script needs a CUDA device (exit code 2 without one), torch, numpy, safetensors, PyYAML and
`mup` (pure Python: where nothing can be installed, copy it from any site-packages and put its
folder on PYTHONPATH). It does not need Ray, Optuna, W&B or pydantic.
"""

from __future__ import annotations

import argparse
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

from gpu_runs import (
    TRIAL_STEPS,
    ModelSize,
    describe_device,
    make_engine,
    make_spec,
    write_corpus,
)
from gpu_steps import Steps, open_results, report_exit_code, run_step
from process_tree import run_together

from forerun._launcher.study.calibration.mode_choice import ModeMeasurements, choose_mode
from forerun._launcher.study.plan.calibration_records import ModeRequest, PlannedWork, describe_mode
from forerun._proxies.core import canon
from forerun._proxies.core.flops import compute_flops_per_token, count_params
from forerun._proxies.core.spec import Numerics, RunSpec
from forerun._proxies.training.calibration import CalibrationProbe, CalibrationResult, measure_modes

SEQ_LEN = 512
BATCHES = (8, 32)
"""Sequences per step."""
MODELS = {
    "1M": ModelSize(width=128, num_layers=4, ffn_width=512, vocab_size=4096),
    "10M": ModelSize(width=256, num_layers=12, ffn_width=768, vocab_size=32768),
    "40M": ModelSize(width=512, num_layers=12, ffn_width=1536, vocab_size=32768),
}
TARGETS = {"10M": 0.35, "40M": 0.45}
"""Share of an H200's peak that the fastest mode of a model should reach, at 32 sequences of 512
tokens.
"""
ALL_ON = {"compiled": True, "cuda_graphs": True, "fused_loss": True}
"""Changes to the eager trial with every speedup on."""
TIERS: tuple[tuple[dict[str, Any], ...], ...] = (
    (ALL_ON,),
    ({"num_slots": 4}, {"num_slots": 8}, {"num_slots": 4, **ALL_ON}),
    ({"compiled": True}, {"cuda_graphs": True}, {"num_slots": 8, **ALL_ON}),
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
    """Mode of the eager trial that the other modes are compared with."""
    models: dict[str, ModelSize]
    batches: tuple[int, ...] = BATCHES
    tiers: tuple[tuple[dict[str, Any], ...], ...] = TIERS
    seq_len: int = SEQ_LEN
    mode_seconds: float = 2.0
    """Time limit of one measurement, in seconds."""
    square: int = 8192
    """Rows and columns of the matrices whose product gives the device's peak."""
    num_processes: int = 4
    """Number of eager processes that run together."""
    num_trials: int = 64
    """Trials of the planned search for which calibration chooses a mode."""
    num_ids: int = 2**22
    """Tokens of the corpus."""
    seconds: float
    """Time limit for starting new steps, in seconds."""


def shrink_settings(settings: Settings) -> Settings:
    """Return settings that take the same paths in seconds on a CPU, for the tests."""
    return replace(
        settings,
        device="cpu",
        plain=Numerics(),
        models={"tiny": ModelSize(width=16, num_layers=1, ffn_width=32, vocab_size=64)},
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
class Case:
    """One proxy at one batch size, with its results."""

    model: str
    batch: int
    """Sequences per step."""
    spec: RunSpec
    measurements: ModeMeasurements
    """Results of the modes."""
    steps: Steps
    processes: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Results of eager processes that ran together, by their number."""
    plain_loop: dict[str, Any] = field(default_factory=dict)
    """Result of the plain loop."""
    unreached: set[Numerics] = field(default_factory=set)
    """Modes that were asked for after the deadline."""


def make_case(settings: Settings, steps: Steps, batch: int, corpus: Path) -> Case:
    """Return a case whose modes are measured when they are first asked for.

    A mode that is asked for after the deadline is recorded as unreached.
    """
    from forerun._proxies.data.tokens import TokenStore
    from forerun._proxies.training.torch_device import TorchDevice

    store = TokenStore(corpus, trusted=True)
    spec = make_spec(
        settings.models[steps.model],
        settings.seq_len,
        batch,
        settings.plain,
        store.manifest.data_id,
    )

    def measure_modes_once(modes: tuple[Numerics, ...]) -> tuple[CalibrationResult, ...]:
        probe = CalibrationProbe(
            spec=spec, modes=modes, seconds=settings.mode_seconds, worker_gpus=1.0
        )
        names = " | ".join(format_mode(mode, settings.plain) for mode in modes)
        answer = steps.measure_once(
            f"{batch} sequences, {names}",
            lambda: canon.to_json(
                measure_modes(probe, lambda run: make_engine(run, store), TorchDevice(probe))
            ),
        )
        if answer is None:
            case.unreached.add(modes[-1])
            return ()
        return (canon.decode(CalibrationResult, answer),)

    case = Case(
        model=steps.model,
        batch=batch,
        spec=spec,
        measurements=ModeMeasurements(settings.plain, measure_modes_once),
        steps=steps,
    )
    return case


def format_mode(mode: Numerics, plain: Numerics) -> str:
    """Return a mode in words, with its dtype if that differs from the eager trial's."""
    return describe_mode(mode, plain) + (f", {mode.dtype}" if mode.dtype != plain.dtype else "")


def measure_product_flops(device: str, rows: int, inner: int, columns: int) -> float:
    """Return the FLOP/s of a bfloat16 product of random matrices, the best of three times."""
    import torch

    a, b = (
        torch.randn(*size, device=device, dtype=torch.bfloat16)
        for size in ((rows, inner), (inner, columns))
    )
    best = 0.0
    for _ in range(3):
        # Warm up, and wait for the device: `item` returns after the product is computed.
        for _ in range(2):
            product = a @ b
        product[0, 0].item()
        began = time.perf_counter()
        for _ in range(10):
            product = a @ b
        product[0, 0].item()
        best = max(best, 10 * 2 * rows * inner * columns / (time.perf_counter() - began))
    return best


def measure_processes(
    settings: Settings,
    model: str,
    batch: int,
    corpus: Path,
    numbers: Sequence[int],
    numerics: Numerics | None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Train one trial in each of several processes, which run together.

    Args:
        settings: Settings of the measurement.
        model: Name of the model.
        batch: Sequences per step.
        corpus: Folder of the corpus.
        numbers: Numbers of processes to measure, one after another.
        numerics: Mode of the trials; None for the plain loop.
        environment: Variables that are added to the environment of the processes.

    Returns:
        For each of `numbers`, the trial-steps per second of that many processes together; and the
        seconds until all of them trained.

    Raises:
        RuntimeError: A process failed.
    """
    run = {
        "model": settings.models[model],
        "batch": batch,
        "seq_len": settings.seq_len,
        "corpus": str(corpus),
        "numerics": None if numerics is None else canon.to_json(numerics),
        "seconds": 2 * settings.mode_seconds,
    }
    command = [sys.executable, Path(__file__).with_name("gpu_runs.py"), json.dumps(run)]
    rates, start_seconds = run_together(command, numbers, environment=environment)
    return {"trial_steps_per_second": rates, "start_seconds": start_seconds}


def make_row(settings: Settings, case: Case, peak_flops: float) -> dict[str, Any]:
    """Return all results of a case."""
    eager, spec, measurements = settings.plain, case.spec, case.measurements
    work = PlannedWork(
        kinds=("",), phases=((settings.num_trials, (TRIAL_STEPS,) * settings.num_trials),)
    )
    request = ModeRequest(
        part="proxy",
        shape=spec.shape,
        batch_tokens=spec.batch_tokens,
        given=eager,
        open=("num_slots", "compiled"),
    )
    chosen = choose_mode(request, work, measurements)
    step_flops = compute_flops_per_token(spec.shape) * spec.batch_tokens
    (loop_rate,) = case.plain_loop.get("trial_steps_per_second", [0.0])
    modes = []
    for mode in measurements.modes:
        timing = measurements.make_mode_timing(mode, work)
        modes.append(
            {
                "mode": format_mode(mode, eager),
                "num_slots": mode.num_slots,
                "refused": "not reached" if mode in case.unreached else timing.refused,
                "trial_steps_per_second": timing.trial_steps_per_second,
                "over_one_eager_trial": timing.ratio,
                "share_of_peak": timing.trial_steps_per_second * step_flops / peak_flops,
                "first_step_seconds": timing.first_seconds,
                "mib_per_slot": timing.peak_bytes / mode.num_slots / 2**20,
            }
        )
    return {
        "batch_sequences": case.batch,
        "params": count_params(spec.shape).total,
        "modes": modes,
        "params_without_tables": count_params(spec.shape).non_embedding,
        "plain_loop": {
            "steps_per_second": loop_rate,
            "share_of_peak": loop_rate * step_flops / peak_flops,
        },
        "chosen": describe_mode(chosen.chosen, eager),
        "why": chosen.why,
        "processes": case.processes,
        "trials_per_hour": compute_trials_per_hour(
            case, max(modes, key=lambda mode: mode["trial_steps_per_second"])
        ),
    }


def compute_trials_per_hour(case: Case, best_mode: dict[str, Any]) -> dict[str, float]:
    """Return the trials of `TRIAL_STEPS` steps that one device trains per hour.

    The result has them for each number of eager processes, and for the best mode.
    """
    rates = {}
    for number, result in case.processes.items():
        if "error" not in result:
            seconds = TRIAL_STEPS * number / result["trial_steps_per_second"][0]
            rates[f"{number} eager processes"] = 3600 * number / (result["start_seconds"] + seconds)
    rates[f"best: {best_mode['mode']}"] = 3600 * best_mode["trial_steps_per_second"] / TRIAL_STEPS
    return rates


def print_case(model: str, row: dict[str, Any]) -> None:
    """Print the results of one case: a table of modes, and lines of comparisons below it."""
    print(f"\n{model}, {row['batch_sequences']} sequences: chosen: {row['chosen']} ({row['why']})")
    print(
        "| mode | trial-steps per second | ratio to one eager trial | share of the peak "
        "| MiB per slot | first step (s) |"
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
    single_rate = row["trials_per_hour"].get("1 eager processes", float("nan"))
    for name, rate in row["trials_per_hour"].items():
        print(
            f"  {name}: {rate:.1f} trials of {TRIAL_STEPS} steps per hour, "
            f"{rate / single_rate:.1f} times "
            "one process"
        )
    target = TARGETS.get(model)
    if target and row["batch_sequences"] == BATCHES[-1]:
        best_share = max(mode["share_of_peak"] for mode in row["modes"])
        print(f"  aim: {target:.0%} of the peak; reached: {best_share:.1%}", flush=True)


def start_steps(
    settings: Settings, folder: Path, content: dict[str, Any], save: Callable[[], None]
) -> tuple[list[Steps], dict[str, Path]]:
    """Return the steps of all models, and each model's corpus, which is written below `folder`."""
    corpora_by_vocab_size = {
        vocab_size: write_corpus(folder, vocab_size, settings.num_ids)
        for vocab_size in {size.vocab_size for size in settings.models.values()}
    }
    corpora = {
        model: corpora_by_vocab_size[size.vocab_size] for model, size in settings.models.items()
    }
    deadline = time.monotonic() + settings.seconds
    all_steps = [
        Steps(model=model, body=content["models"][model], deadline=deadline, save=save)
        for model in settings.models
    ]
    return all_steps, corpora


def measure_all(
    settings: Settings, folder: Path, content: dict[str, Any], save: Callable[[], None]
) -> list[Steps]:
    """Measure all cases, tier by tier, and write them into the content of the result file."""
    all_steps, corpora = start_steps(settings, folder, content, save)
    cases = [
        make_case(settings, steps, batch, corpora[steps.model])
        for steps in all_steps
        for batch in settings.batches
    ]
    for tier, changes in enumerate(settings.tiers):
        for case in cases:
            case.measurements.measure(settings.plain)
            if tier == 0:
                case.plain_loop = (
                    measure_reference(settings, case, corpora[case.model], "plain loop", 1, None)
                    or {}
                )
            for change in changes:
                case.measurements.measure(replace(settings.plain, **change))
            # One process is measured after the modes of the second tier, several after the third's.
            if number := {1: 1, 2: settings.num_processes}.get(tier):
                name = f"{number} processes"
                if result := measure_reference(
                    settings, case, corpora[case.model], name, number, settings.plain
                ):
                    case.processes[number] = result
    for steps in all_steps:
        square = (settings.square,) * 3
        peak_flops = steps.measure_once(
            "peak",
            lambda square=square: measure_product_flops(settings.device, *square),
            needed=True,
        )
        measured_cases = [
            case for case in cases if case.steps is steps and settings.plain not in case.unreached
        ]
        rows = [report_case(settings, case, peak_flops) for case in measured_cases]
        steps.body |= {"peak_flops": peak_flops, "cases": rows}
        save()
    return all_steps


def measure_reference(
    settings: Settings, case: Case, corpus: Path, name: str, number: int, numerics: Numerics | None
) -> dict[str, Any] | None:
    """Measure a number of processes together; return None if the deadline has passed.

    Without numerics, each process trains the plain loop.
    """
    run = partial(measure_processes, settings, case.model, case.batch, corpus, [number], numerics)
    result: dict[str, Any] | None = case.steps.measure_once(
        f"{case.batch} sequences, {name}", lambda: run_step(run)
    )
    return result


def report_case(settings: Settings, case: Case, peak_flops: float) -> dict[str, Any]:
    """Print and return all results of a case."""
    row = make_row(settings, case, peak_flops)
    sizes = (case.spec.batch_tokens, case.spec.shape.width, case.spec.shape.ffn_width)
    own_product_flops = case.steps.measure_once(
        f"{case.batch} sequences, own product",
        lambda: measure_product_flops(settings.device, *sizes),
        needed=True,
    )
    row["own_product_share_of_peak"] = own_product_flops / peak_flops
    print_case(case.model, row)
    return row


MeasureModels = Callable[[Settings, Path, dict[str, Any], Callable[[], None]], list[Steps]]
"""Function of the settings, a folder for corpora, the file's content and its writer."""


def main(
    arguments: list[str],
    measure_models: MeasureModels = measure_all,
    description: str | None = __doc__,
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
    options = parser.parse_args(arguments)
    import torch

    if not options.quick and not torch.cuda.is_available():
        print("needs a CUDA device; not measured", file=sys.stderr)
        return 2
    settings = Settings(
        device="cuda",
        plain=Numerics(dtype="bfloat16"),
        seconds=options.seconds,
        models={name: MODELS[name] for name in options.models.split(",")},
        batches=tuple(map(int, options.batches.split(","))),
    )
    settings = shrink_settings(settings) if options.quick else settings
    content, save = open_results(options.json, describe_device(), list(settings.models))
    with tempfile.TemporaryDirectory() as name:
        return report_exit_code(measure_models(settings, Path(name), content, save))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
