"""What plans, exports and the report say about the run's care."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
from care_case import POLICY
from main_run import tiny_decision, write_corpus

from launcher.base.policy import Monitoring
from launcher.exporters.fidelity import MODULES, judged
from launcher.exporters.foreign import JUDGEMENTS
from launcher.exporters.trainers import native
from launcher.plan.file import load_plan
from launcher.plan.presets import PRESETS
from launcher.plan.writing import commented_plan


@pytest.fixture(scope="module")
def careful(tmp_path_factory):
    """A decision that asks for all of it."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder)
    watched = Monitoring(validate_every_steps=1, layers_every_steps=2, replay_every_steps=3)
    return dataclasses.replace(tiny_decision(folder / "tokens"), spikes=POLICY, monitoring=watched, compiled=True)


@pytest.mark.parametrize("trainer", sorted(MODULES.keys() - {"native"}))
def test_every_export_tells_of_every_field(careful, trainer):
    module = importlib.import_module(f"launcher.exporters.trainers.{MODULES[trainer]}")
    entries = {entry.field: entry for entry in judged(careful, JUDGEMENTS | module._JUDGEMENTS)}
    for field in ("spikes.max_rollbacks", "monitoring.replay_every_steps", "compiled"):
        assert entries[field].verdict == "equivalent" and entries[field].note
    assert "does not go back by itself" in entries["spikes.max_rollbacks"].note


def test_the_native_export_says_who_goes_back(careful, tmp_path):
    quiet = dataclasses.replace(careful, compiled=False)
    notes = {entry.field: entry.note for entry in native.export(quiet, tmp_path / "out").entries}
    assert "by itself as often as max_rollbacks says" in notes["spikes"] and "stops the run" in notes["monitoring"]


def test_a_new_plan_asks_for_care_and_an_older_one_does_not(tmp_path):
    (tmp_path / "new.toml").write_text(commented_plan(PRESETS["cpu"].values))
    (tmp_path / "old.toml").write_text("")
    new, old = (load_plan(tmp_path / name).launch for name in ("new.toml", "old.toml"))
    assert new.spike_rollbacks > 0 and new.layers_every_steps > 0 and new.validate_every_steps > 0
    assert (old.spike_rollbacks, old.layers_every_steps, old.validate_every_steps) == (0, 0, 0)
    assert new.replay_every_steps == old.replay_every_steps == 0
