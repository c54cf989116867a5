"""Public families: what is fetched is checked before it is used, what is not there is left out, nothing is mixed up."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from scaling_fits.laws import law

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def modules():
    """`benchmarks/datasets.py` and the module it imports, under names no library has."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("benchmarks_datasets", ROOT / "benchmarks" / "datasets.py")
        datasets = importlib.util.module_from_spec(spec)
        sys.modules["benchmarks_datasets"] = datasets
        spec.loader.exec_module(datasets)
        yield datasets, sys.modules["downloads"]
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        sys.modules.pop("benchmarks_datasets", None)
        sys.modules.pop("downloads", None)


def _source(downloads, contents, **changes):
    fields = {
        "name": "toy", "repository": "someone/runs", "commit": "0" * 40, "licence": "MIT",
        "paths": ("a/one=1.csv", "a/two.csv"), "sha256": downloads.digest(contents),
    }  # fmt: skip
    return downloads.Source(**(fields | changes))


def test_files_are_fetched_once_and_kept(modules, tmp_path):
    _, downloads = modules
    contents = [b"one", b"two"]
    toy, asked = _source(downloads, contents), []

    def read(url):
        asked.append(url)
        return contents[len(asked) - 1]

    assert downloads.download(toy, tmp_path, read) is None
    assert downloads.is_here(toy, tmp_path)
    assert asked[0] == f"https://raw.githubusercontent.com/someone/runs/{'0' * 40}/a/one%3D1.csv"
    assert downloads.download(toy, tmp_path, read) is None
    assert len(asked) == 2
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == ["one=1.csv", "two.csv"]


def test_files_of_another_digest_are_not_kept(modules, tmp_path):
    _, downloads = modules
    toy = _source(downloads, [b"one", b"two"])
    problem = downloads.download(toy, tmp_path, lambda url: b"three")
    assert "not those of the digest" in problem
    assert list(tmp_path.iterdir()) == []
    swapped = iter([b"two", b"one"])
    assert downloads.download(toy, tmp_path, lambda url: next(swapped)) is not None


def test_a_changed_file_is_not_used_and_is_fetched_again(modules, tmp_path):
    _, downloads = modules
    toy = _source(downloads, [b"one", b"two"])
    downloads.download(toy, tmp_path, lambda url: b"two" if "two" in url else b"one")
    (tmp_path / "toy" / "two.csv").write_bytes(b"2")
    assert not downloads.is_here(toy, tmp_path)
    assert downloads.download(toy, tmp_path, lambda url: b"two" if "two" in url else b"one") is None
    assert downloads.is_here(toy, tmp_path)


def test_families_beside_the_checkout(modules, tmp_path):
    datasets, _ = modules
    if not datasets.SHARED.is_dir():
        pytest.skip(f"no public data at {datasets.SHARED}")
    found = {each.name: each for each in datasets.families(downloaded=tmp_path)}
    assert len(found) == 22
    assert {each.group for each in found.values()} == {"gemstones", "open_lm", "refined_web", "datablations"}
    assert found["gemstones_cool_end"].table.num_runs == 199
    assert found["datablations_fresh"].table.num_runs == 41
    web = found["refined_web_tuned_short_const_standard_val"].table
    assert web.budget is not None and len(np.unique(web.budget)) >= 7
    assert np.allclose(found["open_lm_red_pajama_on_c4"].table.loss.min(), 2.54, atol=0.3)


def test_families_that_were_fetched(modules, tmp_path):
    """Numbers published for these sets, or counted in their files; only where `make data` has been run."""
    datasets, downloads = modules
    if not all(downloads.is_here(each) for each in downloads.SOURCES):
        pytest.skip(f"`make data` has not filled {downloads.FOLDER.name}")
    found = {each.name: each for each in datasets.families(shared=tmp_path)}
    assert found["chinchilla"].table.num_runs == 240
    fit = law.fit_law(found["chinchilla"].table, "chinchilla")
    assert fit.objective == pytest.approx(0.00101827401780, rel=1e-6)  # the optimum of arXiv 2404.10102's objective
    counts = {name: found[name].table.num_runs for name in (
        "steplaw", "misfitting", "loss_to_loss_starcoder", "marin_nemotron", "olmo_ladder_on_c4", "open_lm_rw_on_c4",
    )}  # fmt: skip
    assert list(counts.values()) == [17, 81, 84, 96, 25, 35]
    sweep = found["loss_to_loss_starcoder"].table
    assert np.allclose(sweep.flops, sweep.budget)
    assert all(each.licence.startswith("none") for each in found.values() if each.group in ("chinchilla", "steplaw"))
