"""Losses and speed of the embedded trainer on one GPU, compared with the proxy of the same run.

    python benchmarks/gpu/gpu_trainer.py --out benchmarks/results

The models are the 40M of `gpu_modes.py` and one of 160M. Each trains for 50 steps of 32 sequences
of 512 random ids in bfloat16, from the same initial weights on the same batches: as a proxy
(`SingleTrialEngine`) and by one rank of the trainer (with a checkpoint at the end), eager and
compiled. The difference between the eager and the compiled proxy shows the effect of the order of
sums in bfloat16. The results have losses, milliseconds per step (medians from the eleventh step on)
and the share of the peak, measured as in `gpu_modes.py`.

With `--ways torchtitan` the same run is also exported and trained by one rank of torchtitan. The
script looks for a torchtitan that the export supports in the Python of FORERUN_TORCHTITAN_PYTHON,
in `.venv-trainers`, and in its own Python. If there is none, or it does not load (0.3.0 needs a
newer torch than 2.11), the result says so.

The script needs a CUDA device (exit code 2 without one), torch, numpy, safetensors, PyYAML and
`mup`, but not Ray, Optuna, W&B, pydantic or a network. It writes gpu_trainer.json after each
measurement. None starts after `--seconds`; the exit code is then 3, and the same command resumes. A
measurement that fails is recorded with its error, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpu_modes import MODELS, SEQ_LEN, measure_product_flops
from gpu_runs import ModelSize, describe_device, make_spec, write_corpus
from gpu_steps import Steps, open_results, report_exit_code, run_step

from forerun._launcher.main_run import metrics_file
from forerun._launcher.main_run.exporters import proof
from forerun._launcher.main_run.exporters.trainers import torchtitan
from forerun._launcher.main_run.frozen.frozen import (
    SCHEMA_VERSION,
    Data,
    Decision,
    Parallelism,
    PredictedLoss,
    build_groups,
    sample_learning_rate,
)
from forerun._launcher.main_run.frozen.launch_file import write_launch
from forerun._launcher.main_run.frozen.run_policies import AbortPolicy, Checkpointing
from forerun._proxies.core.flops import compute_flops_per_token
from forerun._proxies.core.spec import Numerics, RunSpec
from forerun._proxies.data.tokens import Manifest, TokenStore
from forerun._proxies.parametrization.parametrization import (
    compute_forward_numbers,
    compute_parameter_table,
)

SIZES = {
    "40M": MODELS["40M"],
    "160M": ModelSize(width=1024, num_layers=12, ffn_width=3072, vocab_size=32768),
}
"""Sizes of the models by name. At 40M the host limits the speed."""
TORCHTITAN_MAIN = Path(__file__).with_name("torchtitan_main.py")
SINGLE_RANK_ENVIRONMENT = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""Environment of a single rank, as torchrun sets it. torchrun is not used: its ranks survive it on
the GPU if it is killed."""
TIMEOUT_SECONDS = 120.0
"""Time limit of a torchtitan run in seconds, with its start and compilation."""
NUM_WARMUP_STEPS = 10
"""Steps at the start that the times leave out."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Device, models and steps of the comparison."""

    device: str = "cuda"
    backend: str = "inductor"
    """Backend of torch.compile."""
    models: tuple[str, ...] = tuple(SIZES)
    """Names of the models."""
    ways: tuple[str, ...] = ("trainer", "proxy")
    """Programs that train the run."""
    sizes: dict[str, ModelSize]
    batch: int = 32
    """Sequences per step."""
    seq_len: int = SEQ_LEN
    num_steps: int = 50
    num_ids: int = 2**22
    """Tokens of the corpus."""
    square: int = 8192
    """Rows and columns of the matrices whose product gives the device's peak."""


def shrink_settings(settings: Settings) -> Settings:
    """Return settings that take the same paths in seconds on a CPU, for the tests."""
    return replace(
        settings,
        device="cpu",
        backend="aot_eager",
        models=("tiny",),
        sizes={"tiny": ModelSize(width=16, num_layers=1, ffn_width=32, vocab_size=64)},
        batch=2,
        seq_len=16,
        num_steps=NUM_WARMUP_STEPS + 4,
        num_ids=2**14,
        square=64,
    )


def make_decision(spec: RunSpec, manifest: Manifest, *, compiled: bool) -> Decision:
    """Return the launch config of a run on one rank."""
    return Decision(
        schema_version=SCHEMA_VERSION,
        shape=spec.shape,
        base_shape=spec.base_shape,
        parametrization=spec.parametrization,
        transfer=(),
        forward=compute_forward_numbers(spec),
        groups=build_groups(compute_parameter_table(spec)),
        optimizer=spec.optimizer,
        learning_rate=sample_learning_rate(spec.schedule),
        clip_norm=spec.hparams.clip_norm,
        batch_tokens=spec.batch_tokens,
        num_tokens=int(spec.num_tokens),
        data=Data(
            data_id=spec.data_id,
            tokenizer=manifest.tokenizer,
            vocab_size=manifest.vocab_size,
            num_train_tokens=manifest.count_tokens("train"),
            weights=(),
        ),
        seed=spec.seed,
        precision="bfloat16",
        parallelism=Parallelism(data_parallel_shard=1),
        compiled=compiled,
        checkpointing=Checkpointing(every_steps=spec.schedule.num_steps),
        predicted=PredictedLoss(
            loss_nats=1.0, low_nats=0.5, high_nats=2.0, level=0.9, extrapolation=1.0
        ),
        abort=AbortPolicy(
            on_non_finite=True, train_loss_above_nats=math.log(spec.shape.vocab_size) + 1
        ),
    )


