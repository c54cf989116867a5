"""Public families of scaling runs as tables. `make data` fetches the missing files.

    python benchmarks/statistics/datasets.py              # fetch missing files, list all families
    python benchmarks/statistics/datasets.py --from DIR   # take the files from a folder, by digest
    python benchmarks/statistics/datasets.py --list       # list only

Without --list the exit code is 1 if a file could not be fetched. Listing takes a few seconds.

A family is one set of runs to which a law may be fitted. Families of one study have the same
`group`: they share runs (under a different loss or parameter count) or at least code and design.
A mean over families therefore counts such a study many times, and a mean over groups counts it
once. N is a number of parameters, and D a number of tokens.
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
from downloads import FOLDER, SOURCES, download, find_source, index_folder, is_here, read_url
from inert_pickle import read_array, read_frame, read_pickled
from numpy.typing import NDArray

from forerun._scaling_fits.laws.table import RunTable, read_runs

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
"""Folder of public data next to the checkout, if there is one."""

Record = Mapping[str, str]
"""One row of a CSV file."""
Point = tuple[float, float, float, float | None]
"""Parameters, tokens, loss in nats, and FLOP budget of its isoFLOP curve."""

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
_LOSS_TO_LOSS = {
    "fineweb-edu-100b": "fineweb_edu_100b_val",
    "fineweb-100b": "fineweb_100b_val",
    "smollm-corpus": "smollm_val",
    "slimpajama-chunk1": "slimpajama_val",
    "proof-pile-2": "proof_pile_2_val",
    "starcoder": "starcoder_val",
}
"""Name of each training set's own validation loss."""
_OLMO_PARAMS = {
    "190M": 190354176,
    "370M": 371262464,
    "760M": 758220288,
    "1B": 1279395840,
    "3B": 3169537280,
}
"""Parameters by the size in a file's name."""
_ROUTED = (("Dense", 1), ("Hash", 64), ("RL-R", 64), ("S-Base", 8), ("S-Base", 64), ("S-Base", 512))
"""Routers and numbers of experts that are read as families; their source has 28, which are
similar."""
_ROUTED_STEPS, _ROUTED_BATCH = 250_000, 256 * 2048
"""Steps of a run and tokens per step."""
_QUEST = {
    "bf16": ("NoQuantizer", "NoQuantizer", 16),
    "trust_w4a4": ("TrustQuantizer", "TrustQuantizer", 4),
    "hadamard_trust_w4a4": ("HadamardTrustQuantizer", "HadamardTrustQuantizer", 4),
    "hadamard_clip_w1a1": ("HadamardClipQuantizer", "HadamardClipQuantizer", 1),
    "half_hadamard_w4a4": ("HalfHadamardTrustQuantizer", "HalfHadamardTrustQuantizer", 4),
    "half_hadamard_w3a3": ("HalfHadamardTrustQuantizer", "HalfHadamardTrustQuantizer", 3),
    "half_hadamard_w2a2": ("HalfHadamardTrustQuantizer", "HalfHadamardTrustQuantizer", 2),
}
"""Quantizers of weights and of activations, and the bits of both, by the family's name."""
XLSTM_FILES = {
    "llama_ctx2048": 4.5,
    "llama_ctx8192": 3.5,
    "llama_ctx8192_flops_chinchilla": 4.5,
    "llama_ctx16384": 4.5,
    "mlstm_ctx16384": 4.5,
}
"""Largest loss of a run that did not diverge, as the source states it, by file."""
_XLSTM_BATCH = 2**20
"""Tokens per step of the runs that are read; one early round had half as many."""
_COLLAPSE = {
    "chess": ("chess_linear", 512 * 128),
    "chess_const": ("chess_constant", 512 * 128),
    "c5m": ("cifar5m_linear", 256 * 3072),
}
"""Name of a family and tokens per step, by file."""
_OPT_PARAMS = {
    "125m": 1.25e8,
    "1.3b": 1.3e9,
    "6.7b": 6.7e9,
    "13b": 1.3e10,
    "30b": 3e10,
    "175b": 1.75e11,
}
"""Parameters by the size in the table."""
_MIXES = ("0", "202", "209")
"""Numbers of the data mixtures that are read; the source has 20, which are similar."""
_MIX_PARAMS = {"70M": 7e7, "160M": 1.6e8, "305M": 3.05e8, "410M": 4.1e8}
_OLMO_LOSSES = {
    "c4": "c4_en-validation",
    "common_crawl": "dolma_common-crawl-validation",
    "pile": "pile-validation",
}
"""Column of each validation set."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Family:
    """One set of runs to fit a law to."""

    name: str
    group: str
    """Study that the runs come from."""
    source: str
    licence: str
    table: RunTable
    note: str
    """Remark on what N counts, and on whether the losses are final losses of tuned, finished runs.
    """


def load_families(shared: Path = SHARED, downloaded: Path = FOLDER) -> list[Family]:
    """Return every family whose files are on this machine, in a fixed order."""
    readers: list[tuple[bool, Callable[[Path], Iterator[Family]], Path]] = [
        ((shared / "gemstones").is_dir(), _read_gemstones, shared / "gemstones"),
        ((shared / "gadre_redpajama").is_dir(), _read_red_pajama, shared / "gadre_redpajama"),
        ((shared / "porian_refinedweb").is_dir(), _read_refined_web, shared / "porian_refinedweb"),
        ((shared / "datablations").is_dir(), _read_datablations, shared / "datablations"),
    ]
    readers += [
        (is_here(find_source(name), downloaded), read, downloaded / name)
        for name, read in FETCHED_READERS.items()
    ]
    return [family for has_files, read, folder in readers if has_files for family in read(folder)]


def _make_table(points: Iterable[Point], flops: Iterable[float] | None = None) -> RunTable:
    """Return a table of the finite, positive points, ordered by N and D."""
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


def _read_records(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def _read_cell(record: Record, name: str) -> float:
    """Return a cell as a number; NaN if it is empty."""
    text = record.get(name) or "nan"
    return float(text)


def _keep_best(points: Iterable[Point]) -> list[Point]:
    """Return the point of lowest loss for each size and length: that of the best settings."""
    best: dict[tuple[float, float], Point] = {}
    for point in points:
        if math.isfinite(point[2]) and point[2] > 0:
            best[point[:2]] = min(
                best.get(point[:2], point), point, key=lambda candidate: candidate[2]
            )
    return list(best.values())


def _read_gemstones(folder: Path) -> Iterator[Family]:
    """Yield the families of Gemstones."""
    for name in _GEMSTONES:
        # `forecasts.py` recognizes families of this kind by the words "points along".
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


def _read_red_pajama(folder: Path) -> Iterator[Family]:
    """Yield the families of Gadre's models on RedPajama."""
    records = _read_records(folder / "runs.csv")
    for name, column in (
        ("c4", "loss"),
        ("open_lm", "loss_openlm"),
        ("red_pajama", "loss_paloma_redpajama"),
    ):
        points = [
            (
                _read_cell(record, "params"),
                _read_cell(record, "tokens"),
                _read_cell(record, column),
                None,
            )
            for record in records
        ]
        yield Family(
            name=f"open_lm_red_pajama_on_{name}",
            group="open_lm",
            source="mlfoundations/scaling a003c491",
            licence="MIT",
            table=_make_table(points),
            note="final, decayed; N with embeddings",
        )


