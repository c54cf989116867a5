"""Public families: what is fetched is checked before it is used, what is not there is left out,
nothing is mixed up.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scaling_fits.laws import law

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def modules():
    """`benchmarks/statistics/datasets.py` and the module it imports, under names no library has."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "statistics"))
    try:
        spec = importlib.util.spec_from_file_location(
            "benchmarks_datasets", ROOT / "benchmarks" / "statistics" / "datasets.py"
        )
        datasets = importlib.util.module_from_spec(spec)
        sys.modules["benchmarks_datasets"] = datasets
        spec.loader.exec_module(datasets)
        yield datasets, sys.modules["downloads"]
    finally:
        sys.path.remove(str(ROOT / "benchmarks" / "statistics"))
        sys.modules.pop("benchmarks_datasets", None)
        sys.modules.pop("downloads", None)


def _source(downloads, contents):
    paths = ("a/one=1.csv", "a/two.csv")
    digests = {
        path: downloads.compute_digest(content)
        for path, content in zip(paths, contents, strict=True)
    }
    return downloads.Source(
        name="toy", repository="someone/runs", commit="0" * 40, licence="MIT", digests=digests
    )


def test_files_are_fetched_once_and_kept(modules, tmp_path):
    _, downloads = modules
    contents = [b"one", b"two"]
    toy, requested = _source(downloads, contents), []

    def read(url, digest):
        requested.append(url)
        return contents[len(requested) - 1]

    assert downloads.download(toy, tmp_path, read) is None
    assert downloads.is_here(toy, tmp_path)
    assert (
        requested[0] == f"https://raw.githubusercontent.com/someone/runs/{'0' * 40}/a/one%3D1.csv"
    )
    assert downloads.download(toy, tmp_path, read) is None
    assert len(requested) == 2
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == ["one=1.csv", "two.csv"]


def test_files_of_another_digest_are_not_kept(modules, tmp_path):
    _, downloads = modules
    toy = _source(downloads, [b"one", b"two"])
    problem = downloads.download(toy, tmp_path, lambda url, digest: b"three")
    assert "sha256" in problem
    assert list(tmp_path.iterdir()) == []
    swapped = iter([b"two", b"one"])
    assert downloads.download(toy, tmp_path, lambda url, digest: next(swapped)) is not None


def test_a_changed_file_is_not_used_and_is_fetched_again(modules, tmp_path):
    _, downloads = modules

    def read(url, digest):
        return b"two" if "two" in url else b"one"

    toy = _source(downloads, [b"one", b"two"])
    downloads.download(toy, tmp_path, read)
    (tmp_path / "toy" / "two.csv").write_bytes(b"2")
    assert not downloads.is_here(toy, tmp_path)
    assert downloads.download(toy, tmp_path, read) is None
    assert downloads.is_here(toy, tmp_path)


def test_files_are_taken_from_a_folder_by_digest(modules, tmp_path):
    """Neither names nor places matter; a source of which one file is missing is not taken."""
    _, downloads = modules
    toy = _source(downloads, [b"one", b"two"])
    folder, target = tmp_path / "folder", tmp_path / "data"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "x.bin").write_bytes(b"one")
    (folder / "two.csv").write_bytes(b"not two")
    problem = downloads.download(toy, target, downloads.index_folder(folder))
    assert "two.csv" in problem and downloads.compute_digest(b"two") in problem
    assert not target.exists()
    (folder / "y").write_bytes(b"two")
    os.mkfifo(folder / "pipe")
    assert downloads.download(toy, target, downloads.index_folder(folder)) is None
    assert (target / "toy" / "two.csv").read_bytes() == b"two"
    with pytest.raises(OSError, match="nowhere"):
        downloads.index_folder(tmp_path / "nowhere")


def test_every_source_has_digests_and_names_that_differ(modules):
    _, downloads = modules
    manifest = downloads.read_manifest()
    assert set(manifest) == {each.name for each in downloads.SOURCES}
    for each in downloads.SOURCES:
        files = each.list_files(Path())
        assert len({path for _, path, _ in files}) == len(files) > 0, each.name
        assert all(len(digest) == 64 and each.commit in url for url, _, digest in files), each.name


