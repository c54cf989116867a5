"""Tests of the public data sets of the benchmarks: downloads are checked, and families are correct.

A family is a table of published runs; it is left out if its files are not on this machine.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from forerun._scaling_fits.laws import law

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def modules():
    """The benchmarks' modules `datasets` and `downloads`.

    `datasets` gets another name, because a library has the same name.
    """
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


def make_source(downloads, contents):
    """Return a source of two files with these contents."""
    paths = ("a/one=1.csv", "a/two.csv")
    digests = {
        path: downloads.compute_digest(content)
        for path, content in zip(paths, contents, strict=True)
    }
    return downloads.Source(
        name="toy", repository="someone/runs", commit="0" * 40, licence="MIT", digests=digests
    )


def test_files_are_downloaded_once(modules, tmp_path):
    _, downloads = modules
    contents = [b"one", b"two"]
    source = make_source(downloads, contents)
    requested = []

    def read(url, digest):
        requested.append(url)
        return contents[len(requested) - 1]

    assert downloads.download(source, tmp_path, read) is None
    assert downloads.is_here(source, tmp_path)
    folder_url = f"https://raw.githubusercontent.com/someone/runs/{'0' * 40}/a"
    assert requested[0] == f"{folder_url}/one%3D1.csv"
    assert downloads.download(source, tmp_path, read) is None
    assert len(requested) == 2
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == ["one=1.csv", "two.csv"]


def test_files_with_a_wrong_digest_are_refused(modules, tmp_path):
    _, downloads = modules
    source = make_source(downloads, [b"one", b"two"])
    problem = downloads.download(source, tmp_path, lambda url, digest: b"three")
    assert "sha256" in problem
    assert list(tmp_path.iterdir()) == []
    swapped = iter([b"two", b"one"])
    assert downloads.download(source, tmp_path, lambda url, digest: next(swapped)) is not None


def test_changed_file_is_downloaded_again(modules, tmp_path):
    _, downloads = modules

    def read(url, digest):
        return b"two" if "two" in url else b"one"

    source = make_source(downloads, [b"one", b"two"])
    downloads.download(source, tmp_path, read)
    (tmp_path / "toy" / "two.csv").write_bytes(b"2")
    assert not downloads.is_here(source, tmp_path)
    assert downloads.download(source, tmp_path, read) is None
    assert downloads.is_here(source, tmp_path)


def test_files_are_taken_from_a_folder_by_digest(modules, tmp_path):
    """Names and folders do not matter, and a source with a missing file is not taken."""
    _, downloads = modules
    source = make_source(downloads, [b"one", b"two"])
    folder, target = tmp_path / "folder", tmp_path / "data"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "x.bin").write_bytes(b"one")
    (folder / "two.csv").write_bytes(b"not two")
    problem = downloads.download(source, target, downloads.index_folder(folder))
    assert "two.csv" in problem and downloads.compute_digest(b"two") in problem
    assert not target.exists()
    (folder / "y").write_bytes(b"two")
    os.mkfifo(folder / "pipe")
    assert downloads.download(source, target, downloads.index_folder(folder)) is None
    assert (target / "toy" / "two.csv").read_bytes() == b"two"
    with pytest.raises(OSError, match="nowhere"):
        downloads.index_folder(tmp_path / "nowhere")


def test_every_source_has_digests_and_unique_names(modules):
    _, downloads = modules
    manifest = downloads.read_manifest()
    assert set(manifest) == {source.name for source in downloads.SOURCES}
    for source in downloads.SOURCES:
        files = source.list_files(Path())
        assert len({path for _, path, _ in files}) == len(files) > 0, source.name
        for url, _, digest in files:
            assert len(digest) == 64 and source.commit in url, source.name


def test_missing_folder_is_a_usage_error(tmp_path):
    command = [
        sys.executable,
        ROOT / "benchmarks" / "statistics" / "datasets.py",
        "--from",
        tmp_path / "nowhere",
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "nowhere" in result.stderr


def test_shared_families_have_the_published_runs(modules, tmp_path):
    datasets, _ = modules
    if not datasets.SHARED.is_dir():
        pytest.skip(f"no public data at {datasets.SHARED}")
    families = {family.name: family for family in datasets.load_families(downloaded=tmp_path)}
    # The numbers of families and runs are counted in the files.
    assert len(families) == 22
    assert {family.group for family in families.values()} == {
        "gemstones",
        "open_lm",
        "refined_web",
        "datablations",
    }
    assert families["gemstones_cool_end"].table.num_runs == 199
    assert families["datablations_fresh"].table.num_runs == 41
    web = families["refined_web_tuned_short_const_standard_val"].table
    assert web.budget is not None and len(np.unique(web.budget)) >= 7
    assert np.allclose(families["open_lm_red_pajama_on_c4"].table.loss.min(), 2.54, atol=0.3)


@pytest.fixture(scope="module")
def downloaded_families(modules, tmp_path_factory):
    """Families by name from the files that `make data` downloads; skipped without them."""
    datasets, downloads = modules
    if not all(downloads.is_here(source) for source in downloads.SOURCES):
        pytest.skip(f"`make data` has not filled {downloads.FOLDER.name}")
    no_shared_data = tmp_path_factory.mktemp("empty")
    return {family.name: family for family in datasets.load_families(shared=no_shared_data)}


def test_downloaded_families_have_the_published_numbers(downloaded_families):
    """The numbers are published, or counted in the files. A reader that changes them is wrong."""
    families = downloaded_families
    assert families["chinchilla"].table.num_runs == 240
    fit = law.fit_law(families["chinchilla"].table, "chinchilla")
    # The minimum of the objective in arXiv 2404.10102.
    assert fit.objective == pytest.approx(0.00101827401780, rel=1e-6)
    num_runs_by_name = {
        "steplaw": 17,
        "misfitting": 81,
        "loss_to_loss_starcoder": 84,
        "marin_nemotron": 96,
        "olmo_ladder_on_c4": 25,
        "open_lm_rw_on_c4": 35,
    }
    for name, num_runs in num_runs_by_name.items():
        assert families[name].table.num_runs == num_runs, name
    sweep = families["loss_to_loss_starcoder"].table
    assert np.allclose(sweep.flops, sweep.budget)
    for family in families.values():
        if family.group in ("chinchilla", "steplaw"):
            assert family.licence.startswith("none"), family.name


LATER_STUDIES = {"routing", "quest", "xlstm", "supercollapse", "opt", "mixing_laws"}
"""Groups of the families that were added after the first ones."""


def test_downloaded_families_of_later_studies_have_the_published_numbers(downloaded_families):
    families = downloaded_families
    later = [
        family
        for family in families.values()
        if family.group in LATER_STUDIES or family.name.startswith("openwebtext2")
    ]
    assert len(later) == 33
    assert {family.group for family in later} == LATER_STUDIES | {"refined_web"}
    # arXiv 2202.01169: 1.3B dense parameters after 130B tokens.
    assert families["routing_dense"].table.loss.min() == pytest.approx(2.242, abs=0.001)
    # arXiv 2502.05003: 100 tokens per parameter.
    ratio = families["quest_bf16"].table.tokens / families["quest_bf16"].table.params
    assert np.allclose(ratio, 100, rtol=0.05)
    budgets = families["xlstm_llama_ctx8192"].table.budget
    assert len(np.unique(budgets)) == 4
    assert np.allclose(families["xlstm_llama_ctx8192"].table.flops / budgets, 1, atol=0.15)
    # The largest run of the OpenWebText2 ladder with a short warmup.
    short = families["openwebtext2_base_short_chinchilla_standard_val"].table
    index = np.argmin(np.abs(np.log(short.params / 9.02e8)) + np.abs(np.log(short.tokens / 4.73e9)))
    assert short.loss[index] == pytest.approx(2.660, abs=0.001)
    assert len(np.unique(families["opt_curve"].table.params)) == 6
