"""Measure what depends on the vocabulary: noise, optima, speed, memory, and what a ladder needs.

    python benchmarks/statistics/vocabularies.py --work FOLDER \\
        --json benchmarks/results/vocabularies.json

Decoders of the demo (2 layers, heads of 16, 512 tokens a batch, cosine, muP from width 32) on the
source of Python's standard library: bytes, and byte-level BPE of 1,000, 4,096 and 16,384 entries
that `forerun tokenize --train-bpe` makes. One thread. FOLDER keeps the corpora and the validation
losses by window. The script resumes: runs that the JSON file has are not run again. All runs take
some 25 processor-minutes; `--summary` only computes the table of a file anew. Beside the JSON file
it writes the runs of 4,096 entries over width as tables for `forerun transfer --runs`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from process_tree import machine, own_peak_mb

from launcher.estimates.main_run import memory_per_rank
from launcher.frozen.frozen import Parallelism
from proxies.core import canon
from proxies.core.hyperparameters import Hparams
from proxies.core.rules import named
from proxies.core.schedule import Schedule
from proxies.core.shape import Shape
from proxies.core.spec import Numerics, RunSpec

VOCABULARIES = (256, 1000, 4096, 16384)
BASE_WIDTH, HEAD_DIM, SEQ_LEN, BATCH_TOKENS, NUM_STEPS = 32, 16, 64, 512, 200
TABLE_BASE_WIDTH = 64
CORPUS = ("--suffix", ".py", "--exclude", "site-packages", "--exclude", "dist-packages")
MEMORY_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of the benchmark."""

    vocab_size: int
    width: int
    log2_rate: int
    seed: int = 0
    num_steps: int = NUM_STEPS
    parametrization: str = "mup"
    base_width: int = BASE_WIDTH

    @property
    def key(self) -> str:
        """Name of the run in the result file."""
        name = f"{self.vocab_size}-{self.width}-{self.log2_rate}-{self.seed}-{self.num_steps}"
        name += "" if self.parametrization == "mup" else f"-{self.parametrization}"
        return name if self.base_width == BASE_WIDTH else f"{name}-base{self.base_width}"

    def spec(self, data_id: str) -> RunSpec:
        """Return the run as forerun's workers train it."""
        base, heads = self.base_width, self.base_width // HEAD_DIM
        base_shape = Shape(
            num_layers=2,
            width=base,
            num_heads=heads,
            num_kv_heads=heads,
            ffn_width=2 * base,
            vocab_size=self.vocab_size,
            seq_len=SEQ_LEN,
        )
        return RunSpec(
            optimizer="adamw",
            shape=base_shape.at_width(self.width),
            base_shape=base_shape,
            parametrization=named(self.parametrization),
            hparams=Hparams(learning_rate=2.0**self.log2_rate, clip_norm=1.0),
            schedule=Schedule(
                kind="cosine", num_steps=self.num_steps, warmup_steps=self.num_steps // 10
            ),
            batch_tokens=BATCH_TOKENS,
            data_id=data_id,
            seed=self.seed,
            numerics=Numerics(),
        )


def cases() -> Iterator[Case]:
    """Yield every run, the ones that matter most first."""
    for vocab in VOCABULARIES:
        for rate in range(-9, -2):
            yield Case(vocab_size=vocab, width=32, log2_rate=rate)
    for seed in (1, 2):
        for vocab in VOCABULARIES:
            for rate in (-7, -6, -5):
                yield Case(vocab_size=vocab, width=32, log2_rate=rate, seed=seed)
    for vocab in VOCABULARIES:
        for num_steps in (600, 1600):
            if (vocab, num_steps) != (16384, 1600):
                yield Case(vocab_size=vocab, width=32, log2_rate=-6, num_steps=num_steps)
    for vocab in VOCABULARIES:
        for rate in range(-8, -3):
            yield Case(vocab_size=vocab, width=64, log2_rate=rate)
    for vocab in (256, 1000):
        for num_steps in (600, 1600):
            yield Case(vocab_size=vocab, width=64, log2_rate=-6, num_steps=num_steps)
    yield from transfer_cases()


