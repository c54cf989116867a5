"""Fixture for tests of the supervisor: a launch of a Python script in place of torchrun."""

import pytest
from main_run import make_tiny_decision
from scripted_job import SCRIPT_HEAD

from forerun._launcher.main_run.frozen.launch_file import write_launch
from forerun._launcher.main_run.supervisor import attempt
from forerun._launcher.main_run.supervisor import launch as supervisor
from forerun._launcher.main_run.supervisor.launch import launch


@pytest.fixture
def launch_script(corpus, tmp_path, monkeypatch):
    """Function that launches a Python script in place of torchrun.

    The script can use the names of `SCRIPT_HEAD`: functions `step`, `save`, `end`, and `wait_for`,
    the number of earlier attempts `count`, and the run's folder `run`.
    """
    monkeypatch.setattr(supervisor, "BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(attempt, "STACK_SECONDS", 0.5)
    config = write_launch(tmp_path / "config", make_tiny_decision(corpus))

    def start(text, **kwargs):
        monkeypatch.setattr(
            supervisor,
            "build_torchrun_command",
            lambda python, *_, **__: [python, "-c", SCRIPT_HEAD + text],
        )
        return launch(config, corpus, tmp_path / "run", **kwargs)

    return start
