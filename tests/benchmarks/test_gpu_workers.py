"""Tests of the GPU benchmark of several workers, with a tiny model on a CPU.

The workers share the device in turns or by MPS, CUDA's service that lets several processes share a
GPU. MPS is replaced by a small script that logs its orders.
"""

import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu_benchmark import (
    build_command,
    list_measured_steps,
    read_orders,
    run_script,
    write_mps_control,
)
from waiting import wait_until


@pytest.mark.slow
def test_workers_benchmark_compares_turns_with_mps_and_resumes(tmp_path, bare_environment):
    folder, log = write_mps_control(tmp_path / "bin")
    env = {**bare_environment, "PATH": f"{folder}:{bare_environment['PATH']}"}
    out = tmp_path / "workers.json"

    def run(*options):
        return run_script("gpu_workers.py", "--quick", "--json", out, *options, env=env)

    without_time = run("--seconds", "0")
    assert without_time.returncode == 3, without_time.stderr
    assert list_measured_steps(without_time.stdout) == []
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    ways = ("alone", "in turns", "by MPS")
    steps = [f"measured: tiny, 2 sequences, {way}" for way in ways]
    assert list_measured_steps(done.stdout) == steps

    # The file has the speeds of one worker alone, and of one and two workers in turns and by MPS.
    tiny = json.loads(out.read_text())["models"]["tiny"]
    rates = {way: tiny["steps"][f"2 sequences, {way}"]["trial_steps_per_second"] for way in ways}
    assert [len(rates[way]) for way in ways] == [1, 2, 2]
    assert all(rate > 0 for way_rates in rates.values() for rate in way_rates)
    ratio = rates["by MPS"][1] / rates["in turns"][0]
    assert "tiny, 2 sequences, by MPS: " in done.stdout
    assert f"2: {rates['by MPS'][1]:.1f} ({ratio:.2f})\n" in done.stdout
    assert read_orders(log) == ["start", "get_server_list", "quit"]

    # A second call prints the findings again and measures nothing.
    repeated = run()
    findings = "".join(
        line for line in done.stdout.splitlines(keepends=True) if not line.startswith("measured: ")
    )
    assert (repeated.returncode, repeated.stdout) == (0, findings)
    assert len(read_orders(log)) == 3
    assert json.loads(out.read_text())["models"]["tiny"] == tiny


@pytest.mark.parametrize(
    ("start", "servers", "fails", "refusal", "orders"),
    [
        pytest.param(
            "true", "echo 4321", False, "", ["start", "get_server_list", "quit"], id="MPS works"
        ),
        pytest.param(
            "true",
            "true",
            False,
            "no process reached the service",
            ["start", "get_server_list", "quit"],
            id="the service names no server",
        ),
        pytest.param(
            "true",
            "echo no server",
            False,
            "no process reached the service",
            ["start", "get_server_list", "quit"],
            id="the service answers with text",
        ),
        pytest.param(
            "true",
            "echo 4321",
            True,
            "exit code 1: no context",
            ["start", "quit"],
            id="a process fails",
        ),
        pytest.param(
            "echo no permission; exit 1",
            "",
            False,
            "-d: exit code 1: no permission",
            ["start", "quit"],
            id="the service does not start",
        ),
        pytest.param(
            None,
            "",
            False,
            "nvidia-cuda-mps-control is not on PATH",
            [],
            id="there is no control program",
        ),
    ],
)
def test_mps_is_always_quit_and_its_failure_is_a_finding(
    tmp_path, monkeypatch, import_benchmark, start, servers, fails, refusal, orders
):
    """`start` and `servers` are the commands with which the control program answers."""
    folder, log = write_mps_control(tmp_path / "bin", start or "", servers)
    if start is None:
        (folder / "nvidia-cuda-mps-control").unlink()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    pipe_folders = []

    def measure(environment):
        pipe_folders.append(Path(environment["CUDA_MPS_PIPE_DIRECTORY"]))
        assert pipe_folders[0].is_dir()
        if fails:
            raise RuntimeError("a process ended without an answer, exit code 1: no context")
        return {"trial_steps_per_second": [1.0]}

    finding = import_benchmark("gpu_workers").measure_with_mps(measure)
    assert refusal in finding.get("refused", "")
    assert ("refused" in finding) == bool(refusal)
    assert "not_quit" not in finding
    assert read_orders(log) == orders
    assert not any(folder.exists() for folder in pipe_folders), "the folder is temporary"


