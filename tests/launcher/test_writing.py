"""What exports share: numbers that their programs read or refuse, and a launch script, run by a made-up torchrun."""

import importlib.metadata
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from export_case import wide_decision
from exported_program import imported
from trainer_venv import in_trainer

from launcher.exporters.trainers import torchtitan
from launcher.exporters.writing import run_script, write_files
from launcher.frozen.launch_file import RUN_FILE
from proxies.core import canon


def launched(tmp_path, num_ranks, **env):
    decision = SimpleNamespace(digest="d", parallelism=SimpleNamespace(num_ranks=num_ranks))
    script = run_script(decision, "it 1.0", notes="Needs nothing.", setup="export SET=1", command='"$here/x" "$@"')
    write_files(tmp_path, {RUN_FILE: script, "sub/torchrun": '#!/bin/sh\necho "$SET" "$@"\n'})
    (tmp_path / "sub" / "torchrun").chmod(0o755)
    path = {"PATH": f"{tmp_path / 'sub'}:{os.environ['PATH']}"}
    return subprocess.run(
        [tmp_path / RUN_FILE, "a b"], env={**path, **env}, capture_output=True, text=True, check=False, timeout=30
    )


@pytest.mark.parametrize(
    ("num_ranks", "env", "nodes", "per_node"),
    [(12, {}, 2, 6), (64, {"RANKS_PER_NODE": "4"}, 16, 4)],
)
def test_ranks_are_dealt_to_nodes(tmp_path, num_ranks, env, nodes, per_node):
    done = launched(tmp_path, num_ranks, **env)
    head = f"1 --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint localhost:0 "
    assert done.stdout == f"{head}{tmp_path}/x a b\n"


NUMBERS_IN = "from forerun_numbers import read_numbers; print(read_numbers().seed)"


def numbers_read(folder, **env):
    """What a program of the export reads, in a process of its own."""
    return in_trainer([sys.executable, "-c", NUMBERS_IN], folder, **env)


def test_numbers_are_sorted_hashed_and_of_the_config(tmp_path, manifest):
    decision = wide_decision(manifest, seed=2**33 + 5)
    torchtitan.export(decision, tmp_path)
    body = canon.parse((tmp_path / "forerun.json").read_bytes())
    assert list(body) == sorted(body) and list(body["numbers"]) == sorted(body["numbers"])
    assert (body["digest"], body["trainer"], body["version"]) == (decision.digest, "torchtitan", "0.3.0")
    sha256 = body.pop("sha256")
    assert sha256 == canon.content_id(body)
    assert numbers_read(tmp_path).stdout == f"{2**33 + 5}\n"


DAMAGES = {
    "edited": lambda text: text.replace('"seed": 7', '"seed": 8'),
    "is damaged": lambda text: text[:100],
    "cannot be read (No such file": None,
}


@pytest.mark.parametrize("said", DAMAGES)
def test_numbers_that_are_gone_damaged_edited_or_of_another_format_are_refused(tmp_path, manifest, said):
    torchtitan.export(wide_decision(manifest), tmp_path)
    path, damage = tmp_path / "forerun.json", DAMAGES[said]
    if damage is None:
        path.unlink()
    else:
        path.write_text(damage(path.read_text()))
    done = numbers_read(tmp_path)
    assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr


def test_installed_versions_are_held_against_those_exported_for(tmp_path, manifest):
    torchtitan.export(wide_decision(manifest), tmp_path)
    wrong = imported(tmp_path).other_versions({"click": "0.0.1", "rich": importlib.metadata.version("rich")})
    assert wrong == [f"click {importlib.metadata.version('click')}: 0.0.1 is needed"]
