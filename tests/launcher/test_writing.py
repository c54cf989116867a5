"""What exports share: numbers that their programs read or refuse."""

import importlib.metadata
import sys

import pytest
from export_case import wide_decision
from exported_program import imported
from trainer_venv import in_trainer

from launcher.exporters.trainers import torchtitan
from proxies.core import canon

NUMBERS_IN = "from forerun_numbers import read_numbers; print(read_numbers().seed)"


def numbers_read(folder, **env):
    """What a program of the export reads, in a process of its own."""
    return in_trainer([sys.executable, "-c", NUMBERS_IN], folder, **env)


def test_numbers_are_sorted_hashed_and_of_the_config(tmp_path, manifest):
    decision = wide_decision(manifest, seed=2**33 + 5)
    torchtitan.export(decision, tmp_path)
    body = canon.parse((tmp_path / "forerun.json").read_bytes())
    assert list(body) == sorted(body) and list(body["numbers"]) == sorted(body["numbers"])
    assert (body["digest"], body["trainer"], body["version"]) == (
        decision.digest,
        "torchtitan",
        "0.3.0",
    )
    sha256 = body.pop("sha256")
    assert sha256 == canon.content_id(body)
    assert numbers_read(tmp_path).stdout == f"{2**33 + 5}\n"


DAMAGES = {
    "edited": lambda text: text.replace('"seed": 7', '"seed": 8'),
    "is damaged": lambda text: text[:100],
    "cannot be read (No such file": None,
}


@pytest.mark.parametrize("said", DAMAGES)
def test_numbers_that_are_gone_damaged_edited_or_of_another_format_are_refused(
    tmp_path, manifest, said
):
    torchtitan.export(wide_decision(manifest), tmp_path)
    path, damage = tmp_path / "forerun.json", DAMAGES[said]
    if damage is None:
        path.unlink()
    else:
        path.write_text(damage(path.read_text()))
    done = numbers_read(tmp_path)
    assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (2, True, False), (
        done.stderr
    )


def test_installed_versions_are_held_against_those_exported_for(tmp_path, manifest):
    torchtitan.export(wide_decision(manifest), tmp_path)
    wrong = imported(tmp_path).other_versions(
        {"click": "0.0.1", "rich": importlib.metadata.version("rich")}
    )
    assert wrong == [f"click {importlib.metadata.version('click')}: must be 0.0.1"]
