"""Transfer of the learning rate over width on one GPU: muP, the standard parametrization, Muon.

    python benchmarks/gpu/gpu_transfer.py --out benchmarks/results

The script trains decoders of 4 layers and widths 256 to 1024 (3.2 to 50 million parameters without
tables) for 200 steps of 32,768 tokens on the bytes of Python's standard library, with seven rates
an octave apart. Each run trains in bfloat16, compiled and recorded as a CUDA graph. A condition is
a parametrization with its optimizer. The script writes gpu_transfer.json, and for each condition a
table that `forerun transfer --runs` judges:

    forerun transfer --runs benchmarks/results/gpu_transfer-mup.csv --target-width 2048

`--protocol published` uses the protocol of EleutherAI/nanoGPT-mup's mutransfer_lr_owt, the cheapest
published one, on the same bytes instead of OpenWebText: GPT-2 blocks, 2 layers, heads of 64, a tied
readout, widths 256 to 2048, 1,000 steps of 32 sequences of 1,024 tokens, AdamW (0.9, 0.95) with
decay 0.1 on all matrices, and clip 1. The published scripts keep their trainer's default of 2,000
warmup steps. So the rate rises during the whole run, to half of its nominal value. Here it
does the same. Biases, initial values and the scale of attention (1/8 instead of 1/64) are
forerun's. Seven of the twelve published rates are used, an octave apart around 2^-8, which was
muP's optimum at all widths. The results are gpu_transfer_published.json and separate tables.

The script needs a CUDA device, torch, numpy, tokenizers, pyarrow and `mup`, but not Ray, Optuna,
W&B or pydantic. No run starts after `--seconds`, and runs in the file are not repeated. At width
256, the base, the standard parametrization equals muP, so it reuses muP's runs.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_runs import describe_device, load_results, write_result

from forerun._proxies.core.hyperparameters import Hparams
from forerun._proxies.core.optimizers import OptimizerName
from forerun._proxies.core.rules import get_parametrization
from forerun._proxies.core.schedule import Schedule, ScheduleKind
from forerun._proxies.core.shape import Shape
from forerun._proxies.core.spec import Numerics, RunSpec

BASE = Shape(
    num_layers=4, width=256, num_heads=4, num_kv_heads=4, ffn_width=768, vocab_size=256, seq_len=512
)
WIDTHS = (256, 512, 1024)
NUM_STEPS, BATCH_TOKENS = 200, 32768
"""Steps of each run, and tokens of each step."""
CURVE_STRIDE = 20
"""Steps between the training losses that are kept of a run."""
FASTEST = Numerics(num_slots=1, dtype="bfloat16", compiled=True, cuda_graphs=True, fused_loss=True)
"""The fastest mode of `gpu_modes.py`."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """A parametrization with its optimizer, and the rates at the base width."""

    parametrization: str
    optimizer: OptimizerName = "adamw"
    log2_rates: range = range(-11, -4)
    octaves_per_doubling: int = 0
    """Shift of the rates per doubling of width, for conditions whose optimum is known to move."""
    rules: dict[str, Any] = field(default_factory=dict)
    """Settings that replace those of the parametrization."""
    hparams: dict[str, Any] = field(default_factory=dict)
    """Hyperparameters other than the learning rate, the clip norm and the weight decay."""

    def list_rates(self, width_ratio: float) -> list[float]:
        """Return the learning rates to train at a width, given its ratio to the base width."""
        shift_octaves = self.octaves_per_doubling * round(math.log2(width_ratio))
        return [2.0 ** (log2_rate + shift_octaves) for log2_rate in self.log2_rates]


CONDITIONS = {
    "mup": Condition(parametrization="mup"),
    "sp": Condition(parametrization="sp", octaves_per_doubling=-1),
    "muon": Condition(
        parametrization="mup",
        optimizer="muon",
        log2_rates=range(-8, -1),
        rules={"muon_rate": "original"},
        hparams={"adamw_learning_rate": 2.0**-8},
    ),
}
"""Conditions by name: muP, the standard parametrization, and Muon."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Model, widths, schedule and precision of the runs."""

    base: Shape = BASE
    widths: tuple[int, ...] = WIDTHS
    num_steps: int = NUM_STEPS
    batch_tokens: int = BATCH_TOKENS
    numerics: Numerics = FASTEST
    device: str = "cuda"
    kind: ScheduleKind = "cosine"
    warmup_share: float = 0.1
    """Share of the steps with warmup."""
    peak_share: float = 1.0
    """Largest rate of the schedule over the nominal rate."""
    rules: dict[str, Any] = field(default_factory=dict)
    """Settings that replace those of every parametrization."""
    weight_decay: float = 0.0