def test_a_missing_folder_is_a_usage_error(tmp_path):
    command = [
        sys.executable,
        ROOT / "benchmarks" / "statistics" / "datasets.py",
        "--from",
        tmp_path / "nowhere",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "nowhere" in result.stderr


def test_families_beside_the_checkout(modules, tmp_path):
    datasets, _ = modules
    if not datasets.SHARED.is_dir():
        pytest.skip(f"no public data at {datasets.SHARED}")
    found = {each.name: each for each in datasets.families(downloaded=tmp_path)}
    assert len(found) == 22
    assert {each.group for each in found.values()} == {
        "gemstones",
        "open_lm",
        "refined_web",
        "datablations",
    }
    assert found["gemstones_cool_end"].table.num_runs == 199
    assert found["datablations_fresh"].table.num_runs == 41
    web = found["refined_web_tuned_short_const_standard_val"].table
    assert web.budget is not None and len(np.unique(web.budget)) >= 7
    assert np.allclose(found["open_lm_red_pajama_on_c4"].table.loss.min(), 2.54, atol=0.3)


@pytest.fixture(scope="module")
def fetched_families(modules, tmp_path_factory):
    """Families of the fetched sources by name; only where `make data` has been run."""
    datasets, downloads = modules
    if not all(downloads.is_here(each) for each in downloads.SOURCES):
        pytest.skip(f"`make data` has not filled {downloads.FOLDER.name}")
    return {each.name: each for each in datasets.families(shared=tmp_path_factory.mktemp("empty"))}


def test_families_that_were_fetched(fetched_families):
    """Numbers published for these sets, or counted in their files."""
    found = fetched_families
    assert found["chinchilla"].table.num_runs == 240
    fit = law.fit_law(found["chinchilla"].table, "chinchilla")
    # the optimum of arXiv 2404.10102's objective
    assert fit.objective == pytest.approx(0.00101827401780, rel=1e-6)
    counts = {
        name: found[name].table.num_runs
        for name in (
            "steplaw",
            "misfitting",
            "loss_to_loss_starcoder",
            "marin_nemotron",
            "olmo_ladder_on_c4",
            "open_lm_rw_on_c4",
        )
    }
    assert list(counts.values()) == [17, 81, 84, 96, 25, 35]
    sweep = found["loss_to_loss_starcoder"].table
    assert np.allclose(sweep.flops, sweep.budget)
    assert all(
        each.licence.startswith("none")
        for each in found.values()
        if each.group in ("chinchilla", "steplaw")
    )


LATER_STUDIES = {"routing", "quest", "xlstm", "supercollapse", "opt", "mixing_laws"}


def test_later_families_that_were_fetched(fetched_families):
    """Counts and losses of the published tables."""
    found = fetched_families
    later = [
        each
        for each in found.values()
        if each.group in LATER_STUDIES or each.name.startswith("openwebtext2")
    ]
    assert len(later) == 33
    assert {each.group for each in later} == LATER_STUDIES | {"refined_web"}
    # arXiv 2202.01169: 1.3B dense parameters after 130B tokens.
    assert found["routing_dense"].table.loss.min() == pytest.approx(2.242, abs=0.001)
    # arXiv 2502.05003: 100 tokens a parameter.
    ratio = found["quest_bf16"].table.tokens / found["quest_bf16"].table.params
    assert np.allclose(ratio, 100, rtol=0.05)
    budgets = found["xlstm_llama_ctx8192"].table.budget
    assert len(np.unique(budgets)) == 4
    assert np.allclose(found["xlstm_llama_ctx8192"].table.flops / budgets, 1, atol=0.15)
    # The measured end of the OpenWebText2 ladder with a short warmup.
    short = found["openwebtext2_base_short_chinchilla_standard_val"].table
    index = np.argmin(np.abs(np.log(short.params / 9.02e8)) + np.abs(np.log(short.tokens / 4.73e9)))
    assert short.loss[index] == pytest.approx(2.660, abs=0.001)
    assert len(np.unique(found["opt_curve"].table.params)) == 6
