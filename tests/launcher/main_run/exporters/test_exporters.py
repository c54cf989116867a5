"""Tests that hold for every export of a main run to another trainer.

The Megatron-LM export has its own tests, because it needs a converted corpus and converted first
weights before the run.
"""

import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import export_case
import pytest
from export_case import make_wide_decision
from main_run import write_attested
from tiny_study import run_json

from forerun._launcher.main_run.exporters.export_checks import (
    ADAMW_SETTINGS,
    ExportError,
    Expressible,
    require_runnable,
)
from forerun._launcher.main_run.exporters.export_writer import write_files
from forerun._launcher.main_run.exporters.fidelity import build_report
from forerun._launcher.main_run.exporters.registry import EXPORTER_MODULES, load_exporter

COMMANDS = {
    "torchtitan": "-m torchtitan.train --module forerun_torchtitan --config main_run x=1",
    "huggingface": "{}/forerun_huggingface.py x=1",
    "olmo-core": "{}/train.py x=1",
}
"""Command that run.sh passes to torchrun after torchrun's own options, by trainer. `{}` stands for
the export's folder, and `x=1` is an argument of run.sh."""
EACH_TRAINER = pytest.mark.parametrize("trainer", COMMANDS)


@EACH_TRAINER
def test_fidelity_report_has_every_field_once_and_all_are_expressible(tmp_path, manifest, trainer):
    export_case.assert_judges_every_leaf(load_exporter(trainer).export, manifest, tmp_path)


@EACH_TRAINER
def test_launch_script_starts_the_frozen_number_of_ranks(tmp_path, manifest, trainer):
    for num_ranks, layout, variables in export_case.LAYOUTS:
        out = tmp_path / str(num_ranks)
        load_exporter(trainer).export(
            export_case.make_decision_with_one_sequence_each(manifest, num_ranks), out
        )
        words = " ".join(export_case.run_launch_script(out, layout, "x=1", **variables))
        assert words.endswith(COMMANDS[trainer].format(out))


@pytest.mark.parametrize("trainer", sorted(EXPORTER_MODULES.keys() - {"command"}))
def test_float64_is_refused_without_advice_of_another_trainer(tmp_path, manifest, trainer):
    """No trainer computes in float64. The refusal once advised the native trainer."""
    decision = make_wide_decision(manifest, precision="float64")
    with pytest.raises(ExportError) as caught:
        load_exporter(trainer).export(decision, tmp_path / "out")
    [problem] = [problem for problem in caught.value.problems if "float64" in problem]
    assert problem.endswith("precision = float64: must be float32 or bfloat16")


@EACH_TRAINER
def test_several_nodes_need_a_rendezvous_endpoint(tmp_path, manifest, trainer):
    decision = export_case.make_decision_with_one_sequence_each(manifest, 16)
    load_exporter(trainer).export(decision, tmp_path)
    environment = {"PATH": os.environ["PATH"], "FORERUN_DATA": str(tmp_path)}
    process = subprocess.run(
        ["bash", tmp_path / "run.sh"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert process.returncode == 2 and "RDZV_ENDPOINT=HOST:PORT" in process.stderr


@pytest.mark.parametrize(
    ("trainer", "file", "setting"),
    [
        ("torchtitan", "forerun.json", '"compiled": true'),
        ("huggingface", "training_arguments.json", '"torch_compile": true'),
        ("olmo-core", "run.json", '"compile_model": true'),
    ],
)
def test_compiled_run_is_compiled_by_the_other_trainer(tmp_path, manifest, trainer, file, setting):
    decision = dataclasses.replace(make_wide_decision(manifest), compiled=True)
    load_exporter(trainer).export(decision, tmp_path)
    assert setting in (tmp_path / file).read_text()


def test_exported_modules_need_neither_forerun_nor_torch(tmp_path, manifest, corpus):
    load_exporter("torchtitan").export(make_wide_decision(manifest), tmp_path)
    export_case.assert_imports_alone(
        tmp_path, corpus, "forerun._proxies.data.tokens", "forerun._proxies.core.schedule"
    )


def test_new_exporter_needs_only_a_module_and_an_entry(tmp_path, manifest, monkeypatch):
    """A contributor adds a module and its name in `EXPORTER_MODULES`."""
    expressible = Expressible(optimizers={"adamw": ADAMW_SETTINGS}, run_wide=("clip_norm",))

    def export(decision, out_dir, version="1.0"):
        require_runnable("toy", decision, version, ("1.0",), (), expressible)
        write_files(out_dir, {"run.sh": f"toy --lr {decision.groups[0].learning_rate}\n"})
        return build_report("toy", version, decision, {}, expressible)

    module = SimpleNamespace(VERSIONS=("1.0",), export=export)
    monkeypatch.setitem(sys.modules, "forerun._launcher.main_run.exporters.trainers.toy", module)
    monkeypatch.setitem(EXPORTER_MODULES, "toy", "toy")
    frozen = write_attested(tmp_path / "frozen", make_wide_decision(manifest)).parent
    code, body = run_json("export", frozen, "--to", "toy", "--allow-lossy")
    assert (code, body["trainer"]) == (0, "toy")
    assert (frozen / "exports" / "toy" / "run.sh").read_text().startswith("toy --lr 0.0")
    lost = {entry["field"] for entry in body["entries"] if entry["verdict"] == "not_expressible"}
    assert lost == {
        entry.field for entry in export(make_wide_decision(manifest), tmp_path / "again").lost
    }
    # This export has no program that asks its trainer, so installing the trainer would not help.
    code, body = run_json("verify", frozen)
    assert (code, body["not_proven"]) == (
        0,
        ["parity of toy 1.0: this export has no program that asks the trainer"],
    )
