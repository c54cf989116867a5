"""Tests of `make gpu` and of the GPU benchmarks, rehearsed on a CPU with a tiny model.

A GPU is rarely available, so the scripts must be known to work before they run on one. Programs of
the GPU machine are replaced by small scripts: torchtitan, and the control program of MPS, CUDA's
service that lets several processes share a GPU.
"""

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from trainer_venv import require_interpreter

from forerun._proxies.core.schedule import compute_lr_multiplier

ROOT = Path(__file__).parents[1]
REFUSING_IMPORTS = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ray", "optuna", "wandb", "pydantic", "click"}:
            raise ModuleNotFoundError(f"the GPU machine lacks {name}", name=name)

sys.meta_path.insert(0, Refusing())
"""
"""A sitecustomize module. Imports of packages that a GPU machine may lack fail with it."""
QUICK_PYTHON = f"""#!/bin/sh
case "$*" in
-c*) ;;
*) exec {sys.executable} "$@" --quick ;;
esac
"""
"""An interpreter that adds --quick to every script.

It does nothing for `-c`, with which the recipe of `make gpu` checks whether there is a GPU.
"""
MPS_CONTROL = """#!/bin/sh
case "$1" in -d) order=start ;; *) read -r order ;; esac
echo "$order $CUDA_MPS_PIPE_DIRECTORY" >> {log}
case "$order" in
start) {start} ;;
get_server_list) {servers} ;;
esac
"""
"""A control program of MPS that logs its orders.

An order is a line on its standard input, or `-d`, which starts the service. `{start}` and
`{servers}` are the commands with which it answers.
"""


@pytest.fixture
def bare_environment(tmp_path):
    """Environment variables with which Python cannot import packages a GPU machine may lack."""
    (tmp_path / "refusing").mkdir()
    (tmp_path / "refusing" / "sitecustomize.py").write_text(REFUSING_IMPORTS)
    # MAKEFLAGS of the `make` that runs these tests would change the one that is tested.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "FORERUN_"))
    }
    return {**environment, "PYTHONPATH": str(tmp_path / "refusing")}


@pytest.fixture
def import_benchmark(monkeypatch):
    """Function that imports a module of the benchmarks by its name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "gpu")
    return importlib.import_module


def write_mps_control(folder, start="true", servers="echo 4321"):
    """Create a folder with a fake control program of MPS, and return it and the program's log."""
    folder.mkdir()
    control = folder / "nvidia-cuda-mps-control"
    log = folder / "orders"
    control.write_text(MPS_CONTROL.format(log=log, start=start, servers=servers))
    control.chmod(0o755)
    return folder, log


def read_orders(log):
    """Return the orders that the fake control program received."""
    return [line.split()[0] for line in log.read_text().splitlines()] if log.exists() else []


def build_command(script, *arguments):
    """Return the command of a script of the GPU benchmarks."""
    return [sys.executable, ROOT / "benchmarks" / "gpu" / script, *map(str, arguments)]


