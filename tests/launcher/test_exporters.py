"""What holds of every export to another trainer that makes the whole run itself."""

import dataclasses
import os
import subprocess

import export_case
import pytest
from export_case import wide_decision

from launcher.exporters import fidelity

COMMANDS = {
    "torchtitan": "-m torchtitan.train --module forerun_torchtitan --config main_run x=1",
    "huggingface": "{}/forerun_huggingface.py x=1",
    "olmo-core": "{}/train.py x=1",
}
EACH = pytest.mark.parametrize("trainer", COMMANDS)


@EACH
def test_fidelity_judges_every_leaf_field_once_and_loses_none(tmp_path, manifest, trainer):
    export_case.assert_judges_every_leaf(fidelity.exporter(trainer).export, manifest, tmp_path)


@EACH
def test_the_launch_line_starts_the_frozen_number_of_ranks(tmp_path, manifest, trainer):
    for num_ranks, layout, told in export_case.LAYOUTS:
        out = tmp_path / str(num_ranks)
        fidelity.exporter(trainer).export(export_case.one_sequence_each(manifest, num_ranks), out)
        words = " ".join(export_case.launch_words(out, layout, "x=1", **told))
        assert words.endswith(COMMANDS[trainer].format(out))


@EACH
def test_several_nodes_need_an_endpoint(tmp_path, manifest, trainer):
    fidelity.exporter(trainer).export(export_case.one_sequence_each(manifest, 16), tmp_path)
    script = tmp_path / "run.sh"
    bare = {"PATH": os.environ["PATH"], "FORERUN_DATA": str(tmp_path)}
    said = subprocess.run(
        ["bash", script], env=bare, capture_output=True, text=True, check=False, timeout=60
    )
    assert said.returncode == 2 and "RDZV_ENDPOINT=HOST:PORT" in said.stderr


@pytest.mark.parametrize(
    ("trainer", "file", "told"),
    [
        ("torchtitan", "forerun.json", '"compiled": true'),
        ("huggingface", "training_arguments.json", '"torch_compile": true'),
        ("olmo-core", "run.json", '"compile_model": true'),
    ],
)
def test_a_compiled_run_is_compiled_there(tmp_path, manifest, trainer, file, told):
    decision = dataclasses.replace(wide_decision(manifest), compiled=True)
    fidelity.exporter(trainer).export(decision, tmp_path)
    assert told in (tmp_path / file).read_text()


def test_what_travels_needs_neither_forerun_nor_torch(tmp_path, manifest, corpus):
    fidelity.exporter("torchtitan").export(wide_decision(manifest), tmp_path)
    export_case.assert_travels(tmp_path, corpus, "proxies.data.tokens", "proxies.core.schedule")
