"""Tests of the estimated utilization and GPU hours of a main run.

Utilization is the share of the GPUs' peak FLOP/s that a run reaches over all hours paid. Its
estimate comes from a line fitted to published runs: the logarithm of the share depends on the
logarithms of the model's size and of the number of GPUs, and on whether the GPUs are fast.
"""

import dataclasses
import importlib.util
import math
import random
import statistics
import sys
from pathlib import Path

import pytest

from forerun._launcher.main_run.estimates.machine import MachineOptions
from forerun._launcher.main_run.estimates.main_run import MainRun, build_main_body, estimate_main
from forerun._launcher.main_run.estimates.reference_tables import MODELS
from forerun._launcher.main_run.estimates.utilization import (
    MAX_PUBLISHED_GPUS,
    MAX_PUBLISHED_SHARE,
    MIN_PUBLISHED_GPUS,
    PROXY_MFU,
    PUBLISHED,
)
from forerun._launcher.main_run.frozen.frozen import Parallelism
from forerun._proxies.core.flops import count_params

ROOT = Path(__file__).parents[4]
A100_FLOPS, H100_FLOPS = 312e12, 989e12
"""Peak FLOP/s in bfloat16."""
LLAMA_RUN = MainRun(
    shape=MODELS["llama-3-8b"].shape,
    num_tokens=2**40,
    batch_tokens=2**22,
    precision="bfloat16",
    layout=Parallelism(data_parallel_shard=1),
    optimizer="adamw",
)


