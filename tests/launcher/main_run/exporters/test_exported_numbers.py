"""Tests of `forerun.json`, the file of frozen numbers in every export.

The exported programs read the file, and refuse a missing, damaged, or edited one.
"""

import importlib.metadata
import sys
from pathlib import Path

import pytest
from export_case import make_wide_decision
from exported_program import import_program
from trainer_venv import run_in_trainer

from forerun._launcher.main_run.exporters.trainers import torchtitan
from forerun._proxies.core import canon

LARGE_SEED = 2**33 + 5
"""Seed of more than 32 bits."""
PRINT_SEED = "from forerun_numbers import read_numbers; print(read_numbers().seed)"


def print_seed(folder):
    """Print the seed in an export's numbers in a new process; return the finished process."""
    return run_in_trainer([sys.executable, "-c", PRINT_SEED], folder)


def test_numbers_are_sorted_hashed_and_name_the_config(tmp_path, manifest):
    decision = make_wide_decision(manifest, seed=LARGE_SEED)
    torchtitan.export(decision, tmp_path)
    body = canon.parse((tmp_path / "forerun.json").read_bytes())
    assert list(body) == sorted(body) and list(body["numbers"]) == sorted(body["numbers"])
    assert (body["digest"], body["trainer"], body["version"]) == (
        decision.digest,
        "torchtitan",
        "0.3.0",
    )
    sha256 = body.pop("sha256")
    assert sha256 == canon.compute_content_id(body)
    assert print_seed(tmp_path).stdout == f"{LARGE_SEED}\n"


def edit_seed(path):
    """Change the seed in the file, whose hash stays the same."""
    path.write_text(path.read_text().replace('"seed": 7', '"seed": 8'))


def cut_short(path):
    """Keep only the first 100 characters of the file."""
    path.write_text(path.read_text()[:100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit_seed, "edited"),
        (cut_short, "is damaged"),
        (Path.unlink, "cannot be read (No such file"),
    ],
)
def test_missing_damaged_or_edited_numbers_are_refused(tmp_path, manifest, damage, message):
    torchtitan.export(make_wide_decision(manifest), tmp_path)
    damage(tmp_path / "forerun.json")
    process = print_seed(tmp_path)
    assert process.returncode == 2, process.stderr
    assert message in process.stderr and "Traceback" not in process.stderr


def test_installed_versions_are_compared_with_the_exports(tmp_path, manifest):
    torchtitan.export(make_wide_decision(manifest), tmp_path)
    mismatches = import_program(tmp_path).other_versions(
        {"click": "0.0.1", "rich": importlib.metadata.version("rich")}
    )
    assert mismatches == [f"click {importlib.metadata.version('click')}: must be 0.0.1"]