@pytest.fixture
def mps_job(tmp_path, bare_environment, import_benchmark):
    """The running benchmark, with only the steps under MPS left, and the log of MPS's orders."""
    folder, log = write_mps_control(tmp_path / "bin")
    measured_steps = {
        f"2 sequences, {way}": {"trial_steps_per_second": [1.0, 2.0]}
        for way in ("alone", "in turns")
    }
    tiny = {"machine": import_benchmark("gpu_runs").describe_device(), "steps": measured_steps}
    (tmp_path / "workers.json").write_text(json.dumps({"models": {"tiny": tiny}}))
    command = build_command("gpu_workers.py", "--quick", "--json", tmp_path / "workers.json")
    env = {**bare_environment, "PATH": f"{folder}:{bare_environment['PATH']}"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as job:
        yield job, log
        job.kill()


@pytest.mark.slow
def test_terminated_benchmark_quits_mps(mps_job):
    job, log = mps_job
    wait_until(log.exists)
    job.terminate()
    assert job.wait(60) == 128 + signal.SIGTERM and read_orders(log) == ["start", "quit"]


def test_mps_that_is_refused_is_not_tried_again(import_benchmark, monkeypatch, tmp_path, capsys):
    """The finding holds for the next batch size and for the next call of the benchmark."""
    workers, gpu = import_benchmark("gpu_workers"), import_benchmark("gpu_modes")
    attempts = []

    def refuse(run):
        attempts.append(run)
        return {"refused": "it hangs"}

    monkeypatch.setattr(
        workers, "measure_processes", lambda *_: {"trial_steps_per_second": [1.0, 2.0]}
    )
    monkeypatch.setattr(workers, "measure_with_mps", refuse)
    settings = gpu.shrink_settings(
        gpu.Settings(device="cpu", plain=gpu.Numerics(), models={}, seconds=60)
    )
    settings = dataclasses.replace(settings, batches=(2, 4))
    content, calls = {"models": {"tiny": {}}}, ("first", "second")
    for call in calls:
        (tmp_path / call).mkdir()
        workers.measure_workers(settings, tmp_path / call, content, lambda: None)
    assert len(attempts) == 1
    num_findings = len(settings.batches) * len(calls)
    assert capsys.readouterr().out.count("by MPS: left out: it hangs") == num_findings


def test_process_that_fails_or_hangs_is_reported_with_its_last_output(import_benchmark):
    together = import_benchmark("process_tree").run_together

    def program(text):
        return [sys.executable, "-c", text]

    answering = "import sys; print('ready', flush=True)\nfor _ in sys.stdin: print({}, flush=True)"
    rates, start_seconds = together(program(answering.format("2.5")), [1, 3])
    assert rates == [2.5, 7.5] and start_seconds > 0
    with pytest.raises(RuntimeError, match=r"answer, exit code 1: ValueError: no kernel\n"):
        together(program("raise ValueError('no kernel')"), [2])
    with pytest.raises(RuntimeError, match="exit code 1: ZeroDivisionError"):
        together(program(answering.format("1 / 0")), [2])
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="killed at the time limit: no output"):
        together(program("import time; time.sleep(60)"), [1], limit_seconds=0.5)
    assert time.monotonic() - start < 20


def test_failed_processes_of_a_step_fail_the_benchmark(tmp_path, import_benchmark, capsys):
    gpu = import_benchmark("gpu_modes")
    settings = gpu.shrink_settings(
        gpu.Settings(device="cpu", plain=gpu.Numerics(), models={}, seconds=60)
    )
    steps = gpu.Steps(model="tiny", body={}, deadline=0.0, save=lambda: None)

    def run_processes():
        return gpu.measure_processes(settings, "tiny", 2, tmp_path / "nowhere", [1], settings.plain)

    result = steps.measure_once(
        "2 sequences, 1 processes", lambda: gpu.run_step(run_processes), needed=True
    )
    assert "nowhere" in result["error"] and gpu.report_exit_code([steps]) == 1
    line = "tiny, 2 sequences, 1 processes: FAILED: RuntimeError: a process ended"
    assert line in capsys.readouterr().out