@pytest.fixture(scope="module")
def published_runs():
    """Module of the benchmark that holds the published runs (`PUBLISHED_RUNS`) and fits them."""
    spec = importlib.util.spec_from_file_location(
        "published_runs", ROOT / "benchmarks/statistics/published_runs.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module here.
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def shares(published_runs):
    """Two predictions of the utilization of every published run, by the run's name.

    One comes from a line fitted to all other runs, the other from a line fitted to the runs of all
    other developers.
    """
    runs = published_runs.PUBLISHED_RUNS
    without_run, without_developer = {}, {}
    for run in runs:
        same_developer = [match for match in runs if match.developer == run.developer]
        without_run[run.name] = published_runs.predict_without([run], run)
        without_developer[run.name] = published_runs.predict_without(same_developer, run)
    return without_run, without_developer


def test_most_published_runs_are_inside_intervals_predicted_from_the_others(published_runs, shares):
    """The intervals cover 80 to 98 % of the runs on small and on large clusters.

    This holds without the run itself and without all runs of its developer.
    """
    small = [run for run in published_runs.PUBLISHED_RUNS if run.is_small]
    large = [run for run in published_runs.PUBLISHED_RUNS if not run.is_small]
    assert len(small) >= 20 and len(large) >= 30
    for predicted in shares:
        for runs in (small, large):
            inside = [published_runs.is_inside(run, predicted[run.name]) for run in runs]
            assert 0.8 <= sum(inside) / len(inside) <= 0.98
            ratios = [predicted[run.name].value / run.utilization for run in runs]
            assert 0.85 <= statistics.median(ratios) <= 1.15
        # Intervals that are wide enough cover every run, so their width is limited too.
        assert all(share.high / share.low < 4.6 for share in predicted.values())
        # A line without the cluster size misses these two.
        for name in ("tinyllama-1.1b", "phi-2"):
            (run,) = (run for run in published_runs.PUBLISHED_RUNS if run.name == name)
            assert published_runs.is_inside(run, predicted[name])


def test_number_of_gpus_improves_predictions_for_small_clusters(published_runs):
    """Without the number of GPUs, the share predicted for small clusters is too low.

    The median ratio of the predicted share to the published one is 0.73 without the number, and
    about one with it. Each prediction leaves out the runs of the same developer.
    """
    for by_gpus, low, high in ((False, 0.6, 0.8), (True, 0.88, 1.05)):
        ratios = []
        for run in published_runs.PUBLISHED_RUNS:
            if run.is_small:
                same_developer = [
                    match
                    for match in published_runs.PUBLISHED_RUNS
                    if match.developer == run.developer
                ]
                predicted = published_runs.predict_without(same_developer, run, by_gpus=by_gpus)
                ratios.append(predicted.value / run.utilization)
        assert low < statistics.median(ratios) < high


def test_fit_recovers_a_planted_effect_of_the_cluster_size(published_runs):
    rng = random.Random(0)
    runs = []
    for run in published_runs.PUBLISHED_RUNS:
        if run.num_gpus is not None:
            log_share = -1 - 0.2 * math.log(run.num_gpus / 128) + rng.gauss(0, 0.05)
            hours = run.gpu_hours * run.utilization / math.exp(log_share)
            runs.append(dataclasses.replace(run, gpu_hours=hours))
    line = published_runs.fit_line(runs)
    assert line.gpus_slope == pytest.approx(-0.2, abs=0.05)
    for num_gpus in (8, 128, 4096):
        planted = math.exp(-1 - 0.2 * math.log(num_gpus / 128))
        share = line.estimate_share(params=1e10, peak_flops=A100_FLOPS, num_gpus=num_gpus)
        assert share.value == pytest.approx(planted, rel=0.15)


def test_missing_number_of_gpus_is_estimated_from_the_flops(published_runs):
    (run,) = (run for run in published_runs.PUBLISHED_RUNS if run.name == "llama-2-70b")
    count = published_runs.estimate_num_gpus(run, published_runs.PUBLISHED_RUNS)
    assert 500 < count < 5000
    slow = dataclasses.replace(run, gpu_hours=9 * run.gpu_hours)
    assert published_runs.estimate_num_gpus(slow, published_runs.PUBLISHED_RUNS) == count, (
        "independent of the hours"
    )


def test_estimates_use_the_number_of_gpus():
    few = estimate_main(LLAMA_RUN, MachineOptions(num_gpus=8))
    many = estimate_main(LLAMA_RUN, MachineOptions(num_gpus=2048))
    assert few.gpu_hours.value < 0.7 * many.gpu_hours.value
    assert few.mfu.low < 0.39 < few.mfu.high, "the share that torchtitan reports, compiled"
    for estimate in (few, many):
        num_steps = LLAMA_RUN.num_tokens / LLAMA_RUN.batch_tokens
        seconds = estimate.days.value * 24 * 60 * 60
        # Five percent of the time is not spent in steps.
        assert estimate.step_seconds.value * num_steps == pytest.approx(0.95 * seconds)


def test_interval_widens_beyond_the_published_cluster_sizes(published_runs):
    counts = [run.num_gpus for run in published_runs.PUBLISHED_RUNS if run.num_gpus is not None]
    assert (min(counts), max(counts)) == (MIN_PUBLISHED_GPUS, MAX_PUBLISHED_GPUS)
    for num_gpus, nearest in ((1, MIN_PUBLISHED_GPUS), (100_000, MAX_PUBLISHED_GPUS)):
        beyond = PUBLISHED.estimate_share(params=2e9, peak_flops=H100_FLOPS, num_gpus=num_gpus)
        edge = PUBLISHED.estimate_share(params=2e9, peak_flops=H100_FLOPS, num_gpus=nearest)
        assert beyond.value == edge.value
        assert beyond.low < 0.8 * edge.low
        assert beyond.high > edge.high or edge.high == MAX_PUBLISHED_SHARE
        assert "widened" in beyond.source and "widened" not in edge.source
    highest = max(run.utilization for run in published_runs.PUBLISHED_RUNS)
    assert highest == pytest.approx(MAX_PUBLISHED_SHARE, abs=0.005)
    # The line alone would give more than the largest published share, which is the upper limit.
    limited = PUBLISHED.estimate_share(params=1e11, peak_flops=A100_FLOPS, num_gpus=8)
    assert limited.value == pytest.approx(MAX_PUBLISHED_SHARE)
    assert limited.high == MAX_PUBLISHED_SHARE


def test_shipped_line_is_the_fit_of_all_published_runs(published_runs):
    fitted = published_runs.fit_line(published_runs.PUBLISHED_RUNS)
    assert dataclasses.astuple(PUBLISHED) == pytest.approx(dataclasses.astuple(fitted), rel=1e-9)
    small = PUBLISHED.estimate_share(params=1e9, peak_flops=H100_FLOPS, num_gpus=128).value
    large = PUBLISHED.estimate_share(params=1e11, peak_flops=H100_FLOPS, num_gpus=128).value
    large_on_slow_gpus = PUBLISHED.estimate_share(
        params=1e11, peak_flops=A100_FLOPS, num_gpus=128
    ).value
    assert small < large < large_on_slow_gpus


def test_documentation_states_the_coverage(published_runs, shares):
    page = " ".join((ROOT / "docs/estimates.md").read_text().split())
    for run in published_runs.PUBLISHED_RUNS:
        assert run.shape is None or count_params(run.shape).total == pytest.approx(
            run.params, rel=0.02
        )
    for predicted in shares:
        for is_small in (True, False):
            runs = [run for run in published_runs.PUBLISHED_RUNS if run.is_small is is_small]
            assert published_runs.summarize(runs, predicted) in page


def test_estimate_outside_the_published_runs_warns_with_advice():
    assert PUBLISHED.estimate_share(params=1e6, peak_flops=H100_FLOPS, num_gpus=8) == PROXY_MFU
    tiny_shape = dataclasses.replace(
        LLAMA_RUN.shape,
        num_layers=2,
        width=128,
        num_heads=2,
        num_kv_heads=2,
        ffn_width=256,
        vocab_size=256,
        seq_len=512,
    )
    tiny_run = dataclasses.replace(LLAMA_RUN, shape=tiny_shape)
    num_gpus = 8
    body = build_main_body(estimate_main(tiny_run, MachineOptions(num_gpus=num_gpus)))
    assert any(
        "--tokens-per-second" in text and "within a factor of" in text for text in body["warnings"]
    )
    # A tiny run of measured speed needs no warning, nor does a run of a published size.
    measured = MachineOptions(num_gpus=num_gpus, tokens_per_gpu_second=1e6)
    unmeasured = MachineOptions(num_gpus=num_gpus)
    for options, run in ((measured, tiny_run), (unmeasured, LLAMA_RUN)):
        body = build_main_body(estimate_main(run, options))
        assert not any("within a factor" in text for text in body["warnings"])