def transfer_cases() -> Iterator[Case]:
    """Yield runs of 4,096 entries over width from base width 32, then those of the tables."""
    for seed in (0, 1):
        for width in (32, 64, 128):
            for rate in range(-7, -1):
                yield Case(vocab_size=4096, width=width, log2_rate=rate, seed=seed)
    for rate in range(-8, -3):
        yield Case(vocab_size=4096, width=64, log2_rate=rate, parametrization="sp")
    yield from table_cases()


def table_cases() -> Iterator[Case]:
    """Yield the runs of the transfer tables: muP from base width 64, then the standard form."""
    for seed in (0, 1):
        for width in (64, 128, 256):
            for rate in range(-8, -2):
                yield Case(
                    vocab_size=4096,
                    width=width,
                    log2_rate=rate,
                    seed=seed,
                    base_width=TABLE_BASE_WIDTH,
                )
    # The standard form has no base width.
    for width, seed, rates in ((128, 0, (-9, -4)), (256, 0, (-10, -5)), (128, 1, (-9, -4))):
        for rate in range(*rates):
            yield Case(
                vocab_size=4096, width=width, log2_rate=rate, seed=seed, parametrization="sp"
            )


def corpus_of(work: Path, vocab_size: int) -> Path:
    """Return the corpus folder of a vocabulary, made if it is not there."""
    out = work / f"corpus-{vocab_size}"
    if not (out / "manifest.json").exists():
        library = sysconfig.get_paths()["stdlib"]
        train = [] if vocab_size == 256 else ["--train-bpe", str(vocab_size)]
        line = ["tokenize", library, *CORPUS, *train, "--out", str(out)]
        subprocess.run([sys.executable, "-m", "launcher", *line], check=True)
    return out


def unigram_nats(corpus: Path) -> float:
    """Return the validation tokens' mean surprise under the training tokens' frequencies, in
    nats.
    """
    from proxies.data.tokens import read_manifest

    manifest = read_manifest(corpus)
    source = manifest.sources[0]
    counts = {}
    for split in ("train", "validation"):
        ids = [np.fromfile(corpus / shard.file, manifest.dtype) for shard in getattr(source, split)]
        counts[split] = np.bincount(np.concatenate(ids), minlength=manifest.vocab_size)
    share = (counts["train"] + 1) / (counts["train"] + 1).sum()
    held = counts["validation"] / counts["validation"].sum()
    return float(-(held * np.log(share)).sum())