def _read_refined_web(folder: Path) -> Iterator[Family]:
    """Yield the families of Porian's models on RefinedWeb."""
    setups: dict[str, list[Record]] = {}
    for record in _read_records(folder / "isoflop_points.csv"):
        setup = "_".join(
            record[key] for key in ("hparams", "warmup", "decay", "param_count", "val")
        )
        setups.setdefault(setup, []).append(record)
    for setup, records in setups.items():
        points = [
            tuple(_read_cell(record, key) for key in ("params", "tokens", "loss", "flops"))
            for record in records
        ]
        yield Family(
            name=f"refined_web_{setup}",
            group="refined_web",
            source="formll/resolving-scaling-law-discrepancies 0dc60d91",
            licence="MIT",
            table=_make_table(
                ((n, d, loss, c) for n, d, loss, c in points), flops=[point[3] for point in points]
            ),
            note="one point a size and budget, read along runs; the schedule is in the name",
        )


def _read_datablations(folder: Path) -> Iterator[Family]:
    """Yield the family of Datablations, without runs that repeat tokens."""
    fresh = [
        record
        for record in _read_records(folder / "runs.csv")
        if _read_cell(record, "tokens") <= _read_cell(record, "unique_tokens")
    ]
    points = [
        (
            _read_cell(record, "params"),
            _read_cell(record, "tokens"),
            _read_cell(record, "loss"),
            None,
        )
        for record in fresh
    ]
    yield Family(
        name="datablations_fresh",
        group="datablations",
        source="huggingface/datablations 13701315",
        licence="Apache-2.0",
        table=_make_table(points),
        note="final, decayed; only runs that repeat no token",
    )