PROTOCOLS = {
    "ours": Settings(),
    "published": Settings(
        base=replace(BASE, num_layers=2, ffn_width=1024, seq_len=1024, family="gpt2", tied=True),
        widths=(256, 512, 1024, 2048),
        num_steps=1000,
        kind="constant",
        warmup_share=1.0,
        peak_share=0.5,
        rules={"weight_decay": "unscaled", "decayed": "two_dimensional"},
        weight_decay=0.1,
    ),
}
"""Settings by protocol."""


def shrink_settings(settings: Settings) -> Settings:
    """Return settings that take the same paths in seconds on a CPU, for the tests."""
    base = replace(
        settings.base, num_layers=1, width=16, num_heads=1, num_kv_heads=1, ffn_width=32, seq_len=16
    )
    return replace(
        settings,
        base=base,
        widths=(16, 32),
        num_steps=4,
        batch_tokens=64,
        numerics=Numerics(num_slots=1),
        device="cpu",
    )


def make_spec(
    settings: Settings, condition: Condition, width: int, rate: float, seed: int, data_id: str
) -> RunSpec:
    """Return the spec of one run at a width, with a learning rate and a seed."""
    num_steps, warmup_steps = settings.num_steps, int(settings.warmup_share * settings.num_steps)
    return RunSpec(
        shape=settings.base.at_width(width),
        base_shape=settings.base,
        parametrization=get_parametrization(
            condition.parametrization, **settings.rules, **condition.rules
        ),
        optimizer=condition.optimizer,
        hparams=Hparams(
            learning_rate=settings.peak_share * rate,
            clip_norm=1.0,
            weight_decay=settings.weight_decay,
            **condition.hparams,
        ),
        schedule=Schedule(kind=settings.kind, num_steps=num_steps, warmup_steps=warmup_steps),
        batch_tokens=settings.batch_tokens,
        data_id=data_id,
        seed=seed,
        numerics=settings.numerics,
    )


def list_runs(
    settings: Settings, names: list[str], num_seeds: int
) -> Iterator[tuple[str, int, int, float]]:
    """Yield condition, seed, width and rate of every run, the most important runs first."""
    for seed in range(num_seeds):
        for name in names:
            for width in settings.widths:
                for rate in CONDITIONS[name].list_rates(width / settings.base.width):
                    yield name, seed, width, rate


def run_all(
    settings: Settings,
    content: dict[str, Any],
    save: Any,
    names: list[str],
    num_seeds: int,
    deadline: float,
) -> bool:
    """Train the runs that the file lacks; return whether none is left."""
    from demo_runs import write_python_corpus

    from forerun._proxies.training.bank import Bank

    with tempfile.TemporaryDirectory() as folder:
        store, bank, bank_key = write_python_corpus(Path(folder)), None, None
        for name, seed, width, rate in list_runs(settings, names, num_seeds):
            # At the base width, the standard parametrization equals muP.
            if (name, width) == ("sp", settings.base.width):
                continue
            spec = make_spec(settings, CONDITIONS[name], width, rate, seed, store.manifest.data_id)
            if spec.id in content["runs"]:
                continue
            if time.monotonic() > deadline:
                return False
            began = time.monotonic()
            if bank_key != (width, spec.optimizer):
                # Free the previous bank's memory before the next bank is built
                bank, bank_key = None, (width, spec.optimizer)
                bank = Bank(
                    spec.shape,
                    spec.batch_tokens,
                    spec.numerics,
                    store,
                    optimizer=spec.optimizer,
                    device=settings.device,
                )
            assert bank is not None
            bank.admit(0, spec)
            [(_, result, curve)] = bank.advance(settings.num_steps)
            content["runs"][spec.id] = {
                "condition": name,
                "width": width,
                "lr": rate,
                "seed": seed,
                "status": result.status,
                "loss": result.loss_nats,
                "seconds": result.seconds,
                "seconds_with_build": time.monotonic() - began,
                "train_loss_nats": list(curve.train_loss_nats)[::CURVE_STRIDE],
            }
            save()
            print(
                f"{name}, width {width}, rate {rate:.3g}, seed {seed}: {result.loss_nats}",
                flush=True,
            )
    return True