def train_proxy(settings: Settings, store: TokenStore, spec: RunSpec) -> dict[str, Any]:
    """Train a run as a proxy and return the loss in nats and the seconds of each step."""
    from forerun._proxies.training.single_trial import SingleTrialEngine

    engine = SingleTrialEngine(store, device=settings.device, compile_backend=settings.backend)
    engine.admit(0, spec)
    seconds, ended_runs = [], []
    while not ended_runs:
        began = time.perf_counter()
        ended_runs = engine.advance(1)
        seconds.append(time.perf_counter() - began)
    ((_, result, curve),) = ended_runs
    assert result.status == "finished", result.reason
    # The last step includes the validation.
    return {"losses": list(curve.train_loss_nats), "seconds": seconds[:-1]}


def train_with_trainer(settings: Settings, corpus: Path, decision: Decision) -> dict[str, Any]:
    """Train a run with one rank of the embedded trainer, in this process.

    Returns:
        Its losses in nats and the seconds of its steps.
    """
    from torch._dynamo import config as dynamo_config

    from forerun._launcher.main_run.trainer.inputs import RunOptions
    from forerun._launcher.main_run.trainer.training import run

    with tempfile.TemporaryDirectory() as name:
        config, out = write_launch(Path(name) / "frozen", decision), Path(name) / "run"
        # The trainer and the proxies set options of the compiler that exclude each other. Outside
        # of this benchmark they never run in one process.
        with dynamo_config.patch(suppress_errors=False, fail_on_recompile_limit_hit=False):
            ending = run(RunOptions(config=config, data=corpus, out=out))
        assert ending.event == "finished", ending.reason
        lines = [line for line in metrics_file.read_lines(out) if "train_loss_nats" in line]
    return {
        "losses": [line["train_loss_nats"] for line in lines],
        "seconds": [line["seconds"] for line in lines],
    }


def find_torchtitan_python() -> Path | str:
    """Return a Python that has a torchtitan of the export, or the reason why there is none."""
    if python := proof.find_interpreter("torchtitan"):
        return python
    try:
        version = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return "torchtitan is not installed"
    return (
        Path(sys.executable)
        if version in torchtitan.VERSIONS
        else f"torchtitan {version} is not {torchtitan.VERSIONS}"
    )


def train_with_torchtitan(settings: Settings, corpus: Path, decision: Decision) -> dict[str, Any]:
    """Export a run and train it with one rank of torchtitan, in its own process.

    Returns:
        Its losses in nats and the seconds of its steps, or the reason why it could not be trained.
    """
    python = find_torchtitan_python()
    if isinstance(python, str):
        return {"refused": python}
    with tempfile.TemporaryDirectory() as name:
        torchtitan.export(decision, Path(name))
        shutil.copy(TORCHTITAN_MAIN, name)
        losses_file = Path(name) / "losses.jsonl"
        command = [
            str(python),
            TORCHTITAN_MAIN.name,
            "--module",
            torchtitan.MODULE,
            "--config",
            "main_run",
            "--compile.backend",
            settings.backend,
        ]
        environment = {
            "FORERUN_DATA": str(corpus),
            "FORERUN_LOG_EVERY_STEPS": "1",
            "LOSSES": str(losses_file),
            **SINGLE_RANK_ENVIRONMENT,
        }
        process = subprocess.run(
            command,
            cwd=name,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_SECONDS,
        )
        if process.returncode:
            # An import error before the first loss means that torchtitan does not fit this machine,
            # which is a finding. Any other error is a failure of the step.
            lines = process.stderr.splitlines()
            errors = [
                line for line in lines if re.match(r"(\[rank0\]:)?\s*\w+(Error|Exception)\b", line)
            ]
            if (
                errors
                and re.search(r"\b(Import|ModuleNotFound)Error\b", errors[0])
                and not losses_file.exists()
            ):
                return {"refused": f"torchtitan does not load here: {errors[0].strip()}"}
            raise RuntimeError(
                "\n".join(
                    [f"torchtitan: exit code {process.returncode}: {errors[:1]}", *lines[-20:]]
                )
            )
        # Step, loss, gradient norm and seconds of each log
        logs = [json.loads(line) for line in losses_file.read_text().splitlines()]
    return {
        "losses": [loss for _, loss, _, _ in logs],
        "seconds": [seconds for _, _, _, seconds in logs],
    }


