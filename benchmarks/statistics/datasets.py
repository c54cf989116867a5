"""Public families of scaling runs as tables. `make data` fetches the missing files.

    python benchmarks/statistics/datasets.py              # fetch missing files, list all families
    python benchmarks/statistics/datasets.py --from DIR   # take the files from a folder, by digest
    python benchmarks/statistics/datasets.py --list       # list only

A family is one set of runs to which a law may be fitted. Families of one study have the same
`group`: they share runs (under a different loss or parameter count) or at least code and design.
A mean over families therefore counts such a study many times, and a mean over groups counts it
once.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import lzma
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from downloads import FOLDER, SOURCES, download, index_folder, is_here, read_url, source
from inert_pickle import read_array, read_frame, read_pickled
from numpy.typing import NDArray

from scaling_fits.laws.table import RunTable, read_runs

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
"""Data beside the checkout, where there is any."""

Record = Mapping[str, str]
Point = tuple[float, float, float, float | None]
"""N, D, loss in nats, and the budget of its isoFLOP."""

_GEMSTONES = (
    "cool_begin",
    "cool_end",
    "hot",
    "hot_100b_plus",
    "hot_100b_plus_512x",
    "hot_120b_plus_only",
    "lr_ablation_hot",
    "slim_chinchilla",
)
_LOSS_TO_LOSS = {  # training set: its own validation loss
    "fineweb-edu-100b": "fineweb_edu_100b_val",
    "fineweb-100b": "fineweb_100b_val",
    "smollm-corpus": "smollm_val",
    "slimpajama-chunk1": "slimpajama_val",
    "proof-pile-2": "proof_pile_2_val",
    "starcoder": "starcoder_val",
}
_OLMO_PARAMS = {
    "190M": 190354176,
    "370M": 371262464,
    "760M": 758220288,
    "1B": 1279395840,
    "3B": 3169537280,
}
_ROUTED = (("Dense", 1), ("Hash", 64), ("RL-R", 64), ("S-Base", 8), ("S-Base", 64), ("S-Base", 512))
"""Routers and numbers of experts that are read as families; their source has 28, which are
alike."""
_ROUTED_STEPS, _ROUTED_BATCH = 250_000, 256 * 2048
_QUEST = {  # name: quantizers of weights and activations, bits of both
    "bf16": ("NoQuantizer", "NoQuantizer", 16),
    "trust_w4a4": ("TrustQuantizer", "TrustQuantizer", 4),
    "hadamard_trust_w4a4": ("HadamardTrustQuantizer", "HadamardTrustQuantizer", 4),
    "hadamard_clip_w1a1": ("HadamardClipQuantizer", "HadamardClipQuantizer", 1),
    "half_hadamard_w4a4": ("HalfHadamardTrustQuantizer", "HalfHadamardTrustQuantizer", 4),
    "half_hadamard_w3a3": ("HalfHadamardTrustQuantizer", "HalfHadamardTrustQuantizer", 3),
    "half_hadamard_w2a2": ("HalfHadamardTrustQuantizer", "HalfHadamardTrustQuantizer", 2),
}
XLSTM_FILES = {  # file: largest loss of a run that did not diverge, as its source has it
    "llama_ctx2048": 4.5,
    "llama_ctx8192": 3.5,
    "llama_ctx8192_flops_chinchilla": 4.5,
    "llama_ctx16384": 4.5,
    "mlstm_ctx16384": 4.5,
}
_XLSTM_BATCH = 2**20
"""Tokens a step of the runs that are read: one early round had half of it."""
_COLLAPSE = {  # file: name, tokens a step
    "chess": ("chess_linear", 512 * 128),
    "chess_const": ("chess_constant", 512 * 128),
    "c5m": ("cifar5m_linear", 256 * 3072),
}
_OPT_PARAMS = {
    "125m": 1.25e8,
    "1.3b": 1.3e9,
    "6.7b": 6.7e9,
    "13b": 1.3e10,
    "30b": 3e10,
    "175b": 1.75e11,
}
_MIXES = ("0", "202", "209")
"""Numbers of the mixtures that are read, of 20 that are alike."""
_MIX_PARAMS = {"70M": 7e7, "160M": 1.6e8, "305M": 3.05e8, "410M": 4.1e8}
_OLMO_LOSSES = {
    "c4": "c4_en-validation",
    "common_crawl": "dolma_common-crawl-validation",
    "pile": "pile-validation",
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Family:
    """One set of runs to fit a law to."""

    name: str
    group: str
    """The study it comes from."""
    source: str
    licence: str
    table: RunTable
    note: str
    """How far its losses are final losses of tuned, finished runs, and what N counts."""


def families(shared: Path = SHARED, downloaded: Path = FOLDER) -> list[Family]:
    """Every family that can be read here, in a fixed order; fewer, or none, where the data is
    not.
    """
    readers: list[tuple[bool, Callable[[Path], Iterator[Family]], Path]] = [
        ((shared / "gemstones").is_dir(), _gemstones, shared / "gemstones"),
        ((shared / "gadre_redpajama").is_dir(), _red_pajama, shared / "gadre_redpajama"),
        ((shared / "porian_refinedweb").is_dir(), _refined_web, shared / "porian_refinedweb"),
        ((shared / "datablations").is_dir(), _datablations, shared / "datablations"),
    ]
    readers += [
        (is_here(source(name), downloaded), read, downloaded / name)
        for name, read in FETCHED_READERS.items()
    ]
    return [family for there, read, folder in readers if there for family in read(folder)]


def _table(points: Iterable[Point], flops: Iterable[float] | None = None) -> RunTable:
    """A table of finite, positive points, ordered by N and D."""
    counts = None if flops is None else list(flops)
    rows = [(*point, math.nan if counts is None else counts[i]) for i, point in enumerate(points)]
    rows = sorted(row for row in rows if all(math.isfinite(x) and x > 0 for x in row[:3]))
    n, d, loss = (np.array([row[i] for row in rows], dtype=np.float64) for i in range(3))
    budgets = [row[3] for row in rows]
    return RunTable(
        params=n,
        tokens=d,
        loss=loss,
        flops=6.0 * n * d
        if counts is None
        else np.array([row[4] for row in rows], dtype=np.float64),
        weight=np.ones(len(rows)),
        budget=None if None in budgets else np.array(budgets, dtype=np.float64),
        flops_given=counts is not None,
    )


def _records(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def _cell(record: Record, name: str) -> float:
    text = record.get(name) or "nan"
    return float(text)


def _best(points: Iterable[Point]) -> list[Point]:
    """Of the points of one size and length, that of least loss: the best of the settings tried."""
    best: dict[tuple[float, float], Point] = {}
    for point in points:
        if math.isfinite(point[2]) and point[2] > 0:
            best[point[:2]] = min(best.get(point[:2], point), point, key=lambda each: each[2])
    return list(best.values())


def _gemstones(folder: Path) -> Iterator[Family]:
    for name in _GEMSTONES:
        note = "ends of cooldowns" if name == "cool_end" else "points along runs at a constant rate"
        if name == "slim_chinchilla":
            note = "one point a size and budget"
        yield Family(
            name=f"gemstones_{name}",
            group="gemstones",
            source="mcleish7/gemstone-scaling-laws 5f420478",
            licence="MIT",
            table=read_runs(folder / f"{name}.csv"),
            note=note,
        )


def _red_pajama(folder: Path) -> Iterator[Family]:
    records = _records(folder / "runs.csv")
    for name, column in (
        ("c4", "loss"),
        ("open_lm", "loss_openlm"),
        ("red_pajama", "loss_paloma_redpajama"),
    ):
        points = [
            (_cell(each, "params"), _cell(each, "tokens"), _cell(each, column), None)
            for each in records
        ]
        yield Family(
            name=f"open_lm_red_pajama_on_{name}",
            group="open_lm",
            source="mlfoundations/scaling a003c491",
            licence="MIT",
            table=_table(points),
            note="final, decayed; N with embeddings",
        )


def _refined_web(folder: Path) -> Iterator[Family]:
    setups: dict[str, list[Record]] = {}
    for record in _records(folder / "isoflop_points.csv"):
        setup = "_".join(
            record[key] for key in ("hparams", "warmup", "decay", "param_count", "val")
        )
        setups.setdefault(setup, []).append(record)
    for setup, records in setups.items():
        points = [
            tuple(_cell(each, key) for key in ("params", "tokens", "loss", "flops"))
            for each in records
        ]
        yield Family(
            name=f"refined_web_{setup}",
            group="refined_web",
            source="formll/resolving-scaling-law-discrepancies 0dc60d91",
            licence="MIT",
            table=_table(
                ((n, d, loss, c) for n, d, loss, c in points), flops=[point[3] for point in points]
            ),
            note="one point a size and budget, read along runs; the schedule is in the name",
        )


def _datablations(folder: Path) -> Iterator[Family]:
    fresh = [
        each
        for each in _records(folder / "runs.csv")
        if _cell(each, "tokens") <= _cell(each, "unique_tokens")
    ]
    points = [
        (_cell(each, "params"), _cell(each, "tokens"), _cell(each, "loss"), None) for each in fresh
    ]
    yield Family(
        name="datablations_fresh",
        group="datablations",
        source="huggingface/datablations 13701315",
        licence="Apache-2.0",
        table=_table(points),
        note="final, decayed; only runs that repeat no token",
    )


def _fetched(
    name: str, of: str, points: Iterable[Point], note: str, group: str | None = None
) -> Family:
    origin = source(of)
    return Family(
        name=name,
        group=group or of,
        source=origin.stated,
        licence=origin.licence,
        table=_table(points),
        note=note,
    )


def _chinchilla(folder: Path) -> Iterator[Family]:
    records = _records(folder / "svg_extracted_data.csv")
    bar = sorted(_cell(each, "loss") for each in records)[-5]
    points: list[Point] = [
        (
            _cell(each, "Model Size"),
            _cell(each, "Training FLOP") / (6 * _cell(each, "Model Size")),
            _cell(each, "loss"),
            None,
        )
        for each in records
        if _cell(each, "loss") < bar
    ]
    yield _fetched(
        "chinchilla",
        "chinchilla",
        points,
        "240 of 245 points read off a figure (the 5 highest left out, "
        "as the source does); final, decayed",
    )


def _steplaw(folder: Path) -> Iterator[Family]:
    records = _records(folder / "dense_lr_bs_loss.csv")
    points: list[Point] = [
        (_cell(each, "N"), _cell(each, "D"), _cell(each, "smooth loss"), None) for each in records
    ]
    yield _fetched(
        "steplaw",
        "steplaw",
        _best(points),
        "smoothed last training loss, best of rates and batches tried; N without embeddings",
    )


def _loss_to_loss(folder: Path) -> Iterator[Family]:
    records = _records(folder / "sweep.csv")
    for data, own in _LOSS_TO_LOSS.items():
        points: list[Point] = [
            (
                _cell(each, "params"),
                _cell(each, "tokens"),
                _cell(each, f"eval/{own}/CrossEntropyLoss"),
                _cell(each, "iso_flop"),
            )
            for each in records
            if each["data"] == data
        ]
        yield _fetched(
            f"loss_to_loss_{data.replace('-', '_')}",
            "loss_to_loss",
            points,
            "finished runs of an isoFLOP ladder; loss on the training set's own held-out part",
        )


def _misfitting(folder: Path) -> Iterator[Family]:
    records = _records(folder / "scaling_results_last_ckpt_only.csv")
    ended = [each for each in records if _cell(each, "portion_steps_elapsed") > 0.999]
    points: list[Point] = [
        (_cell(each, "N"), _cell(each, "D"), _cell(each, "loss"), None) for each in ended
    ]
    yield _fetched(
        "misfitting", "misfitting", _best(points), "best of the rates tried; N with embeddings"
    )


def _isoflops(folder: Path) -> Iterator[Family]:
    for data in ("comma", "dclm", "nemotron"):
        points: list[Point] = []
        for each in _records(folder / f"isoflop-{data}.csv"):
            budget = each["Name"].split("optimal-" if "optimal-" in each["Name"] else "isoflop-")[1]
            digits = budget[: budget.index("e+") + 4]
            points.append(
                (
                    _cell(each, "parameter_count"),
                    _cell(each, "throughput/total_tokens"),
                    _cell(each, "eval/paloma/macro_loss"),
                    float(digits),
                )
            )
        yield _fetched(
            f"marin_{data}",
            "isoflops",
            points,
            "isoFLOP ladders and their checks at larger budgets; mean "
            "loss over Paloma; a budget counts attention",
            group="marin",
        )
    every = _records(folder / "isoflops.csv")
    for experiment, name, group, note in (
        (
            "llama_3__exp_loss",
            "llama_3",
            "llama_3",
            "read off a figure, exponentials of its losses: of unknown unit",
        ),
        (
            "ml_scalefit__massivetext__chinchilla",
            "chinchilla_isoflops",
            "chinchilla",
            "the same runs, by other readers",
        ),
    ):
        points = [
            (
                _cell(each, "params"),
                _cell(each, "tokens"),
                _cell(each, "loss"),
                _cell(each, "budget"),
            )
            for each in every
            if each["experiment"] == experiment
        ]
        yield _fetched(name, "isoflops", points, note, group=group)


def _olmo_ladder(folder: Path) -> Iterator[Family]:
    curves = {path.stem: _records(path) for path in sorted(folder.glob("*.csv"))}
    for name, data in _OLMO_LOSSES.items():
        column = f"eval/{data}/CrossEntropyLoss"
        points: list[Point] = []
        for stem, curve in curves.items():
            last = next(each for each in reversed(curve) if each[column])
            tokens = _cell(last, "throughput/total_tokens")
            points.append((_OLMO_PARAMS[stem.split("-")[0]], tokens, _cell(last, column), None))
        yield _fetched(f"olmo_ladder_on_{name}", "olmo_ladder", points, "last loss of decayed runs")


def _open_lm(folder: Path) -> Iterator[Family]:
    for data in ("c4_original", "rw_original"):
        points: list[Point] = []
        for path in sorted(folder.glob(f"{data}-*.json")):
            run = json.loads(path.read_bytes())
            on_c4 = next(
                each["loss"] for each in run["results"] if "/c4_val/" in each["val_data"][0]
            )
            hparams = run["hyperparameters"]
            points.append((float(hparams["params"]), float(hparams["tokens"]), float(on_c4), None))
        yield _fetched(
            f"open_lm_{data.split('_')[0]}_on_c4",
            "open_lm",
            points,
            "final, decayed; N with embeddings",
        )


def _routing(folder: Path) -> Iterator[Family]:
    with gzip.open(folder / "curves.csv.gz", "rt", encoding="utf-8", newline="") as file:
        records = [
            each
            for each in csv.DictReader(file)
            if _cell(each, "routing_frequency") == 0.5
            and _cell(each, "k") == 1
            and _cell(each, "flop_increase") == 1
        ]
    for router, experts in _ROUTED:
        curves: dict[str, list[Record]] = {}
        for record in records:
            if record["router_type"] == router and _cell(record, "num_experts") == experts:
                curves.setdefault(record["hyper_id"], []).append(record)
        lasts = [max(curve, key=lambda each: _cell(each, "step")) for curve in curves.values()]
        name = (
            "routing_dense"
            if experts == 1
            else f"routing_{router.lower().replace('-', '_')}_{experts}"
        )
        yield _fetched(
            name,
            "routing",
            [
                (
                    _cell(each, "dense_parameter_count"),
                    _ROUTED_STEPS * _ROUTED_BATCH,
                    _cell(each, "loss_validation"),
                    None,
                )
                for each in lasts
            ],
            "fixed duration, decayed; N of the parameters that a token uses",
        )
        if experts == 1:
            points: list[Point] = [
                (
                    _cell(each, "dense_parameter_count"),
                    _cell(each, "step") * _ROUTED_BATCH,
                    _cell(each, "loss_validation"),
                    None,
                )
                for curve in curves.values()
                for each in curve
                if _cell(each, "step") >= 20_000
            ]
            yield _fetched(
                f"{name}_curve",
                "routing",
                points,
                "points along one cosine schedule of 250,000 steps",
            )


def _quest(folder: Path) -> Iterator[Family]:
    runs = json.loads((folder / "runs_for_scaling.json").read_bytes())
    for name, (weights, activations, bits) in _QUEST.items():
        points: list[Point] = [
            (float(run["non_embedding_parameters"]), float(run["tokens"]), float(run["loss"]), None)
            for run in runs
            if (run["w_quant"], run["a_quant"]) == (weights, activations)
            and run["w_bits"] == run["a_bits"] == bits
        ]
        note = (
            "two ratios of tokens to parameters"
            if name.startswith("half")
            else "fixed ratio of tokens to parameters"
        )
        yield _fetched(
            f"quest_{name}", "quest", points, f"{note}; final, decayed; N without embeddings"
        )


def _xlstm(folder: Path) -> Iterator[Family]:
    for name, max_loss in XLSTM_FILES.items():
        rounds = read_pickled((folder / f"isoflop_{name}_wandb_data.inert").read_bytes())
        context = int(name.split("ctx")[1].split("_")[0])
        points: list[Point] = []
        for runs in rounds.values():  # the runs of one budget
            ends: set[tuple[float, float, float]] = set()
            for summary in (run.state["summary"] for run in runs):
                data, loss = summary.get("dataset/", {}), summary.get("val/", {}).get("dclm_loss")
                batch = data.get("global_batch_size", 0) * context
                has_ended = batch == _XLSTM_BATCH and summary["_step"] == data["num_train_steps"]
                if has_ended and isinstance(loss, float) and loss < max_loss:
                    ends.add(
                        (
                            float(summary["model/"]["num_params"]),
                            float(batch * summary["_step"]),
                            loss,
                        )
                    )
            if ends:
                budget = float(np.median([6.0 * n * d for n, d, _ in ends]))
                points += [(*end, budget) for end in sorted(ends)]
        note = (
            "finished runs of isoFLOP ladders, one rate a size; N with embeddings; a budget is "
            "its median 6ND"
        )
        yield _fetched(f"xlstm_{name}", "xlstm", points, note)


def _supercollapse(folder: Path) -> Iterator[Family]:
    for stem, (name, batch) in _COLLAPSE.items():
        runs = read_frame(read_pickled((folder / f"{stem}.inert").read_bytes()))
        histories = [read_frame(history) for history in runs["history"]]
        ends = [(history["step"][-1] * batch, history["test_loss"][-1]) for history in histories]
        points: list[Point] = [
            (float(n), float(d), float(loss), None)
            for n, (d, loss) in zip(runs["P"], ends, strict=True)
        ]
        note = "not text; fixed duration at a constant rate; five seeds a size"
        if stem != "chess_const":
            note = "not text; durations grow with size by one rule; decayed; five seeds a size"
        yield _fetched(f"collapse_{name}", "supercollapse", points, note)
    runs = read_frame(read_pickled((folder / "c5m_schedules.inert").read_bytes()))
    for schedule in ("linear", "multicosine"):
        points = []
        for i, history in enumerate(read_frame(each) for each in runs["history"]):
            if runs["schedule"][i] == schedule and runs["decay_frac"][i] == 1.0:
                loss = float(history["test_loss"][-1])
                points.append(
                    (float(runs["num_params"][i]), float(history["tokens"][-1]), loss, None)
                )
        yield _fetched(
            f"collapse_cifar5m_cross_{schedule}",
            "supercollapse",
            points,
            "not text; five sizes at one duration and one size at four; decayed",
        )


def _openwebtext2(folder: Path) -> Iterator[Family]:
    setups = read_frame(
        read_pickled(lzma.decompress((folder / "summary_df_owt2.inert").read_bytes()))
    )
    for i, data in enumerate(setups["data"]):
        setup = "_".join(
            setups[key][i] for key in ("hparams", "warmup", "decay", "param_count", "val")
        )
        budgets = read_frame(data)
        points: list[Point] = []
        for j, flops in enumerate(budgets["flops"]):
            columns: list[Any] = [budgets[key][j] for key in ("orig_n", "orig_t", "orig_loss")]
            if not isinstance(columns[0], float):  # NaN: a budget without runs
                arrays = [read_array(column) for column in columns]
                points += [
                    (float(n), float(d), float(loss), float(flops))
                    for n, d, loss in zip(*arrays, strict=True)
                ]
        yield _fetched(
            f"openwebtext2_{setup}",
            "openwebtext2",
            points,
            "one point a size and budget, read along runs; the schedule is in the name",
            group="refined_web",
        )


def _opt(folder: Path) -> Iterator[Family]:
    points: list[Point] = [
        (
            _OPT_PARAMS[each["model_size"]],
            10.0 ** _cell(each, "num_token"),
            math.log(_cell(each, "ppl")),
            None,
        )
        for each in _records(folder / "opt_trajectories.csv")
    ]
    yield _fetched(
        "opt_curve",
        "colpret",
        points,
        "points along one schedule a size; N as it is called",
        group="opt",
    )


def _mixing_laws(folder: Path) -> Iterator[Family]:
    curves: dict[str, list[Point]] = {mix: [] for mix in _MIXES}
    for size, num_params in _MIX_PARAMS.items():
        for line in (folder / f"{size}.txt").read_text(encoding="utf-8").splitlines():
            checkpoint, validation_set, loss = line.split("\t")
            run, step = checkpoint.split("/")[-2:]
            mix = run.split("_RP_")[1].split("-")[0]
            if mix in curves and validation_set.endswith(".Pile-CC.bin"):
                curves[mix].append((num_params, float(step) * 2**20, float(loss), None))
    for mix, points in curves.items():
        yield _fetched(
            f"mixing_laws_red_pajama_{mix}_curve",
            "mixing_laws",
            points,
            "points along one schedule a size; loss on Pile-CC; N as it is called, 2^20 tokens a "
            "step",
        )


FETCHED_READERS: Mapping[str, Callable[[Path], Iterator[Family]]] = {
    "chinchilla": _chinchilla,
    "steplaw": _steplaw,
    "loss_to_loss": _loss_to_loss,
    "misfitting": _misfitting,
    "isoflops": _isoflops,
    "olmo_ladder": _olmo_ladder,
    "open_lm": _open_lm,
    "routing": _routing,
    "quest": _quest,
    "xlstm": _xlstm,
    "supercollapse": _supercollapse,
    "openwebtext2": _openwebtext2,
    "colpret": _opt,
    "mixing_laws": _mixing_laws,
}
"""Readers of fetched sources, by the source's name; each takes the folder of its files."""


