"""The benchmark of the coordinate check: its draws repeat, and a stopped run goes on where it
was.
"""

import json
from pathlib import Path
from typing import get_args

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "statistics")
    import coordinate_checks

    return coordinate_checks


def test_draws_repeat_and_cover_what_the_claim_names(benchmark):
    draws = [benchmark.draw("second", index) for index in range(benchmark.NUM_RIGHT)]
    assert draws == [benchmark.draw("second", index) for index in range(benchmark.NUM_RIGHT)]
    assert {draw.vocab_size for draw in draws} == {256, 512, 4096, 16384, 50257}
    assert {draw.axis for draw in draws} == {"width", "depth"}
    assert {draw.muon for draw in draws} == {draw.tied for draw in draws} == {True, False}
    assert any(draw.is_user_model for draw in draws) and len({draw.corpus for draw in draws}) == 5
    assert all(max(draw.points) <= 128 for draw in draws if draw.vocab_size >= 4096)
    mistakes = set(get_args(benchmark.Mistake)) - {"none"}
    assert mistakes == set(benchmark.MISTAKE_NAMES)
    assert len(benchmark.list_jobs()) == 400 + 20 * len(mistakes)


def test_a_stopped_run_is_resumed(benchmark, monkeypatch, tmp_path):
    jobs, results, ran = benchmark.list_jobs()[:3], tmp_path / "results.jsonl", []
    monkeypatch.setattr(benchmark, "list_jobs", lambda: jobs)
    monkeypatch.setattr(benchmark, "open_corpus", lambda *arguments: None)
    monkeypatch.setattr(benchmark, "describe", lambda *arguments: {"outcome": "passes"})

    def run_check(setting, store):
        if len(ran) == 2:
            raise KeyboardInterrupt
        ran.append(setting)

    monkeypatch.setattr(benchmark, "run_check", run_check)
    with pytest.raises(KeyboardInterrupt):
        benchmark.run("second", results, tmp_path)
    assert len(results.read_text().splitlines()) == 2
    monkeypatch.setattr(benchmark, "run_check", lambda setting, store: ran.append(setting))
    benchmark.run("second", results, tmp_path)
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [(row["mistake"], row["index"]) for row in rows] == jobs and len(ran) == 3