def _make_family(
    name: str, source_name: str, points: Iterable[Point], note: str, group: str | None = None
) -> Family:
    """Return a family of a fetched source."""
    origin = find_source(source_name)
    return Family(
        name=name,
        group=group or source_name,
        source=origin.stated,
        licence=origin.licence,
        table=_make_table(points),
        note=note,
    )


def _read_chinchilla(folder: Path) -> Iterator[Family]:
    """Yield the family of Chinchilla."""
    records = _read_records(folder / "svg_extracted_data.csv")
    min_outlier_loss = sorted(_read_cell(record, "loss") for record in records)[-5]
    points: list[Point] = [
        (
            _read_cell(record, "Model Size"),
            _read_cell(record, "Training FLOP") / (6 * _read_cell(record, "Model Size")),
            _read_cell(record, "loss"),
            None,
        )
        for record in records
        if _read_cell(record, "loss") < min_outlier_loss
    ]
    yield _make_family(
        "chinchilla",
        "chinchilla",
        points,
        "240 of 245 points read off a figure (the 5 highest left out, "
        "as the source does); final, decayed",
    )


def _read_steplaw(folder: Path) -> Iterator[Family]:
    """Yield the family of Step Law."""
    records = _read_records(folder / "dense_lr_bs_loss.csv")
    points: list[Point] = [
        (_read_cell(record, "N"), _read_cell(record, "D"), _read_cell(record, "smooth loss"), None)
        for record in records
    ]
    yield _make_family(
        "steplaw",
        "steplaw",
        _keep_best(points),
        "smoothed last training loss, best of rates and batches tried; N without embeddings",
    )


def _read_loss_to_loss(folder: Path) -> Iterator[Family]:
    """Yield the families of loss-to-loss prediction."""
    records = _read_records(folder / "sweep.csv")
    for data, validation_set in _LOSS_TO_LOSS.items():
        points: list[Point] = [
            (
                _read_cell(record, "params"),
                _read_cell(record, "tokens"),
                _read_cell(record, f"eval/{validation_set}/CrossEntropyLoss"),
                _read_cell(record, "iso_flop"),
            )
            for record in records
            if record["data"] == data
        ]
        yield _make_family(
            f"loss_to_loss_{data.replace('-', '_')}",
            "loss_to_loss",
            points,
            "finished runs of an isoFLOP ladder; loss on the training set's own held-out part",
        )


def _read_misfitting(folder: Path) -> Iterator[Family]:
    """Yield the family of Misfitting."""
    records = _read_records(folder / "scaling_results_last_ckpt_only.csv")
    ended = [record for record in records if _read_cell(record, "portion_steps_elapsed") > 0.999]
    points: list[Point] = [
        (_read_cell(record, "N"), _read_cell(record, "D"), _read_cell(record, "loss"), None)
        for record in ended
    ]
    yield _make_family(
        "misfitting", "misfitting", _keep_best(points), "best of the rates tried; N with embeddings"
    )


def _read_isoflops(folder: Path) -> Iterator[Family]:
    """Yield the families of Marin and of other isoFLOP studies."""
    for data in ("comma", "dclm", "nemotron"):
        points: list[Point] = []
        for record in _read_records(folder / f"isoflop-{data}.csv"):
            budget = record["Name"].split(
                "optimal-" if "optimal-" in record["Name"] else "isoflop-"
            )[1]
            digits = budget[: budget.index("e+") + 4]  # such as 1e+19
            points.append(
                (
                    _read_cell(record, "parameter_count"),
                    _read_cell(record, "throughput/total_tokens"),
                    _read_cell(record, "eval/paloma/macro_loss"),
                    float(digits),
                )
            )
        yield _make_family(
            f"marin_{data}",
            "isoflops",
            points,
            "isoFLOP ladders and their checks at larger budgets; mean "
            "loss over Paloma; a budget counts attention",
            group="marin",
        )
    all_records = _read_records(folder / "isoflops.csv")
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
                _read_cell(record, "params"),
                _read_cell(record, "tokens"),
                _read_cell(record, "loss"),
                _read_cell(record, "budget"),
            )
            for record in all_records
            if record["experiment"] == experiment
        ]
        yield _make_family(name, "isoflops", points, note, group=group)