def listing(found: list[Family]) -> str:
    """Families with their runs, reach, source and licence, one a line."""

    def reach(values: NDArray[np.float64]) -> str:
        return f"{values.min():.2g} to {values.max():.2g}"

    lines = [
        f"{each.name}: {each.table.num_runs} runs, 6ND "
        f"{reach(6.0 * each.table.params * each.table.tokens)}; "
        f"group {each.group}; {each.source}; licence {each.licence}; {each.note}"
        for each in found
    ]
    return "\n".join(
        [*lines, f"{len(found)} families of {len({each.group for each in found})} studies"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch and list public families of scaling runs.")
    parser.add_argument("--list", action="store_true", help="fetch nothing")
    parser.add_argument(
        "--from",
        dest="folder",
        type=Path,
        metavar="DIR",
        help="folder to take files from, by digest",
    )
    options = parser.parse_args()
    read = read_url
    if options.folder is not None:
        try:
            read = index_folder(options.folder)
        except OSError as error:
            parser.error(f"--from {options.folder} cannot be read: {error}")
    failures = []
    for each in () if options.list else SOURCES:
        problem = download(each, read=read)
        print(
            f"{each.name} ({each.stated}, licence {each.licence}): {problem or 'here, as expected'}"
        )
        failures += [each.name] if problem else []
    print(listing(families()))
    if failures:
        raise SystemExit(
            f"not fetched: {', '.join(failures)}; what is listed above can be used without them"
        )


if __name__ == "__main__":
    main()
