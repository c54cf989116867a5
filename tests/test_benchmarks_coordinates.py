"""Tests of the benchmark of the coordinate check: its random settings repeat, and it resumes."""

import json
from pathlib import Path
from typing import get_args

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def benchmark(monkeypatch):
    """The module `benchmarks/statistics/coordinate_checks.py`."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "statistics")
    import coordinate_checks

    return coordinate_checks


def test_random_settings_repeat_and_cover_every_option(benchmark):
    draws = [benchmark.draw("second", index) for index in range(benchmark.NUM_RIGHT)]
    assert draws == [benchmark.draw("second", index) for index in range(benchmark.NUM_RIGHT)]
    assert {draw.vocab_size for draw in draws} == {256, 512, 4096, 16384, 50257}
    assert {draw.axis for draw in draws} == {"width", "depth"}
    assert {draw.muon for draw in draws} == {draw.tied for draw in draws} == {True, False}
    assert any(draw.is_user_model for draw in draws) and len({draw.corpus for draw in draws}) == 5
    assert all(max(draw.points) <= 128 for draw in draws if draw.vocab_size >= 4096)
    mistakes = set(get_args(benchmark.Mistake)) - {"none"}
    assert mistakes == set(benchmark.MISTAKE_NAMES)
    # 400 checks without a mistake, and 20 of each mistake
    assert len(benchmark.list_jobs()) == 400 + 20 * len(mistakes)


def test_stopped_benchmark_resumes_without_repeating_a_check(benchmark, monkeypatch, tmp_path):
    jobs = benchmark.list_jobs()[:3]
    results = tmp_path / "results.jsonl"
    checked = []
    monkeypatch.setattr(benchmark, "list_jobs", lambda: jobs)
    monkeypatch.setattr(benchmark, "open_corpus", lambda *arguments: None)
    monkeypatch.setattr(benchmark, "make_row", lambda *arguments: {"outcome": "passes"})

    def run_check(setting, store):
        if len(checked) == 2:
            raise KeyboardInterrupt
        checked.append(setting)

    monkeypatch.setattr(benchmark, "run_check", run_check)
    with pytest.raises(KeyboardInterrupt):
        benchmark.run_missing_checks("second", results, tmp_path)
    assert len(results.read_text().splitlines()) == 2
    monkeypatch.setattr(benchmark, "run_check", lambda setting, store: checked.append(setting))
    benchmark.run_missing_checks("second", results, tmp_path)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["mistake"], row["index"]) for row in rows] == jobs and len(checked) == 3
