"""The training runs of the GPU benchmarks, and the helpers that these scripts share.

    python benchmarks/gpu/gpu_runs.py REQUEST

trains one run in its own process. REQUEST is a JSON object with the keys "model", "batch",
"seq_len", "corpus", "numerics" and "seconds"; numerics of null ask for the plain loop. The program
prints "ready" after its first steps. For every line that it reads it trains for "seconds" and
prints its steps per second.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from proxies.core import canon
from proxies.core.hyperparameters import Hparams
from proxies.core.rules import named
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.core.spec import Numerics, RunSpec

ROOT = Path(__file__).resolve().parents[2]
TRIAL_STEPS = 2000
ENDLESS_STEPS, FIRST_STEPS = 10**6, 3


def run_spec(
    model: Sequence[int],
    seq_len: int,
    batch: int,
    numerics: Numerics,
    data_id: str,
    num_steps: int = TRIAL_STEPS,
) -> RunSpec:
    """Return the spec of one trial.

    Args:
        model: Width, layers, feed-forward width and vocabulary size.
        seq_len: Tokens per sequence.
        batch: Sequences per step.
        numerics: Precision, slots and compilation of the run.
        data_id: Id of the corpus.
        num_steps: Length of the run.
    """
    width, num_layers, ffn_width, vocab_size = model
    num_heads = max(1, width // 64)
    shape = Shape(
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        ffn_width=ffn_width,
        vocab_size=vocab_size,
        seq_len=seq_len,
    )
    return RunSpec(
        optimizer="adamw",
        shape=shape,
        base_shape=shape,
        parametrization=named("mup"),
        hparams=Hparams(learning_rate=1e-3),
        schedule=Schedule(kind="constant", num_steps=num_steps),
        batch_tokens=batch * seq_len,
        data_id=data_id,
        seed=0,
        numerics=numerics,
    )


def corpus_of(folder: Path, vocab_size: int, num_ids: int) -> Path:
    """Write random ids as a corpus, without `forerun tokenize`, which needs pyarrow."""
    import numpy as np

    from proxies.data.tokens import MANIFEST, SCHEMA_VERSION, Manifest, Shard, Source

    shards = {}
    out = folder / str(vocab_size)
    out.mkdir()
    for seed, (split, number) in enumerate((("train", num_ids), ("validation", num_ids // 8))):
        ids = np.random.default_rng(seed).integers(0, vocab_size, number, dtype=np.uint16)
        path = out / f"{split}.bin"
        path.write_bytes(ids.astype("<u2").tobytes())
        shard = Shard(
            file=path.name, num_tokens=number, max_id=int(ids.max()), sha256=canon.file_sha256(path)
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
    canon.write_atomic(out / MANIFEST, canon.pretty(manifest))
    return out


def machine() -> dict[str, Any]:
    """Return the device, versions and source digest of this run. Results of others are dropped."""
    import torch

    sources = hashlib.sha256()
    for path in sorted(
        path
        for room in ("proxies", "launcher", "benchmarks")
        for path in (ROOT / room).rglob("*.py")
    ):
        sources.update(path.read_bytes())
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "source": sources.hexdigest()[:12],
    }


def load_results(path: Path, here: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the content of a result file if its machine is `here`, else an empty result."""
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content if content.get("machine") == here else {"machine": here, key: {}}


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a result file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    canon.write_atomic(path, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode())


def engine(spec: RunSpec, store: Any) -> Any:
    """Return the engine that a worker would use for this run (`launcher.workers.host`)."""
    if spec.numerics.num_slots == 1 and not spec.numerics.cuda_graphs:
        from proxies.training.solo import Solo

        return Solo(store)
    from proxies.training.bank import Bank

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


def plain_loop(request: dict[str, Any]) -> None:
    """Train the same model in a plain loop: compiled, autocast, fused AdamW, always one batch."""
    import torch

    from proxies.model.decoder import Decoder, Multipliers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = run_spec(request["model"], request["seq_len"], request["batch"], Numerics(), "0").shape
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


def train(request: dict[str, Any]) -> None:
    """Train the requested run with forerun's engine."""
    from proxies.data.tokens import TokenStore

    store = TokenStore(Path(request["corpus"]), trusted=True)
    numerics, data_id = canon.decode(Numerics, request["numerics"]), store.manifest.data_id
    spec = run_spec(
        request["model"], request["seq_len"], request["batch"], numerics, data_id, ENDLESS_STEPS
    )
    trainer = engine(spec, store)
    trainer.admit(0, spec)
    trainer.advance(FIRST_STEPS)

    def advance(seconds: float) -> int:
        before = trainer.steps[0]
        trainer.advance(ENDLESS_STEPS, seconds)
        return int(trainer.steps[0] - before)

    report_rates(advance, request["seconds"])


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    (train if options["numerics"] else plain_loop)(options)
