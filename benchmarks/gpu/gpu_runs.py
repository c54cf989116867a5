"""One training run in a process of its own, and helpers that the GPU benchmarks share.

    python benchmarks/gpu/gpu_runs.py REQUEST

`gpu_modes.py` and `gpu_workers.py` run this program. REQUEST is a JSON object with the keys
"model", "batch", "seq_len", "corpus", "numerics" and "seconds"; numerics of null ask for the plain
loop. The program prints "ready" after its first steps. For every line that it reads it trains for
"seconds" and prints its steps per second.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from forerun._proxies.core import canon
from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Numerics, RunSpec

ROOT = Path(__file__).resolve().parents[2]


class ModelSize(NamedTuple):
    """Sizes of a proxy that a benchmark trains."""

    width: int
    num_layers: int
    ffn_width: int
    vocab_size: int


TRIAL_STEPS = 2000
"""Steps of a trial when trials per hour are computed."""
ENDLESS_STEPS, FIRST_STEPS = 10**6, 3
"""Steps of a schedule that never ends here, and steps before a run is timed."""


def make_spec(
    model: ModelSize,
    seq_len: int,
    batch: int,
    numerics: Numerics,
    data_id: str,
    num_steps: int = TRIAL_STEPS,
) -> RunSpec:
    """Return the spec of one trial.

    Args:
        model: Sizes of the model.
        seq_len: Tokens per sequence.
        batch: Sequences per step.
        numerics: Precision, slots and compilation of the run.
        data_id: Id of the corpus.
        num_steps: Length of the run.
    """
    num_heads = max(1, model.width // 64)
    shape = Shape(
        num_layers=model.num_layers,
        width=model.width,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        ffn_width=model.ffn_width,
        vocab_size=model.vocab_size,
        seq_len=seq_len,
    )
    return RunSpec(
        optimizer="adamw",
        shape=shape,
        base_shape=shape,
        parametrization=get_parametrization("mup"),
        hparams=Hparams(learning_rate=1e-3),
        schedule=Schedule(kind="constant", num_steps=num_steps),
        batch_tokens=batch * seq_len,
        data_id=data_id,
        seed=0,
        numerics=numerics,
    )


def write_corpus(folder: Path, vocab_size: int, num_ids: int) -> Path:
    """Write random ids as a corpus below a folder, and return the corpus's own folder.

    `forerun tokenize` would need pyarrow, which the GPU machine may lack.
    """
    import numpy as np

    from forerun._proxies.data.tokens import MANIFEST, SCHEMA_VERSION, Manifest, Shard, Source

    shards = {}
    corpus = folder / str(vocab_size)
    corpus.mkdir()
    for seed, (split, number) in enumerate((("train", num_ids), ("validation", num_ids // 8))):
        ids = np.random.default_rng(seed).integers(0, vocab_size, number, dtype=np.uint16)
        path = corpus / f"{split}.bin"
        path.write_bytes(ids.astype("<u2").tobytes())
        shard = Shard(
            file=path.name, num_tokens=number, max_id=int(ids.max()), sha256=canon.hash_file(path)
        )
        shards[split] = (shard,)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        tokenizer="unnamed",
        vocab_size=vocab_size,
        dtype="uint16",
        end_id=None,
        sources=(Source(name="random", weight=1.0, num_documents=1, **shards),),
    )
    canon.write_atomic(corpus / MANIFEST, canon.to_pretty_json(manifest))
    return corpus


def describe_device() -> dict[str, Any]:
    """Return the device, the versions and the digest of the source.

    Results with another description are dropped.
    """
    import torch

    sources = hashlib.sha256()
    for path in sorted(
        path
        for package in ("proxies", "launcher", "benchmarks")
        for path in (ROOT / package).rglob("*.py")
    ):
        sources.update(path.read_bytes())
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "source": sources.hexdigest()[:12],
    }


def load_results(path: Path, machine: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the content of a result file if it was measured on `machine`, else an empty result.

    Args:
        path: Result file.
        machine: Description of this machine (`describe_device`).
        key: Key of the empty result below which the results are collected.
    """
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content if content.get("machine") == machine else {"machine": machine, key: {}}


def write_result(path: Path, content: dict[str, Any]) -> None:
    """Write a result file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    canon.write_atomic(path, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


def make_engine(spec: RunSpec, store: Any) -> Any:
    """Return the engine that a worker would use for this run.

    `forerun._launcher.study.workers.host` makes the same choice.
    """
    if spec.numerics.num_slots == 1 and not spec.numerics.cuda_graphs:
        from forerun._proxies.training.single_trial import SingleTrialEngine

        return SingleTrialEngine(store)
    from forerun._proxies.training.bank import Bank

    return Bank(spec.shape, spec.batch_tokens, spec.numerics, store, optimizer="adamw")


def report_rates(advance: Callable[[float], int], seconds: float) -> None:
    """Print "ready", then train for some seconds per line of input and print steps per second.

    Args:
        advance: Trains for that many seconds and returns the number of steps.
        seconds: Seconds per line of input.
    """
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.monotonic()
        num_steps = advance(seconds)
        print(num_steps / (time.monotonic() - start), flush=True)


def train_plain_loop(request: dict[str, Any]) -> None:
    """Train the same model in a plain loop with torch.compile, autocast and fused AdamW.

    Every step has the same batch.
    """
    import torch

    from forerun._proxies.model.decoder import Decoder, Multipliers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model_size = ModelSize(*request["model"])
    shape = make_spec(model_size, request["seq_len"], request["batch"], Numerics(), "0").shape
    model = Decoder(shape, device=device)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids_BT = torch.randint(shape.vocab_size, (request["batch"], shape.seq_len + 1), device=device)
    multipliers = Multipliers(attention=shape.head_dim**-0.5)
    if device == "cuda":
        model.compile()

    def advance(seconds: float, max_steps: int = ENDLESS_STEPS) -> int:
        deadline, num_steps = time.monotonic() + seconds, 0
        while num_steps < max_steps and time.monotonic() < deadline:
            with torch.autocast(device, torch.bfloat16):
                loss = model(ids_BT[:, :-1], multipliers, ids_BT[:, 1:])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            num_steps += 1
            if num_steps % 10 == 0:
                loss.item()  # as a log would
        loss.item()
        return num_steps

    advance(math.inf, FIRST_STEPS)
    report_rates(advance, request["seconds"])


def train_proxy(request: dict[str, Any]) -> None:
    """Train the requested run with forerun's engine."""
    from forerun._proxies.data.tokens import TokenStore

    store = TokenStore(Path(request["corpus"]), trusted=True)
    numerics, data_id = canon.decode(Numerics, request["numerics"]), store.manifest.data_id
    spec = make_spec(
        ModelSize(*request["model"]),
        request["seq_len"],
        request["batch"],
        numerics,
        data_id,
        ENDLESS_STEPS,
    )
    trainer = make_engine(spec, store)
    trainer.admit(0, spec)
    trainer.advance(FIRST_STEPS)

    def advance(seconds: float) -> int:
        before = trainer.steps[0]
        trainer.advance(ENDLESS_STEPS, seconds)
        return int(trainer.steps[0] - before)

    report_rates(advance, request["seconds"])


if __name__ == "__main__":
    run_request = json.loads(sys.argv[1])
    if run_request["numerics"]:
        train_proxy(run_request)
    else:
        train_plain_loop(run_request)