def _read_olmo_ladder(folder: Path) -> Iterator[Family]:
    """Yield the families of the OLMo ladder."""
    curves = {path.stem: _read_records(path) for path in sorted(folder.glob("*.csv"))}
    for name, data in _OLMO_LOSSES.items():
        column = f"eval/{data}/CrossEntropyLoss"
        points: list[Point] = []
        for stem, curve in curves.items():
            last = next(record for record in reversed(curve) if record[column])
            tokens = _read_cell(last, "throughput/total_tokens")
            points.append(
                (_OLMO_PARAMS[stem.split("-")[0]], tokens, _read_cell(last, column), None)
            )
        yield _make_family(
            f"olmo_ladder_on_{name}", "olmo_ladder", points, "last loss of decayed runs"
        )


def _read_open_lm(folder: Path) -> Iterator[Family]:
    """Yield the families of open_lm."""
    for data in ("c4_original", "rw_original"):
        points: list[Point] = []
        for path in sorted(folder.glob(f"{data}-*.json")):
            run = json.loads(path.read_bytes())
            on_c4 = next(
                record["loss"] for record in run["results"] if "/c4_val/" in record["val_data"][0]
            )
            hparams = run["hyperparameters"]
            points.append((float(hparams["params"]), float(hparams["tokens"]), float(on_c4), None))
        yield _make_family(
            f"open_lm_{data.split('_')[0]}_on_c4",
            "open_lm",
            points,
            "final, decayed; N with embeddings",
        )


def _read_routing(folder: Path) -> Iterator[Family]:
    """Yield the families of scaling laws for routing."""
    with gzip.open(folder / "curves.csv.gz", "rt", encoding="utf-8", newline="") as file:
        records = [
            record
            for record in csv.DictReader(file)
            if _read_cell(record, "routing_frequency") == 0.5
            and _read_cell(record, "k") == 1
            and _read_cell(record, "flop_increase") == 1
        ]
    for router, experts in _ROUTED:
        curves: dict[str, list[Record]] = {}
        for record in records:
            if record["router_type"] == router and _read_cell(record, "num_experts") == experts:
                curves.setdefault(record["hyper_id"], []).append(record)
        lasts = [
            max(curve, key=lambda record: _read_cell(record, "step")) for curve in curves.values()
        ]
        name = (
            "routing_dense"
            if experts == 1
            else f"routing_{router.lower().replace('-', '_')}_{experts}"
        )
        yield _make_family(
            name,
            "routing",
            [
                (
                    _read_cell(record, "dense_parameter_count"),
                    _ROUTED_STEPS * _ROUTED_BATCH,
                    _read_cell(record, "loss_validation"),
                    None,
                )
                for record in lasts
            ],
            "fixed duration, decayed; N of the parameters that a token uses",
        )
        if experts == 1:
            points: list[Point] = [
                (
                    _read_cell(record, "dense_parameter_count"),
                    _read_cell(record, "step") * _ROUTED_BATCH,
                    _read_cell(record, "loss_validation"),
                    None,
                )
                for curve in curves.values()
                for record in curve
                if _read_cell(record, "step") >= 20_000
            ]
            yield _make_family(
                f"{name}_curve",
                "routing",
                points,
                "points along one cosine schedule of 250,000 steps",
            )


def _read_quest(folder: Path) -> Iterator[Family]:
    """Yield the families of QuEST."""
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
        yield _make_family(
            f"quest_{name}", "quest", points, f"{note}; final, decayed; N without embeddings"
        )


def _read_xlstm(folder: Path) -> Iterator[Family]:
    """Yield the families of xLSTM."""
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
        yield _make_family(f"xlstm_{name}", "xlstm", points, note)


def _read_supercollapse(folder: Path) -> Iterator[Family]:
    """Yield the families of Supercollapse."""
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
        yield _make_family(f"collapse_{name}", "supercollapse", points, note)
    runs = read_frame(read_pickled((folder / "c5m_schedules.inert").read_bytes()))
    for schedule in ("linear", "multicosine"):
        points = []
        for i, history in enumerate(read_frame(record) for record in runs["history"]):
            if runs["schedule"][i] == schedule and runs["decay_frac"][i] == 1.0:
                loss = float(history["test_loss"][-1])
                points.append(
                    (float(runs["num_params"][i]), float(history["tokens"][-1]), loss, None)
                )
        yield _make_family(
            f"collapse_cifar5m_cross_{schedule}",
            "supercollapse",
            points,
            "not text; five sizes at one duration and one size at four; decayed",
        )


