"""Hours that are paid, held against the runs whose hours were published."""

import dataclasses
import importlib.util
import math
import random
import statistics
import sys
from pathlib import Path

import pytest
from tiny_study import ask, write_plan

from launcher.base.reference import MODELS
from launcher.estimates.machine import MachineOptions
from launcher.estimates.main_run import MainRun, estimate_main, main_body
from launcher.estimates.utilization import (
    MAX_PUBLISHED_GPUS,
    MAX_PUBLISHED_SHARE,
    MIN_PUBLISHED_GPUS,
    PROXY_MFU,
    PUBLISHED,
)
from launcher.frozen.frozen import Parallelism
from proxies.core.flops import count_params

ROOT = Path(__file__).parents[3]
ONE = Parallelism(data_parallel_shard=1)


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location(
        "published_runs", ROOT / "benchmarks/statistics/published_runs.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its records look there for their own types
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def shares(table):
    """Shares of all published runs: each run left out, and each with all runs of its developer."""
    runs = table.PUBLISHED_RUNS
    groups = {
        run.developer: [other for other in runs if other.developer == run.developer] for run in runs
    }
    alone = {run.name: table.predict_without([run], run) for run in runs}
    return alone, {run.name: table.predict_without(groups[run.developer], run) for run in runs}


def test_most_published_runs_lie_inside_their_intervals_by_the_others(table, shares):
    """The share inside, on small and on large clusters, without the run and without its
    developer.
    """
    small = [run for run in table.PUBLISHED_RUNS if run.is_small]
    large = [run for run in table.PUBLISHED_RUNS if not run.is_small]
    assert len(small) >= 20 and len(large) >= 30
    for predicted in shares:
        for runs in (small, large):
            held = [table.is_inside(run, predicted[run.name]) for run in runs]
            assert 0.8 <= sum(held) / len(held) <= 0.98
            ratios = [predicted[run.name].value / run.utilization for run in runs]
            assert 0.85 <= statistics.median(ratios) <= 1.15
        assert all(share.high / share.low < 4.6 for share in predicted.values())
        for name in ("tinyllama-1.1b", "phi-2"):  # outside of the line without the cluster
            (run,) = (run for run in table.PUBLISHED_RUNS if run.name == name)
            assert table.is_inside(run, predicted[name])


def test_the_number_of_gpus_helps_on_small_clusters(table):
    """Without it, runs on small clusters take 0.73 of the predicted hours, their developer left
    out.
    """
    for by_gpus, low, high in ((False, 0.6, 0.8), (True, 0.88, 1.05)):
        ratios = []
        for run in table.PUBLISHED_RUNS:
            if run.is_small:
                developer = [
                    other for other in table.PUBLISHED_RUNS if other.developer == run.developer
                ]
                ratios.append(
                    table.predict_without(developer, run, by_gpus=by_gpus).value / run.utilization
                )
        assert low < statistics.median(ratios) < high


def test_a_planted_effect_of_the_cluster_is_found(table):
    rng = random.Random(0)
    runs = []
    for run in table.PUBLISHED_RUNS:
        if run.num_gpus is not None:
            log_share = -1 - 0.2 * math.log(run.num_gpus / 128) + rng.gauss(0, 0.05)
            hours = run.gpu_hours * run.utilization / math.exp(log_share)
            runs.append(dataclasses.replace(run, gpu_hours=hours))
    line = table.fit_line(runs)
    assert line.gpus_slope == pytest.approx(-0.2, abs=0.05)
    for num_gpus in (8, 128, 4096):
        planted = math.exp(-1 - 0.2 * math.log(num_gpus / 128))
        assert line.share(1e10, 312e12, num_gpus).value == pytest.approx(planted, rel=0.15)


def test_an_unpublished_number_of_gpus_is_the_usual_one_for_the_flops(table):
    (run,) = (run for run in table.PUBLISHED_RUNS if run.name == "llama-2-70b")
    count = table.estimate_num_gpus(run, table.PUBLISHED_RUNS)
    assert 500 < count < 5000
    slow = dataclasses.replace(run, gpu_hours=9 * run.gpu_hours)
    assert table.estimate_num_gpus(slow, table.PUBLISHED_RUNS) == count, "not by what is predicted"


def test_estimates_use_the_number_of_gpus():
    run = MainRun(
        shape=MODELS["llama-3-8b"].shape,
        num_tokens=2**40,
        batch_tokens=2**22,
        precision="bfloat16",
        layout=ONE,
        optimizer="adamw",
    )
    few, many = (estimate_main(run, MachineOptions(num_gpus=num_gpus)) for num_gpus in (8, 2048))
    assert few.gpu_hours.value < 0.7 * many.gpu_hours.value
    assert few.mfu.low < 0.39 < few.mfu.high, "torchtitan's, compiled"
    for found in (few, many):
        steps = found.step_seconds.value * run.num_tokens / run.batch_tokens
        assert steps == pytest.approx(0.95 * found.days.value * 86_400), (
            "steps take less than all days"
        )


def test_beyond_the_published_clusters_the_interval_widens(table):
    counts = [run.num_gpus for run in table.PUBLISHED_RUNS if run.num_gpus is not None]
    assert (min(counts), max(counts)) == (MIN_PUBLISHED_GPUS, MAX_PUBLISHED_GPUS)
    for num_gpus, nearest in ((1, MIN_PUBLISHED_GPUS), (100_000, MAX_PUBLISHED_GPUS)):
        beyond, edge = (PUBLISHED.share(2e9, 989e12, count) for count in (num_gpus, nearest))
        assert beyond.value == edge.value
        assert beyond.low < 0.8 * edge.low
        assert beyond.high > edge.high or edge.high == MAX_PUBLISHED_SHARE
        assert "widened" in beyond.source and "widened" not in edge.source
    highest = max(run.utilization for run in table.PUBLISHED_RUNS)
    assert highest == pytest.approx(MAX_PUBLISHED_SHARE, abs=0.005)
    assert PUBLISHED.share(1e11, 312e12, 8).value == pytest.approx(MAX_PUBLISHED_SHARE)
    assert PUBLISHED.share(1e11, 312e12, 8).high == MAX_PUBLISHED_SHARE


def test_the_line_is_the_one_through_all_published_runs(table):
    fitted = table.fit_line(table.PUBLISHED_RUNS)
    assert dataclasses.astuple(PUBLISHED) == pytest.approx(dataclasses.astuple(fitted), rel=1e-9)
    low, middle, high = (
        PUBLISHED.share(*at, 128).value for at in ((1e9, 989e12), (1e11, 989e12), (1e11, 312e12))
    )
    assert low < middle < high


def test_the_page_says_how_many_published_runs_lie_inside(table, shares):
    page = " ".join((ROOT / "docs/estimates.md").read_text().split())
    for run in table.PUBLISHED_RUNS:
        assert run.shape is None or count_params(run.shape).total == pytest.approx(
            run.params, rel=0.02
        )
    for predicted in shares:
        for is_small in (True, False):
            runs = [run for run in table.PUBLISHED_RUNS if run.is_small is is_small]
            assert table.summarize(runs, predicted) in page


def test_what_no_run_was_published_of_is_told_and_what_narrows_it():
    assert PUBLISHED.share(1e6, 989e12, 8) == PROXY_MFU
    run = MainRun(
        shape=MODELS["llama-3-8b"].shape,
        num_tokens=2**40,
        batch_tokens=2**22,
        precision="bfloat16",
        layout=ONE,
        optimizer="adamw",
    )
    small = dataclasses.replace(
        run.shape,
        num_layers=2,
        width=128,
        num_heads=2,
        num_kv_heads=2,
        ffn_width=256,
        vocab_size=256,
        seq_len=512,
    )
    tiny = dataclasses.replace(run, shape=small)
    said = main_body(estimate_main(tiny, MachineOptions(num_gpus=8)))["warnings"]
    assert any("--tokens-per-second" in text and "within a factor of" in text for text in said)
    measured = main_body(estimate_main(tiny, MachineOptions(num_gpus=8, tokens_per_gpu_second=1e6)))
    assert not any("within a factor" in text for text in measured["warnings"])
    assert not any(
        "within a factor" in text
        for text in main_body(estimate_main(run, MachineOptions(num_gpus=8)))["warnings"]
    )


ON_GPUS = (
    "--set",
    "cluster.backend=ray",
    "--set",
    "cluster.worker_gpus=1.0",
    "--set",
    "cluster.num_workers=8",
)


def test_a_wide_price_names_what_narrows_it(tmp_path):
    """A study was priced at USD 295 [38, 3873]."""
    body = ask("estimate", write_plan(tmp_path), *ON_GPUS)[1]
    low, high = body["total"]["usd"]["interval"]
    (said,) = [text for text in body["warnings"] if "--study STUDY" in text]
    assert high > 10 * low and f"{high / low:.3g}" in said
