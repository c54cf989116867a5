"""Losses and speed of the embedded trainer on one GPU, compared with the proxy of the same run.

    python benchmarks/gpu/gpu_trainer.py --out benchmarks/results

The models are the 40M of `gpu.py` and one of 160M. Each trains for 50 steps of 32 sequences of 512
random ids in bfloat16, from the same initial weights on the same batches: as a proxy (`Solo`) and
by one rank of the trainer (with a checkpoint at the end), eager and compiled. The difference
between the two proxies shows what a different order of the same sums makes in bfloat16. The
results have losses, milliseconds per step (medians from the eleventh step on) and the share of the
peak, measured as in `gpu.py`.

With `--ways torchtitan` the same run is also exported and trained by one rank of torchtitan. The
script looks for a torchtitan that the export supports in the Python of FORERUN_TORCHTITAN_PYTHON,
in `.venv-trainers`, and in its own Python. If there is none, or it does not load (0.3.0 needs a
newer torch than 2.11), the result says so.

The script needs a CUDA device (exit code 2 without one), torch, numpy, safetensors, PyYAML and
`mup`, but not Ray, Optuna, W&B, pydantic or a network. It writes gpu_trainer.json after each step.
No step starts after `--seconds`; the exit code is then 3, and the same command resumes. A step that
fails is recorded with its error, and the exit code is 1.
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

from gpu import MODELS, SEQ_LEN, Steps, attempt, exit_code, open_results, product_flops
from gpu_runs import corpus_of, machine, run_spec

from launcher.base import metrics
from launcher.base.policy import AbortPolicy, Checkpointing
from launcher.exporters import proof
from launcher.exporters.trainers import torchtitan
from launcher.frozen.frozen import (
    SCHEMA_VERSION,
    Data,
    Decision,
    Parallelism,
    PredictedLoss,
    groups_of,
    learning_rate_of,
)
from launcher.frozen.launch_file import write_launch
from proxies.core.flops import flops_per_token
from proxies.core.spec import Numerics, RunSpec
from proxies.data.tokens import Manifest, TokenStore
from proxies.parametrization.parametrization import forward_numbers, parameter_table

SIZES = {"40M": MODELS["40M"], "160M": (1024, 12, 3072, 32768)}
"""Width, layers, feed-forward width, vocabulary. At 40M the host limits the speed."""
MAIN = Path(__file__).with_name("torchtitan_main.py")
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
"""Environment of a single rank, as torchrun sets it. torchrun is not used: its ranks survive it on
the GPU if it is killed."""
LIMIT_SECONDS = 120.0
"""Time limit of a torchtitan run in seconds, with its start and compilation."""
SETTLED = 10
"""Steps at the start that the times leave out."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Device, models and steps of the comparison."""

    device: str = "cuda"
    backend: str = "inductor"
    """Backend of torch.compile."""
    models: tuple[str, ...] = tuple(SIZES)
    ways: tuple[str, ...] = ("trainer", "proxy")
    sizes: dict[str, tuple[int, int, int, int]]
    batch: int = 32
    seq_len: int = SEQ_LEN
    num_steps: int = 50
    num_ids: int = 2**22
    square: int = 8192


def quick(settings: Settings) -> Settings:
    """The same paths in seconds, on a CPU: for the tests."""
    return replace(
        settings,
        device="cpu",
        backend="aot_eager",
        models=("tiny",),
        sizes={"tiny": (16, 1, 32, 64)},
        batch=2,
        seq_len=16,
        num_steps=SETTLED + 4,
        num_ids=2**14,
        square=64,
    )