def _read_openwebtext2(folder: Path) -> Iterator[Family]:
    """Yield the families of Porian's models on OpenWebText2."""
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
            # A budget without runs has NaN in place of its columns.
            if not isinstance(columns[0], float):
                arrays = [read_array(column) for column in columns]
                points += [
                    (float(n), float(d), float(loss), float(flops))
                    for n, d, loss in zip(*arrays, strict=True)
                ]
        yield _make_family(
            f"openwebtext2_{setup}",
            "openwebtext2",
            points,
            "one point a size and budget, read along runs; the schedule is in the name",
            group="refined_web",
        )


def _read_opt(folder: Path) -> Iterator[Family]:
    """Yield the family of OPT."""
    points: list[Point] = [
        (
            _OPT_PARAMS[record["model_size"]],
            10.0 ** _read_cell(record, "num_token"),
            math.log(_read_cell(record, "ppl")),
            None,
        )
        for record in _read_records(folder / "opt_trajectories.csv")
    ]
    yield _make_family(
        "opt_curve",
        "colpret",
        points,
        "points along one schedule a size; N from the model's name",
        group="opt",
    )


def _read_mixing_laws(folder: Path) -> Iterator[Family]:
    """Yield the families of data mixing laws."""
    curves: dict[str, list[Point]] = {mix: [] for mix in _MIXES}
    for size, num_params in _MIX_PARAMS.items():
        for line in (folder / f"{size}.txt").read_text(encoding="utf-8").splitlines():
            checkpoint, validation_set, loss = line.split("\t")
            run, step = checkpoint.split("/")[-2:]
            mix = run.split("_RP_")[1].split("-")[0]
            if mix in curves and validation_set.endswith(".Pile-CC.bin"):
                curves[mix].append((num_params, float(step) * 2**20, float(loss), None))
    for mix, points in curves.items():
        yield _make_family(
            f"mixing_laws_red_pajama_{mix}_curve",
            "mixing_laws",
            points,
            "points along one schedule a size; loss on Pile-CC; N from the model's name, 2^20 "
            "tokens a step",
        )


FETCHED_READERS: Mapping[str, Callable[[Path], Iterator[Family]]] = {
    "chinchilla": _read_chinchilla,
    "steplaw": _read_steplaw,
    "loss_to_loss": _read_loss_to_loss,
    "misfitting": _read_misfitting,
    "isoflops": _read_isoflops,
    "olmo_ladder": _read_olmo_ladder,
    "open_lm": _read_open_lm,
    "routing": _read_routing,
    "quest": _read_quest,
    "xlstm": _read_xlstm,
    "supercollapse": _read_supercollapse,
    "openwebtext2": _read_openwebtext2,
    "colpret": _read_opt,
    "mixing_laws": _read_mixing_laws,
}
"""Readers of fetched sources, by the source's name; each takes the folder of its files."""


def format_families(families: list[Family]) -> str:
    """Return a line for each family with its runs, range of 6ND, source and licence."""

    def format_range(values: NDArray[np.float64]) -> str:
        return f"{values.min():.2g} to {values.max():.2g}"

    lines = [
        f"{family.name}: {family.table.num_runs} runs, 6ND "
        f"{format_range(6.0 * family.table.params * family.table.tokens)}; "
        f"group {family.group}; {family.source}; licence {family.licence}; {family.note}"
        for family in families
    ]
    return "\n".join(
        [
            *lines,
            f"{len(families)} families of {len({family.group for family in families})} studies",
        ]
    )


def main() -> None:
    """Fetch the missing files and list the families."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="Fetch nothing.")
    parser.add_argument(
        "--from",
        dest="folder",
        type=Path,
        metavar="DIR",
        help="Folder to take files from, by digest.",
    )
    options = parser.parse_args()
    read_file = read_url
    if options.folder is not None:
        try:
            read_file = index_folder(options.folder)
        except OSError as error:
            parser.error(f"--from {options.folder} cannot be read: {error}")
    failures = []
    for source in () if options.list else SOURCES:
        problem = download(source, read=read_file)
        print(
            f"{source.name} ({source.stated}, licence {source.licence}): "
            f"{problem or 'here, as expected'}"
        )
        failures += [source.name] if problem else []
    print(format_families(load_families()))
    if failures:
        raise SystemExit(
            f"not fetched: {', '.join(failures)}; the families listed above do not need them"
        )


if __name__ == "__main__":
    main()
