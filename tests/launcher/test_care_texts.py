"""What plans, exports and the report say about the run's care."""

from __future__ import annotations

from launcher.plan.file import load_plan
from launcher.plan.presets import PRESETS
from launcher.plan.writing import commented_plan


def test_a_new_plan_asks_for_care_and_an_older_one_does_not(tmp_path):
    (tmp_path / "new.toml").write_text(commented_plan(PRESETS["cpu"].values))
    (tmp_path / "old.toml").write_text("")
    new, old = (load_plan(tmp_path / name).launch for name in ("new.toml", "old.toml"))
    assert new.spike_rollbacks > 0 and new.layers_every_steps > 0 and new.validate_every_steps > 0
    assert (old.spike_rollbacks, old.layers_every_steps, old.validate_every_steps) == (0, 0, 0)
    assert new.replay_every_steps == old.replay_every_steps == 0