def start_single_rank(settings: Settings) -> None:
    """Make this process the only rank of torch.distributed.

    From then on, blocks compile with the backend of the settings.
    """
    import torch
    import torch.distributed as dist

    from forerun._proxies.model.decoder import Block

    if settings.device == "cuda":
        torch.cuda.set_device(0)
    backend = "nccl" if settings.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    Block.compile = functools.partialmethod(Block.compile, backend=settings.backend)  # type: ignore[assignment]


def measure_model(settings: Settings, steps: Steps, corpus: Path) -> None:
    """Train one model in all ways and write its results."""
    store = TokenStore(corpus, trusted=True)
    data_id, plain = store.manifest.data_id, Numerics(dtype="bfloat16")
    spec = make_spec(
        settings.sizes[steps.model],
        settings.seq_len,
        settings.batch,
        plain,
        data_id,
        num_steps=settings.num_steps,
    )
    # A low rate avoids spikes, after which losses differ for reasons other than arithmetic.
    schedule = replace(spec.schedule, warmup_steps=settings.num_steps // 5)
    spec = replace(spec, schedule=schedule, hparams=replace(spec.hparams, learning_rate=2.0**-12))
    for name, compiled in (("eager", False), ("compiled", True)):
        proxy = replace(spec, numerics=replace(plain, compiled=compiled, fused_loss=compiled))
        main_run = make_decision(spec, store.manifest, compiled=compiled)
        ways: dict[str, Callable[[], dict[str, Any]]] = {
            "trainer": partial(train_with_trainer, settings, corpus, main_run),
            "proxy": partial(train_proxy, settings, store, proxy),
            "torchtitan": partial(train_with_torchtitan, settings, corpus, main_run),
        }
        for way in settings.ways:
            steps.measure_once(f"{way}, {name}", partial(run_step, ways[way]))
    square = [settings.square] * 3
    peak = steps.measure_once(
        "peak",
        lambda: run_step(lambda: {"flops": measure_product_flops(settings.device, *square)}),
        needed=True,
    )
    steps.body["step_flops"] = compute_flops_per_token(spec.shape) * spec.batch_tokens
    steps.body["findings"] = format_findings(steps.model, steps.body, peak.get("flops"))
    steps.save()


def format_findings(model: str, body: dict[str, Any], peak_flops: float | None) -> list[str]:
    """Return a line for each way in which the model was trained."""
    steps, lines = body["steps"], []
    eager = steps.get("proxy, eager", {}).get("losses")
    for name, result in steps.items():
        if "refused" in result:
            lines.append(f"{model}, {name}: left out: {result['refused']}")
        if "losses" not in result:
            continue
        seconds = statistics.median(result["seconds"][NUM_WARMUP_STEPS:])
        peak_share = (
            f", {body['step_flops'] / seconds / peak_flops:.1%} of the peak" if peak_flops else ""
        )
        distance = ""
        if eager and result["losses"] is not eager:
            largest_difference = max(
                abs(a - b) for a, b in zip(result["losses"], eager, strict=True)
            )
            distance = (
                f"; at most {largest_difference:.2g} nats from the eager proxy in "
                f"{len(eager)} steps"
            )
        first = f"first step {result['seconds'][0]:.1f} s"
        lines.append(
            f"{model}, {name}: {1000 * seconds:.2f} ms per step{peak_share}, {first}{distance}"
        )
    return lines


def main(arguments: list[str]) -> int:
    """Measure, write and print.

    Returns:
        1 if a step failed, 2 without a device, 3 if steps are left, else 0.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="Folder of the result file.")
    parser.add_argument("--models", default=",".join(SIZES), help="Models to train, such as 40M.")
    parser.add_argument(
        "--ways", default="trainer,proxy", help="Ways to train: trainer, proxy, torchtitan."
    )
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="No step starts after this time."
    )
    parser.add_argument(
        "--quick", action="store_true", help="Train a tiny model on a CPU, as the tests do."
    )
    options = parser.parse_args(arguments)
    import torch

    if not options.quick and not torch.cuda.is_available():
        print("needs a CUDA device; not measured", file=sys.stderr)
        return 2
    settings = Settings(
        models=tuple(options.models.split(",")), ways=tuple(options.ways.split(",")), sizes=SIZES
    )
    settings = shrink_settings(settings) if options.quick else settings
    content, save = open_results(
        options.out / "gpu_trainer.json", describe_device(), settings.models
    )
    deadline = time.monotonic() + options.seconds
    all_steps = [
        Steps(model=name, body=content["models"][name], deadline=deadline, save=save)
        for name in settings.models
    ]
    start_single_rank(settings)
    with tempfile.TemporaryDirectory() as folder:
        vocab_sizes = {settings.sizes[name].vocab_size for name in settings.models}
        corpora = {
            vocab_size: write_corpus(Path(folder), vocab_size, settings.num_ids)
            for vocab_size in vocab_sizes
        }
        for steps in all_steps:
            measure_model(settings, steps, corpora[settings.sizes[steps.model].vocab_size])
    lines = [line for steps in all_steps for line in steps.body["findings"]]
    print("\n".join(lines), flush=True)
    return report_exit_code(all_steps)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