def run_script(script, *arguments, **options):
    """Run a script of the GPU benchmarks to its end."""
    command = build_command(script, *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def list_measured_steps(output):
    """Return the lines that report a measured step."""
    return [line for line in output.splitlines() if line.startswith("measured: ")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_benchmark_without_a_device_measures_nothing(tmp_path):
    done = run_script("gpu_modes.py", "--json", tmp_path / "gpu_modes.json")
    assert (done.returncode, done.stderr) == (2, "needs a CUDA device; not measured\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_benchmark_without_time_measures_only_the_peak_and_exits_with_3(tmp_path, bare_environment):
    """The exit code 3 says that steps are left."""
    options = ("--quick", "--seconds", 0, "--json", tmp_path / "gpu_modes.json")
    done = run_script("gpu_modes.py", *options, env=bare_environment)
    assert done.returncode == 3, done.stderr
    tiny = json.loads((tmp_path / "gpu_modes.json").read_text())["models"]["tiny"]
    assert not tiny["cases"] and tiny["peak_flops"] > 0


@pytest.mark.slow
def test_killed_benchmark_resumes_and_reports_every_figure(tmp_path, bare_environment):
    out = tmp_path / "gpu_modes.json"
    other_machine = {"machine": {"device": "another"}, "steps": {"peak": 1.0}}
    out.write_text(json.dumps({"models": {"40M": "of an earlier run", "tiny": other_machine}}))
    arguments = ("gpu_modes.py", "--quick", "--json", out)

    # Kill the benchmark after two steps.
    command = build_command(*arguments)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=bare_environment
    ) as process:
        first_output = process.stdout.readline() + process.stdout.readline()
        process.kill()
        first_output += process.stdout.read()
    first_steps = json.loads(out.read_text())["models"]["tiny"]["steps"]
    assert len(first_steps) >= 2
    assert first_steps.get("peak") != 1.0, "steps of another machine are dropped"

    # The same command measures only the missing steps.
    done = run_script(*arguments, env=bare_environment)
    assert done.returncode == 0, done.stderr
    models = json.loads(out.read_text())["models"]
    assert models["40M"] == "of an earlier run"
    steps = models["tiny"]["steps"]
    assert first_steps == {name: steps[name] for name in first_steps}
    measured = list_measured_steps(done.stdout)
    assert len(measured) == len(steps) - len(first_steps)
    assert not set(list_measured_steps(first_output)) & set(measured)

    # Every figure is in the file and in the printed table.
    (case,) = models["tiny"]["cases"]
    modes = {mode["mode"]: mode for mode in case["modes"]}
    assert {"one slot", "2 slots"} <= modes.keys()
    assert case["chosen"] in modes
    # A step of one slot has 2 sequences of 16 tokens. A token takes 6 FLOPs for each weight in
    # matrix products (attention, feed-forward and readout of one block) and 6 * 16 * 16 FLOPs for
    # the attention logits and their use.
    step_flops = (6 * (4 * 16 * 16 + 3 * 16 * 32 + 64 * 16) + 6 * 16 * 16) * 2 * 16
    for mode in (modes["one slot"], modes["2 slots"]):
        assert not mode["refused"]
        achieved = mode["trial_steps_per_second"] * step_flops
        assert mode["share_of_peak"] * models["tiny"]["peak_flops"] == pytest.approx(achieved)
    assert modes["one slot"]["over_one_eager_trial"] == 1
    assert case["plain_loop"]["steps_per_second"] > 0
    assert {"1 eager processes", "2 eager processes"} <= case["trials_per_hour"].keys()
    assert f"| {case['chosen']} |" in done.stdout

    repeated = run_script(*arguments, env=bare_environment)
    assert repeated.returncode == 0 and not list_measured_steps(repeated.stdout)
    assert json.loads(out.read_text())["models"] == models


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_make_gpu_runs_without_the_environment_and_optional_packages(
    tmp_path, bare_environment, import_benchmark
):
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(QUICK_PYTHON)
    python.chmod(0o755)

    def make_gpu(*settings):
        recipe = [
            "make",
            "-C",
            ROOT,
            "gpu",
            f"PYTHON={python}",
            f"GPU_OUT={out}",
            "VENV=/nowhere",
            *settings,
        ]
        return subprocess.run(
            recipe, capture_output=True, text=True, check=False, env=bare_environment
        )

    without_time = make_gpu("GPU_SECONDS=0")
    # `make` itself exits with 2 if a recipe fails, and prints the recipe's code.
    assert without_time.returncode == 2 and "Error 3" in without_time.stderr, without_time.stderr
    done = make_gpu()
    assert done.returncode == 0, done.stdout + done.stderr
    gpu_test_files = {
        path.name
        for path in (ROOT / "tests").rglob("test_*.py")
        if "\n@pytest.mark.gpu\n" in path.read_text()
    }
    assert gpu_test_files and all(name in done.stdout for name in gpu_test_files)
    (case,) = json.loads((out / "gpu_modes.json").read_text())["models"]["tiny"]["cases"]
    assert not any(mode["refused"] for mode in case["modes"])
    parts = json.loads((out / "gpu-core.json").read_text())["parts"]
    assert parts.keys() == import_benchmark("gpu_all").PARTS.keys()
    assert {part["exit_code"] for part in parts.values()} == {0}
    line = "torchtitan, compiled: "
    if not require_interpreter("torchtitan"):
        line += "left out: torchtitan is not installed\n"
    assert line in done.stdout
    runs = json.loads((out / "gpu_transfer_published.json").read_text())["runs"].values()
    # Two widths with seven rates
    assert len(runs) == 2 * 7 and all(run["loss"] > 0 for run in runs)
    assert "gpu: " not in make_gpu().stdout, "finished parts are not run again"


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
def test_transfer_benchmark_runs_and_its_tables_are_judged(tmp_path, bare_environment):
    arguments = ("gpu_transfer.py", "--out", tmp_path, "--quick", "--seeds", "1")
    done = run_script(*arguments, env=bare_environment)
    assert done.returncode == 0, done.stderr
    # Seven rates with muP and with Muon; at its base width, SP has the runs of muP.
    assert done.stdout.count("width 16, rate") == 2 * 7
    repeated = run_script(*arguments, env=bare_environment)
    assert repeated.returncode == 0
    # Nothing is trained again. A line for each condition and width is left, without SP at its base.
    assert repeated.stdout.count("\n") == 3 * 2 - 1
    for name in ("mup", "sp", "muon"):
        table = tmp_path / f"gpu_transfer-{name}.csv"
        options = ("--runs", table, "--target-width", "64", "--json")
        verdict = subprocess.run(
            [sys.executable, "-m", "forerun", "transfer", *options],
            capture_output=True,
            text=True,
            check=False,
        )
        assert verdict.returncode in (0, 3, 4), verdict.stderr
        assert [optimum["size"] for optimum in json.loads(verdict.stdout)["optima"]] == [16, 32]


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
    ("start", "servers", "fails", "refused", "orders"),
    [
        ("true", "echo 4321", False, "", ["start", "get_server_list", "quit"]),
        (
            "true",
            "true",
            False,
            "no process reached the service",
            ["start", "get_server_list", "quit"],
        ),
        (
            "true",
            "echo no server",
            False,
            "no process reached the service",
            ["start", "get_server_list", "quit"],
        ),
        ("true", "echo 4321", True, "exit code 1: no context", ["start", "quit"]),
        (
            "echo no permission; exit 1",
            "",
            False,
            "-d: exit code 1: no permission",
            ["start", "quit"],
        ),
        (None, "", False, "nvidia-cuda-mps-control is not on PATH", []),
    ],
)
def test_mps_is_always_quit_and_its_failure_is_a_finding(
    tmp_path, monkeypatch, import_benchmark, start, servers, fails, refused, orders
):
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
    assert refused in finding.get("refused", "") and ("refused" in finding) == bool(refused)
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
    while not log.exists():
        assert job.poll() is None
        time.sleep(0.05)
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


def test_published_protocol_has_the_settings_of_its_scripts(import_benchmark):
    transfer = import_benchmark("gpu_transfer")
    protocol, rate = transfer.PROTOCOLS["published"], 2.0**-8
    spec = transfer.make_spec(protocol, transfer.CONDITIONS["mup"], 2048, rate, 1, "0" * 64)
    shape, hparams = spec.shape, spec.hparams
    assert (shape.num_layers, shape.num_heads) == (2, 32)
    assert (shape.ffn_width, shape.seq_len) == (8192, 1024)
    assert (spec.base_shape.width, spec.batch_sequences, spec.schedule.num_steps) == (256, 32, 1000)
    assert (hparams.beta1, hparams.beta2) == (0.9, 0.95)
    assert (hparams.weight_decay, hparams.clip_norm) == (0.1, 1.0)
    # The warmup of 2,000 steps is longer than the run of 1,000.
    for step, expected in ((499, rate * 500 / 2000), (999, rate / 2)):
        learning_rate = compute_lr_multiplier(spec.schedule, step) * hparams.learning_rate
        assert learning_rate == pytest.approx(expected)
