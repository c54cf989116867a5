"""Dependence of noise, optima, speed and memory on the size of the vocabulary.

    python benchmarks/statistics/vocabularies.py --work FOLDER \\
        --json benchmarks/results/vocabularies.json

The demo's decoder (2 layers, heads of 16, 512 tokens a batch, cosine schedule, muP from width 32)
trains on the source of Python's standard library, as bytes and as byte-level BPE of 1,000, 4,096
and 16,384 entries that `forerun tokenize --train-bpe` makes, on one thread.

The script prints a line for each run, and writes the runs and a summary by vocabulary: the optimum
of the rate, noise between seeds and between validation windows, FLOP/s, and measured and estimated
memory. Next to the JSON file it writes the runs of 4,096 entries over width as tables for `forerun
transfer --runs`. FOLDER keeps the corpora and the validation losses by window.

All runs take about 25 minutes of one core. Runs that the JSON file has are not run again, and
`--summary` trains no run: it makes missing corpora, and writes the summary and tables of a file.
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

from process_tree import read_peak_memory_mb
from result_files import describe_machine

from forerun._launcher.main_run.estimates.main_run import estimate_memory
from forerun._launcher.main_run.frozen.frozen import Parallelism
from forerun._proxies.core import canon
from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Numerics, RunSpec

VOCABULARIES = (256, 1000, 4096, 16384)
BASE_WIDTH, HEAD_DIM, SEQ_LEN, BATCH_TOKENS, NUM_STEPS = 32, 16, 64, 512, 200
TABLE_BASE_WIDTH = 64
"""Base width of the runs in the tables for `forerun transfer --runs`."""
CORPUS = ("--suffix", ".py", "--exclude", "site-packages", "--exclude", "dist-packages")
MEMORY_STEPS = 3
"""Steps of a run whose memory is measured."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run, with the settings that differ between runs."""

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

    def make_spec(self, data_id: str) -> RunSpec:
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
            parametrization=get_parametrization(self.parametrization),
            hparams=Hparams(learning_rate=2.0**self.log2_rate, clip_norm=1.0),
            schedule=Schedule(
                kind="cosine", num_steps=self.num_steps, warmup_steps=self.num_steps // 10
            ),
            batch_tokens=BATCH_TOKENS,
            data_id=data_id,
            seed=self.seed,
            numerics=Numerics(),
        )


def list_cases() -> Iterator[Case]:
    """Yield every run, the most important runs first."""
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
    yield from list_transfer_cases()


def list_transfer_cases() -> Iterator[Case]:
    """Yield runs of 4,096 entries over width from base width 32, then the runs of the tables."""
    for seed in (0, 1):
        for width in (32, 64, 128):
            for rate in range(-7, -1):
                yield Case(vocab_size=4096, width=width, log2_rate=rate, seed=seed)
    for rate in range(-8, -3):
        yield Case(vocab_size=4096, width=64, log2_rate=rate, parametrization="sp")
    yield from list_table_cases()


def list_table_cases() -> Iterator[Case]:
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


def make_corpus(work: Path, vocab_size: int) -> Path:
    """Return the corpus folder of a vocabulary, and make it if it is missing."""
    out = work / f"corpus-{vocab_size}"
    if not (out / "manifest.json").exists():
        library = sysconfig.get_paths()["stdlib"]
        train = [] if vocab_size == 256 else ["--train-bpe", str(vocab_size)]
        line = ["tokenize", library, *CORPUS, *train, "--out", str(out)]
        subprocess.run([sys.executable, "-m", "forerun", *line], check=True)
    return out