def format_findings(settings: Settings, content: dict[str, Any]) -> list[str]:
    """Return a line for each condition and width with its lowest loss and its time per step."""
    by_size: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for run in content["runs"].values():
        by_size.setdefault((run["condition"], run["width"]), []).append(run)
    lines = []
    for (name, width), runs in sorted(by_size.items()):
        ended = [run for run in runs if run["loss"] is not None]
        best = min(ended, key=lambda run: run["loss"], default=None)
        best_text = (
            f"lowest loss {best['loss']:.4f} at rate {best['lr']:.3g}"
            if best
            else "no run ended well"
        )
        step_ms = 1000 * min(run["seconds"] for run in runs) / settings.num_steps
        lines.append(
            f"{name}, width {width}: {best_text}, {len(runs)} runs, {step_ms:.2f} ms per step"
        )
    return lines


def write_tables(content: dict[str, Any], stem: Path, base_width: int) -> None:
    """Write a table of runs for each condition, STEM-CONDITION.csv."""
    runs = list(content["runs"].values())
    for name in sorted({run["condition"] for run in runs}):
        rows = [run for run in runs if run["condition"] == name]
        # At the base width, the standard parametrization has muP's runs.
        if name == "sp":
            rows += [
                run for run in runs if run["condition"] == "mup" and run["width"] == base_width
            ]
        with Path(f"{stem}-{name}.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(
                file, ["width", "lr", "seed", "loss"], extrasaction="ignore", lineterminator="\n"
            )
            table.writeheader()
            for run in rows:
                # A run that diverged has no loss.
                table.writerow({**run, "loss": "nan" if run["loss"] is None else run["loss"]})


def main(arguments: list[str]) -> int:
    """Train, write and return the exit code: 2 without a device, 3 if runs are left, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="Folder of the result files.")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="ours", help="Training protocol.")
    parser.add_argument(
        "--conditions", default=",".join(CONDITIONS), help="Conditions to train, such as mup,sp."
    )
    parser.add_argument("--widths", help="Widths to train, such as 2048.")
    parser.add_argument("--seeds", type=int, default=2, help="Seeds per rate.")
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="No run starts after this time."
    )
    parser.add_argument(
        "--quick", action="store_true", help="Run tiny proxies on a CPU, as the tests do."
    )
    options = parser.parse_args(arguments)
    import torch

    if not options.quick and not torch.cuda.is_available():
        print("needs a CUDA device; not measured", file=sys.stderr)
        return 2
    deadline = time.monotonic() + options.seconds
    settings = PROTOCOLS[options.protocol]
    if options.widths:
        settings = replace(settings, widths=tuple(map(int, options.widths.split(","))))
    settings = shrink_settings(settings) if options.quick else settings
    stem = options.out / (
        "gpu_transfer" if options.protocol == "ours" else f"gpu_transfer_{options.protocol}"
    )
    file = stem.with_suffix(".json")
    content = load_results(file, describe_device(), "runs")
    save = partial(write_result, file, content)
    finished = run_all(
        settings, content, save, options.conditions.split(","), options.seeds, deadline
    )
    write_tables(content, stem, settings.base.width)
    print("\n".join(format_findings(settings, content)), flush=True)
    return 0 if finished else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
