"""Tests of the GPU benchmark of the embedded trainer and of torchtitan, with a tiny model on a CPU.

Most tests of torchtitan replace it by a small program.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_benchmark import list_measured_steps, run_script
from trainer_venv import require_interpreter


@pytest.mark.slow
def test_trainer_benchmark_runs_resumes_and_reports_failures(tmp_path, bare_environment):
    def run(*options):
        return run_script(
            "gpu_trainer.py", "--out", tmp_path, "--quick", *options, env=bare_environment
        )

    without_time = run("--seconds", "0")
    assert without_time.returncode == 3, without_time.stderr
    assert list_measured_steps(without_time.stdout) == ["measured: tiny, peak"]
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    ways = [
        f"{engine}, {mode}" for mode in ("eager", "compiled") for engine in ("trainer", "proxy")
    ]
    assert list_measured_steps(done.stdout) == [f"measured: tiny, {way}" for way in ways]

    # Trainer and proxy have the same losses.
    path = tmp_path / "gpu_trainer.json"
    tiny = json.loads(path.read_text())["models"]["tiny"]
    losses = tiny["steps"]["proxy, eager"]["losses"]
    # 10 steps of warmup and 4 that are timed
    assert len(losses) == 10 + 4
    assert all(tiny["steps"][way]["losses"] == pytest.approx(losses, abs=0.01) for way in ways)
    assert sum(" of the peak, " in line for line in tiny["findings"]) == len(ways)

    # A failed way is reported, and the script fails.
    content = json.loads(path.read_text())
    content["models"]["tiny"]["steps"]["trainer, eager"] = {"error": "RuntimeError: no kernel"}
    path.write_text(json.dumps(content))
    failed = run()
    assert (failed.returncode, list_measured_steps(failed.stdout)) == (1, [])
    assert "tiny, trainer, eager: FAILED: RuntimeError: no kernel" in failed.stdout


@pytest.mark.slow
def test_torchtitan_has_the_losses_of_the_embedded_trainer(tmp_path, bare_environment):
    env = {**bare_environment, "FORERUN_TORCHTITAN_PYTHON": str(require_interpreter("torchtitan"))}

    def run(ways):
        options = ("--out", tmp_path, "--quick", "--ways", ways)
        return run_script("gpu_trainer.py", *options, env=env)

    assert run("trainer,proxy").returncode == 0
    env["PYTHONPATH"] = ""
    done = run("torchtitan")
    assert done.returncode == 0, done.stdout + done.stderr
    modes = ("eager", "compiled")
    lines = [f"measured: tiny, torchtitan, {mode}" for mode in modes]
    assert list_measured_steps(done.stdout) == lines
    steps = json.loads((tmp_path / "gpu_trainer.json").read_text())["models"]["tiny"]["steps"]
    expected = pytest.approx(steps["trainer, eager"]["losses"], abs=1e-4)
    for mode in modes:
        assert steps[f"torchtitan, {mode}"]["losses"] == expected
        assert min(steps[f"torchtitan, {mode}"]["seconds"]) > 0
    assert run("torchtitan").returncode == 0


@pytest.fixture
def run_as_torchtitan(tmp_path, monkeypatch, import_benchmark):
    """Function that runs a Python program in place of torchtitan and returns the finding."""
    trainer = import_benchmark("gpu_trainer")
    program = tmp_path / "program.py"
    monkeypatch.setattr(trainer, "TORCHTITAN_MAIN", program)
    monkeypatch.setattr(trainer, "TIMEOUT_SECONDS", 20.0)
    monkeypatch.setattr(trainer, "find_torchtitan_python", lambda: Path(sys.executable))
    monkeypatch.setattr(trainer.torchtitan, "export", lambda decision, folder: None)

    def run(text):
        program.write_text(text)
        return trainer.train_with_torchtitan(
            trainer.shrink_settings(trainer.Settings(sizes={})), tmp_path, None
        )

    return run


@pytest.mark.slow
def test_torchtitan_that_hangs_is_killed(tmp_path, run_as_torchtitan):
    path = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        run_as_torchtitan(
            f"import os, time; open({str(path)!r}, 'w').write(str(os.getpid())); time.sleep(100)"
        )
    assert not Path("/proc", path.read_text()).exists()


def test_torchtitan_that_does_not_load_is_a_finding(run_as_torchtitan):
    finding = run_as_torchtitan("from os import DataParallelMeshDims")
    message = "torchtitan does not load here: ImportError: cannot import name 'DataPar"
    assert message in finding["refused"]


def test_torchtitan_that_fails_after_it_loaded_raises(run_as_torchtitan):
    with pytest.raises(RuntimeError, match=r"torchtitan: exit code 1: \['ValueError: no kernel'\]"):
        run_as_torchtitan("raise ValueError('no kernel')")
    # A program that has written losses has loaded.
    text = "import os; open(os.environ['LOSSES'], 'w'); raise ImportError('amid the steps')"
    with pytest.raises(RuntimeError, match="ImportError"):
        run_as_torchtitan(text)