def window_losses(model: Any, store: Any) -> Any:
    """Return the mean loss of each validation window, in nats per token, [B]."""
    import torch
    from torch.nn import functional

    from proxies.training.outcome import validation_ids

    losses = []
    for ids_BT in torch.split(validation_ids(store, SEQ_LEN), BATCH_TOKENS // SEQ_LEN):
        loss_N = functional.cross_entropy(
            model(ids_BT[:, :-1]), ids_BT[:, 1:].flatten(), reduction="none"
        )
        losses.append(loss_N.view(len(ids_BT), -1).mean(dim=1))
    return torch.cat(losses)


def train(case: Case, store: Any, work: Path) -> dict[str, Any]:
    """Train one run and return its row; its losses by window go to the work folder."""
    import torch

    from proxies.training.solo import Solo

    class Engine(Solo):
        """Keeps the validation loss of every window."""

        windows: Any = None

        def _validation_loss(self, trial: Any) -> float:
            with torch.no_grad():
                self.windows = window_losses(trial.built, store)
            return float(self.windows.double().mean())

    torch.set_num_threads(1)
    spec, engine = case.spec(store.manifest.data_id), Engine(store)
    engine.admit(0, spec)
    began = time.process_time()
    engine.advance(case.num_steps - 1)
    seconds = time.process_time() - began
    [(_, result, curve)] = engine.advance(1)
    window_B = np.array([math.nan]) if engine.windows is None else engine.windows.numpy()
    np.save(work / f"{case.key}.npy", window_B)
    every = max(1, case.num_steps // 20)
    return {
        "vocab_size": case.vocab_size,
        "width": case.width,
        "log2_rate": case.log2_rate,
        "seed": case.seed,
        "num_steps": case.num_steps,
        "parametrization": case.parametrization,
        "base_width": case.base_width,
        "loss_nats": result.loss_nats,
        "window_sd_nats": float(window_B.std(ddof=1)) if len(window_B) > 1 else None,
        "num_windows": len(window_B),
        "cpu_seconds": seconds,
        "step_flops": float(spec.flops / case.num_steps),
        "train_loss_nats": [round(loss, 4) for loss in curve.train_loss_nats[::every]],
    }


def peak_of(case: Case, corpus: Path) -> None:
    """Train a few steps in this process and print its peak memory above what it had before,
    in MB.
    """
    import torch

    from proxies.data.tokens import TokenStore
    from proxies.training.solo import Solo

    torch.set_num_threads(1)
    store = TokenStore(corpus, trusted=True)
    engine = Solo(store)
    before = own_peak_mb()
    engine.admit(0, case.spec(store.manifest.data_id))
    engine.advance(MEMORY_STEPS)
    print(own_peak_mb() - before)


def memory_row(vocab_size: int, width: int, corpus: Path) -> dict[str, Any]:
    """Return the measured peak memory of a run beside the estimate for it, in MB."""
    case = Case(vocab_size=vocab_size, width=width, log2_rate=-7)
    line = [sys.executable, __file__, "--peak", str(corpus), str(vocab_size), str(width)]
    out = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    shape = case.spec("0" * 64).shape
    degrees = Parallelism(data_parallel_shard=1)
    estimate = memory_per_rank(
        shape, degrees, "float32", BATCH_TOKENS // SEQ_LEN, optimizer="adamw"
    )
    return {
        "vocab_size": vocab_size,
        "width": width,
        "measured_mb": float(out.split()[-1]),
        "estimate_mb": estimate.total_bytes / 2**20,
        "moment": estimate.moment,
    }


def find_optimum(log2_rates: list[float], losses: list[float]) -> float:
    """Return log2 of the optimum: the vertex of a parabola through the three lowest neighbors."""
    at = min(range(1, len(losses) - 1), key=lambda i: losses[i])
    left, middle, right = losses[at - 1 : at + 2]
    return log2_rates[at] + 0.5 * (left - right) / (left - 2 * middle + right)


def seed_sd(runs: list[dict[str, Any]]) -> float:
    """Return the sd between seeds of one rate, pooled over rates, in nats."""
    by_rate: dict[int, list[float]] = {}
    for run in runs:
        by_rate.setdefault(run["log2_rate"], []).append(run["loss_nats"])
    groups = [losses for losses in by_rate.values() if len(losses) > 1]
    squares = sum(statistics.variance(losses) * (len(losses) - 1) for losses in groups)
    return math.sqrt(squares / sum(len(losses) - 1 for losses in groups))


def paired_window_sd(work: Path, vocab_size: int) -> float | None:
    """Return the sd of the difference between two runs' losses in one window, in nats."""
    sds = []
    for seed in (1, 2):
        files = [
            work / f"{Case(vocab_size=vocab_size, width=32, log2_rate=rate, seed=other).key}.npy"
            for rate in (-7, -6, -5)
            for other in (0, seed)
        ]
        for first, second in zip(files[::2], files[1::2], strict=True):
            if first.exists() and second.exists():
                sds.append(float((np.load(first) - np.load(second)).std(ddof=1)))
    return statistics.mean(sds) if sds else None


def summary(content: dict[str, Any], work: Path) -> list[dict[str, Any]]:
    """Return one row for each vocabulary."""
    rows = []
    for vocab_size in VOCABULARIES:
        runs = [
            run
            for run in content["runs"].values()
            if run["vocab_size"] == vocab_size
            and run.get("parametrization", "mup") == "mup"
            and run.get("base_width", BASE_WIDTH) == BASE_WIDTH
        ]
        if not runs:
            continue
        base = [run for run in runs if run["width"] == 32 and run["num_steps"] == NUM_STEPS]
        row: dict[str, Any] = {"vocab_size": vocab_size, "num_runs": len(runs)}
        for width in (32, 64):
            grid = sorted(
                (
                    run
                    for run in runs
                    if (run["width"], run["seed"], run["num_steps"]) == (width, 0, NUM_STEPS)
                ),
                key=lambda run: run["log2_rate"],
            )
            if len(grid) >= 5:
                losses = [run["loss_nats"] for run in grid]
                optimum = find_optimum([run["log2_rate"] for run in grid], losses)
                row[f"log2_optimum_{width}"] = round(optimum, 2)
                row[f"lowest_nats_{width}"] = round(min(losses), 4)
                at = max(1, min(losses.index(min(losses)), len(losses) - 2))
                octave = (losses[at - 1] + losses[at + 1]) / 2 - losses[at]
                row[f"one_octave_off_nats_{width}"] = round(octave, 4)
        if any(run["seed"] for run in base):
            row["seed_sd_nats"] = round(seed_sd(base), 4)
            row["seed_sd_share"] = round(seed_sd(base) / row["lowest_nats_32"], 5)
        paired = paired_window_sd(work, vocab_size)
        if paired is not None:
            row["window_sd_nats"] = round(
                statistics.median(run["window_sd_nats"] for run in base), 3
            )
            row["paired_window_sd_nats"] = round(paired, 4)
            row["windows_noise_nats"] = round(paired / math.sqrt(base[0]["num_windows"]), 5)
        rates = [run["step_flops"] * (run["num_steps"] - 1) / run["cpu_seconds"] for run in runs]
        row["flops_per_second"] = [
            float(f"{rate:.3g}") for rate in np.quantile(rates, (0.1, 0.5, 0.9))
        ]
        num_tokens = content["num_tokens"]
        row["bytes_per_token"] = round(num_tokens["256"] / num_tokens[str(vocab_size)], 2)
        row["unigram_nats"] = round(content["unigram_nats"][str(vocab_size)], 3)
        for width in (32, 64):
            row[f"loss_by_steps_{width}"] = {
                str(run["num_steps"]): round(run["loss_nats"], 3)
                for run in runs
                if (run["width"], run["log2_rate"], run["seed"]) == (width, -6, 0)
            }
        rows.append(row)
    return rows


def write_tables(content: dict[str, Any], stem: Path) -> None:
    """Write the runs of 4,096 entries over width as tables for `forerun transfer --runs`."""
    cases = list(table_cases())
    for name in ("mup", "sp"):
        # At the base width both forms are the same model.
        wanted = [
            case for case in cases if name == case.parametrization or case.width == TABLE_BASE_WIDTH
        ]
        rows = [content["runs"][case.key] for case in wanted if case.key in content["runs"]]
        rows.sort(key=lambda run: (run["width"], run["log2_rate"], run["seed"]))
        lines = [
            f"{run['width']},{2.0 ** run['log2_rate']},{run['seed']},{run['loss_nats']}"
            for run in rows
        ]
        Path(f"{stem}-{name}.csv").write_text("\n".join(["width,lr,seed,loss", *lines]) + "\n")


def main() -> None:
    """Run what the result file lacks and write its summary."""
    if sys.argv[1:2] == ["--peak"]:
        corpus, vocab_size, width = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
        peak_of(Case(vocab_size=vocab_size, width=width, log2_rate=-7), corpus)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="Folder of corpora and windows.")
    parser.add_argument("--json", type=Path, required=True, help="Result file.")
    parser.add_argument("--summary", action="store_true", help="Only compute the summary.")
    asked = parser.parse_args()
    from proxies.data.tokens import TokenStore

    asked.work.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"runs": {}, "memory": [], "unigram_nats": {}, "num_tokens": {}}
    if asked.json.exists():
        content |= json.loads(asked.json.read_text())

    def save() -> None:
        content.update(machine=machine(), summary=summary(content, asked.work))
        canon.write_atomic(
            asked.json, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
        )

    stores: dict[int, TokenStore] = {}
    for vocab_size in VOCABULARIES:
        corpus = corpus_of(asked.work, vocab_size)
        stores[vocab_size] = TokenStore(corpus)
        content["num_tokens"][str(vocab_size)] = stores[vocab_size].manifest.num_tokens("train")
        if str(vocab_size) not in content["unigram_nats"]:
            content["unigram_nats"][str(vocab_size)] = unigram_nats(corpus)
            content["memory"] += [memory_row(vocab_size, width, corpus) for width in (32, 128)]
    for case in cases() if not asked.summary else ():
        if case.key not in content["runs"]:
            content["runs"][case.key] = row = train(case, stores[case.vocab_size], asked.work)
            save()
            print(case.key, row["loss_nats"], f"{row['cpu_seconds']:.1f} s", flush=True)
    save()
    write_tables(content, asked.json.with_name("vocabulary_4096"))
    print(json.dumps(content["summary"], indent=1))


if __name__ == "__main__":
    main()
