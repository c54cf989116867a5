"""Tests of `make gpu`, and of the GPU benchmarks of modes and of transfer.

A GPU is rarely available, so the scripts must be known to work before they run on one. The tests
train a tiny model on a CPU.
"""

import json
import subprocess
import sys

import pytest
import torch
from gpu_benchmark import ROOT, build_command, list_measured_steps, run_script
from trainer_venv import require_interpreter

from forerun._proxies.core.schedule import compute_lr_multiplier

QUICK_PYTHON = f"""#!/bin/sh
case "$*" in
-c*) ;;
*) exec {sys.executable} "$@" --quick ;;
esac
"""
"""An interpreter that adds --quick to every script.

It does nothing for `-c`, with which the recipe of `make gpu` checks whether there is a GPU.
"""


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