def compute_unigram_nats(corpus: Path) -> float:
    """Return the cross-entropy of the validation tokens under the training frequencies, in nats."""
    from forerun._proxies.data.tokens import read_manifest

    manifest = read_manifest(corpus)
    source = manifest.sources[0]
    counts = {}
    for split in ("train", "validation"):
        ids = [np.fromfile(corpus / shard.file, manifest.dtype) for shard in getattr(source, split)]
        counts[split] = np.bincount(np.concatenate(ids), minlength=manifest.vocab_size)
    train_share = (counts["train"] + 1) / (counts["train"] + 1).sum()
    validation_share = counts["validation"] / counts["validation"].sum()
    return float(-(validation_share * np.log(train_share)).sum())


def compute_window_losses(predict: Any, store: Any) -> Any:
    """Return the mean loss of each validation window, in nats per token, [B].

    In shapes, B is a number of windows, T the tokens of a window, and V the vocabulary size.

    Args:
        predict: Function that maps token ids [B, T] to logits [B T, V].
        store: Corpus with the validation tokens.
    """
    import torch
    from torch.nn import functional

    from forerun._proxies.training.run_progress import read_validation_ids

    losses = []
    for ids_BT in torch.split(read_validation_ids(store, SEQ_LEN), BATCH_TOKENS // SEQ_LEN):
        loss_N = functional.cross_entropy(
            predict(ids_BT[:, :-1]), ids_BT[:, 1:].flatten(), reduction="none"
        )
        losses.append(loss_N.view(len(ids_BT), -1).mean(dim=1))
    return torch.cat(losses)


def train(case: Case, store: Any, work: Path) -> dict[str, Any]:
    """Train one run and return its row; its losses by window go to the work folder."""
    import torch

    from forerun._proxies.training.single_trial import SingleTrialEngine

    class Engine(SingleTrialEngine):
        """An engine that keeps the validation loss of every window."""

        windows: Any = None

        def _validate(self) -> list[float]:
            """Return the validation loss of the only slot; the engine calls this at the end."""
            with torch.no_grad():
                self.windows = compute_window_losses(self.predict, store)
            return [float(self.windows.double().mean())]

    torch.set_num_threads(1)
    spec, engine = case.make_spec(store.manifest.data_id), Engine(store)
    engine.admit(0, spec)
    began = time.process_time()
    engine.advance(case.num_steps - 1)
    seconds = time.process_time() - began
    [(_, result, curve)] = engine.advance(1)
    window_B = np.array([math.nan]) if engine.windows is None else engine.windows.numpy()
    np.save(work / f"{case.key}.npy", window_B)
    log_interval = max(1, case.num_steps // 20)
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
        "train_loss_nats": [round(loss, 4) for loss in curve.train_loss_nats[::log_interval]],
    }


def print_peak_memory(case: Case, corpus: Path) -> None:
    """Train a few steps in this process, and print by how many MB its peak memory grows."""
    import torch

    from forerun._proxies.data.tokens import TokenStore
    from forerun._proxies.training.single_trial import SingleTrialEngine

    torch.set_num_threads(1)
    store = TokenStore(corpus, trusted=True)
    engine = SingleTrialEngine(store)
    first_peak_mb = read_peak_memory_mb()
    engine.admit(0, case.make_spec(store.manifest.data_id))
    engine.advance(MEMORY_STEPS)
    print(read_peak_memory_mb() - first_peak_mb)


def measure_memory(vocab_size: int, width: int, corpus: Path) -> dict[str, Any]:
    """Return the measured peak memory of a run and the estimate for it, in MB."""
    case = Case(vocab_size=vocab_size, width=width, log2_rate=-7)
    line = [sys.executable, __file__, "--peak", str(corpus), str(vocab_size), str(width)]
    out = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    shape = case.make_spec("0" * 64).shape
    degrees = Parallelism(data_parallel_shard=1)
    estimate = estimate_memory(
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
    """Return log2 of the optimum: the vertex of a parabola through the lowest inner loss and its
    two neighbors.
    """
    index = min(range(1, len(losses) - 1), key=lambda i: losses[i])
    left, middle, right = losses[index - 1 : index + 2]
    return log2_rates[index] + 0.5 * (left - right) / (left - 2 * middle + right)


def compute_seed_sd(runs: list[dict[str, Any]]) -> float:
    """Return the standard deviation between seeds of one rate, pooled over rates, in nats."""
    by_rate: dict[int, list[float]] = {}
    for run in runs:
        by_rate.setdefault(run["log2_rate"], []).append(run["loss_nats"])
    groups = [losses for losses in by_rate.values() if len(losses) > 1]
    squares = sum(statistics.variance(losses) * (len(losses) - 1) for losses in groups)
    return math.sqrt(squares / sum(len(losses) - 1 for losses in groups))


def compute_paired_window_sd(work: Path, vocab_size: int) -> float | None:
    """Return the standard deviation over windows of the difference between two runs, in nats.

    The two runs differ in the seed only.
    """
    sds = []
    for seed in (1, 2):
        for rate in (-7, -6, -5):
            first, second = (
                work / f"{Case(vocab_size=vocab_size, width=32, log2_rate=rate, seed=s).key}.npy"
                for s in (0, seed)
            )
            if first.exists() and second.exists():
                sds.append(float((np.load(first) - np.load(second)).std(ddof=1)))
    return statistics.mean(sds) if sds else None


def summarize(content: dict[str, Any], work: Path) -> list[dict[str, Any]]:
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
                # Mean rise of both neighbors of the lowest inner loss
                best = max(1, min(losses.index(min(losses)), len(losses) - 2))
                rise_nats = (losses[best - 1] + losses[best + 1]) / 2 - losses[best]
                row[f"one_octave_off_nats_{width}"] = round(rise_nats, 4)
        if any(run["seed"] for run in base):
            row["seed_sd_nats"] = round(compute_seed_sd(base), 4)
            row["seed_sd_share"] = round(compute_seed_sd(base) / row["lowest_nats_32"], 5)
        paired = compute_paired_window_sd(work, vocab_size)
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
    table_cases = list(list_table_cases())
    for name in ("mup", "sp"):
        # At the base width both forms are the same model.
        table_runs = [
            case
            for case in table_cases
            if name == case.parametrization or case.width == TABLE_BASE_WIDTH
        ]
        rows = [content["runs"][case.key] for case in table_runs if case.key in content["runs"]]
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
        print_peak_memory(Case(vocab_size=vocab_size, width=width, log2_rate=-7), corpus)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="Folder of corpora and windows.")
    parser.add_argument("--json", type=Path, required=True, help="Result file.")
    parser.add_argument("--summary", action="store_true", help="Only compute the summary.")
    options = parser.parse_args()
    from forerun._proxies.data.tokens import TokenStore

    options.work.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"runs": {}, "memory": [], "unigram_nats": {}, "num_tokens": {}}
    if options.json.exists():
        content |= json.loads(options.json.read_text())

    def save() -> None:
        content.update(machine=describe_machine(), summary=summarize(content, options.work))
        canon.write_atomic(
            options.json, (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()
        )

    stores: dict[int, TokenStore] = {}
    for vocab_size in VOCABULARIES:
        corpus = make_corpus(options.work, vocab_size)
        stores[vocab_size] = TokenStore(corpus)
        content["num_tokens"][str(vocab_size)] = stores[vocab_size].manifest.count_tokens("train")
        if str(vocab_size) not in content["unigram_nats"]:
            content["unigram_nats"][str(vocab_size)] = compute_unigram_nats(corpus)
            content["memory"] += [measure_memory(vocab_size, width, corpus) for width in (32, 128)]
    for case in list_cases() if not options.summary else ():
        if case.key not in content["runs"]:
            content["runs"][case.key] = row = train(case, stores[case.vocab_size], options.work)
            save()
            print(case.key, row["loss_nats"], f"{row['cpu_seconds']:.1f} s", flush=True)
    save()
    write_tables(content, options.json.with_name("vocabulary_4096"))
    print(json.dumps(content["summary"], indent=1))


if __name__ == "__main__":
    main()