def decision_of(spec: RunSpec, manifest: Manifest, *, compiled: bool) -> Decision:
    """The launch config of the run that the spec is, on one rank."""
    return Decision(
        schema_version=SCHEMA_VERSION,
        shape=spec.shape,
        base_shape=spec.base_shape,
        parametrization=spec.parametrization,
        transfer=(),
        forward=forward_numbers(spec),
        groups=groups_of(parameter_table(spec)),
        optimizer=spec.optimizer,
        learning_rate=learning_rate_of(spec.schedule),
        clip_norm=spec.hparams.clip_norm,
        batch_tokens=spec.batch_tokens,
        num_tokens=int(spec.num_tokens),
        data=Data(
            data_id=spec.data_id,
            tokenizer=manifest.tokenizer,
            vocab_size=manifest.vocab_size,
            num_train_tokens=manifest.num_tokens("train"),
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


def by_proxy(settings: Settings, store: TokenStore, spec: RunSpec) -> dict[str, Any]:
    """Losses in nats and seconds of each step, as a proxy."""
    from proxies.training.solo import Solo

    solo, seconds, ended = (
        Solo(store, device=settings.device, compile_backend=settings.backend),
        [],
        [],
    )
    solo.admit(0, spec)
    while not ended:
        began = time.perf_counter()
        ended = solo.advance(1)
        seconds.append(time.perf_counter() - began)
    ((_, result, curve),) = ended
    assert result.status == "finished", result.reason
    # The last step's has the validation in it.
    return {"losses": list(curve.train_loss_nats), "seconds": seconds[:-1]}


def by_trainer(settings: Settings, corpus: Path, decision: Decision) -> dict[str, Any]:
    """The same by the embedded trainer: one rank of it, in this process."""
    from launcher.trainer.rank import RankOptions, run

    with tempfile.TemporaryDirectory() as name:
        config, out = write_launch(Path(name) / "frozen", decision), Path(name) / "run"
        ending = run(RankOptions(config=config, data=corpus, out=out))
        assert ending.event == "finished", ending.reason
        lines = [line for line in metrics.read(out) if "train_loss_nats" in line]
    return {
        "losses": [line["train_loss_nats"] for line in lines],
        "seconds": [line["seconds"] for line in lines],
    }


def torchtitan_python() -> Path | str:
    """A Python that has the torchtitan of the export, or why there is none."""
    if python := proof.interpreter("torchtitan"):
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


def by_torchtitan(settings: Settings, corpus: Path, decision: Decision) -> dict[str, Any]:
    """The same by torchtitan: one rank in a process of its own, which runs the export."""
    python = torchtitan_python()
    if isinstance(python, str):
        return {"refused": python}
    with tempfile.TemporaryDirectory() as name:
        torchtitan.export(decision, Path(name))
        shutil.copy(MAIN, name)
        rows = Path(name) / "losses.jsonl"
        command = [
            str(python),
            MAIN.name,
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
            "LOSSES": str(rows),
            **ALONE,
        }
        done = subprocess.run(
            command,
            cwd=name,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_SECONDS,
        )
        if done.returncode:
            lines = done.stderr.splitlines()
            errors = [
                line for line in lines if re.match(r"(\[rank0\]:)?\s*\w+(Error|Exception)\b", line)
            ]
            if (
                errors
                and re.search(r"\b(Import|ModuleNotFound)Error\b", errors[0])
                and not rows.exists()
            ):
                return {"refused": f"torchtitan does not load here: {errors[0].strip()}"}
            raise RuntimeError(
                "\n".join([f"torchtitan: exit code {done.returncode}: {errors[:1]}", *lines[-20:]])
            )
        steps = [json.loads(line) for line in rows.read_text().splitlines()]
    return {
        "losses": [loss for _, loss, _, _ in steps],
        "seconds": [seconds for _, _, _, seconds in steps],
    }


def one_rank(settings: Settings) -> None:
    """This process alone as all the ranks there are."""
    import torch
    import torch.distributed as dist

    from proxies.model.decoder import Block

    if settings.device == "cuda":
        torch.cuda.set_device(0)
    backend = "nccl" if settings.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    Block.compile = functools.partialmethod(Block.compile, backend=settings.backend)  # type: ignore[assignment]


def measure(settings: Settings, steps: Steps, corpus: Path) -> None:
    """All of one model into the file."""
    store = TokenStore(corpus, trusted=True)
    data_id, plain = store.manifest.data_id, Numerics(dtype="bfloat16")
    spec = run_spec(
        settings.sizes[steps.model],
        settings.seq_len,
        settings.batch,
        plain,
        data_id,
        num_steps=settings.num_steps,
    )
    # Calm, for losses that part after a spike are not the arithmetic's.
    calm = replace(spec.schedule, warmup_steps=settings.num_steps // 5)
    spec = replace(spec, schedule=calm, hparams=replace(spec.hparams, learning_rate=2.0**-12))
    for name, compiled in (("eager", False), ("compiled", True)):
        proxy = replace(spec, numerics=replace(plain, compiled=compiled, fused_loss=compiled))
        main_run = decision_of(spec, store.manifest, compiled=compiled)
        ways: dict[str, Callable[[], dict[str, Any]]] = {
            "trainer": partial(by_trainer, settings, corpus, main_run),
            "proxy": partial(by_proxy, settings, store, proxy),
            "torchtitan": partial(by_torchtitan, settings, corpus, main_run),
        }
        for way in settings.ways:
            steps.once(f"{way}, {name}", partial(attempt, ways[way]))
    square = [settings.square] * 3
    peak = steps.once(
        "peak",
        lambda: attempt(lambda: {"flops": product_flops(settings.device, *square)}),
        needed=True,
    )
    steps.body["step_flops"] = flops_per_token(spec.shape) * spec.batch_tokens
    steps.body["findings"] = findings(steps.model, steps.body, peak.get("flops"))
    steps.save()


def findings(model: str, body: dict[str, Any], peak_flops: float | None) -> list[str]:
    """A line for each way it was trained."""
    done, lines = body["steps"], []
    eager = done.get("proxy, eager", {}).get("losses")
    for name, one in done.items():
        if "refused" in one:
            lines.append(f"{model}, {name}: left out: {one['refused']}")
        if "losses" not in one:
            continue
        seconds = statistics.median(one["seconds"][SETTLED:])
        share = (
            f", {body['step_flops'] / seconds / peak_flops:.1%} of the peak" if peak_flops else ""
        )
        apart = ""
        if eager and one["losses"] is not eager:
            worst = max(abs(a - b) for a, b in zip(one["losses"], eager, strict=True))
            apart = f"; at most {worst:.2g} nats from the eager proxy in {len(eager)} steps"
        first = f"first step {one['seconds'][0]:.1f} s"
        lines.append(f"{model}, {name}: {1000 * seconds:.2f} ms a step{share}, {first}{apart}")
    return lines


def main(arguments: list[str]) -> int:
    """Measure, write, print; 1 where something failed, 2 where there is no device, 3 where the time
    was too short.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="Folder of the file.")
    parser.add_argument("--models", default=",".join(SIZES), help="Some of them, as 40M.")
    parser.add_argument(
        "--ways", default="trainer,proxy", help="Some of trainer, proxy, torchtitan."
    )
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="No step starts after this time."
    )
    parser.add_argument(
        "--quick", action="store_true", help="A tiny model on a CPU, as the tests do it."
    )
    asked = parser.parse_args(arguments)
    import torch

    if not asked.quick and not torch.cuda.is_available():
        print("needs a CUDA device; not measured", file=sys.stderr)
        return 2
    settings = Settings(
        models=tuple(asked.models.split(",")), ways=tuple(asked.ways.split(",")), sizes=SIZES
    )
    settings = quick(settings) if asked.quick else settings
    content, save = open_results(asked.out / "gpu_trainer.json", machine(), settings.models)
    deadline = time.monotonic() + asked.seconds
    all_steps = [
        Steps(model=name, body=content["models"][name], deadline=deadline, save=save)
        for name in settings.models
    ]
    one_rank(settings)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {settings.sizes[name][3] for name in settings.models}
        places = {size: corpus_of(Path(folder), size, settings.num_ids) for size in sizes}
        for steps in all_steps:
            measure(settings, steps, places[settings.sizes[steps.model][3]])
    lines = [line for steps in all_steps for line in steps.body["findings"]]
    print("\n".join(lines), flush=True)
    return exit_code(all_steps)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
