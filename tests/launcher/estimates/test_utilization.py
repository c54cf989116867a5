"""Hours that are paid, held against the runs whose hours were published."""

import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
from tiny_study import ask, write_plan

from launcher.base.reference import MODELS
from launcher.estimates.machine import MachineOptions
from launcher.estimates.main_run import MainRun, estimate_main, main_body
from launcher.estimates.utilization import PROXY_MFU, PUBLISHED
from launcher.frozen.frozen import Parallelism
from proxies.core.flops import count_params

ROOT = Path(__file__).parents[3]
ONE = Parallelism(data_parallel_shard=1)


@pytest.fixture(scope="module")
def table():
    spec = importlib.util.spec_from_file_location("published_runs", ROOT / "benchmarks/published_runs.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its records look there for their own types
    spec.loader.exec_module(module)
    return module


def test_most_published_runs_lie_inside_their_intervals_by_the_others(table):
    """Each left out in turn, and each with its whole series; small models and fast chips reach less."""
    assert len(table.PUBLISHED_RUNS) >= 12
    held = [table.inside(run, table.left_out((run,), run)) for run in table.PUBLISHED_RUNS]
    assert 0.80 <= sum(held) / len(held) <= 0.95
    series = [
        tuple(other for other in table.PUBLISHED_RUNS if table.team(other) == table.team(run))
        for run in table.PUBLISHED_RUNS
    ]
    apart = [
        table.inside(run, table.left_out(those, run)) for run, those in zip(table.PUBLISHED_RUNS, series, strict=True)
    ]
    assert 0.80 <= sum(apart) / len(apart) <= 0.95
    shares = [table.left_out((run,), run) for run in table.PUBLISHED_RUNS]
    assert all(share.high / share.low < 3 for share in shares)
    assert (
        PUBLISHED.share(1e9, 989e12).value < PUBLISHED.share(1e11, 989e12).value < PUBLISHED.share(1e11, 312e12).value
    )


def test_the_line_is_the_one_through_all_published_runs(table):
    fitted = table.fitted(table.PUBLISHED_RUNS)
    assert dataclasses.astuple(PUBLISHED) == pytest.approx(dataclasses.astuple(fitted), rel=1e-9)


def test_the_page_says_how_many_published_runs_lie_inside(table):
    page = " ".join((ROOT / "docs/estimates.md").read_text().split())
    for run in table.PUBLISHED_RUNS:
        assert run.shape is None or count_params(run.shape).total == pytest.approx(run.params, rel=0.02)
    held = sum(table.inside(run, table.left_out((run,), run)) for run in table.PUBLISHED_RUNS)
    assert f"{held} of {len(table.PUBLISHED_RUNS)} lie inside" in page


def test_what_no_run_was_published_of_is_told_and_what_narrows_it():
    assert PUBLISHED.share(1e6, 989e12) == PROXY_MFU
    run = MainRun(
        shape=MODELS["llama-3-8b"].shape,
        num_tokens=2**40,
        batch_tokens=2**22,
        precision="bfloat16",
        layout=ONE,
        optimizer="adamw",
    )
    small = dataclasses.replace(run.shape, num_layers=2, width=128, num_heads=2, num_kv_heads=2, ffn_width=256,
                                vocab_size=256, seq_len=512)  # fmt: skip
    tiny = dataclasses.replace(run, shape=small)
    said = main_body(estimate_main(tiny, MachineOptions(num_gpus=8)))["warnings"]
    assert any("--tokens-per-second" in text and "within a factor of" in text for text in said)
    measured = main_body(estimate_main(tiny, MachineOptions(num_gpus=8, tokens_per_gpu_second=1e6)))
    assert not any("within a factor" in text for text in measured["warnings"])
    assert not any(
        "within a factor" in text for text in main_body(estimate_main(run, MachineOptions(num_gpus=8)))["warnings"]
    )


ON_GPUS = ("--set", "cluster.backend=ray", "--set", "cluster.worker_gpus=1.0", "--set", "cluster.num_workers=8")


def test_a_wide_price_names_what_narrows_it(tmp_path):
    """A study was priced at USD 295 [38, 3873]."""
    body = ask("estimate", write_plan(tmp_path), *ON_GPUS)[1]
    low, high = body["total"]["usd"]["interval"]
    (said,) = [text for text in body["warnings"] if "--study STUDY" in text]
    assert high > 10 * low and f"{high / low:.3g}" in said
