"""The GPU benchmark's own logic, on a CPU with a tiny model: it must not rot until a GPU is lent."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def benchmark(*arguments):
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_nothing_is_measured(tmp_path):
    done = benchmark("--json", tmp_path / "gpu.json")
    assert (done.returncode, done.stderr) == (2, "needs a CUDA device; not measured\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_every_figure_is_told_and_other_proxies_stay(tmp_path):
    out = tmp_path / "gpu.json"
    out.write_text(json.dumps({"models": {"40M": "of an earlier run"}}))
    done = benchmark("--device", "cpu", "--quick", "--json", out)
    assert done.returncode == 0, done.stderr
    models = json.loads(out.read_text())["models"]
    assert models["40M"] == "of an earlier run"
    (case,) = models["tiny"]["cases"]
    modes = {mode["mode"]: mode for mode in case["modes"]}
    assert {"one slot", "2 slots"} <= modes.keys()
    assert case["chosen"] in modes
    # A step of one slot: 6 FLOPs a weight of products and 6 * 16 * 16 of attention a token, 2 sequences of 16.
    step_flops = (6 * (4 * 16 * 16 + 3 * 16 * 32 + 64 * 16) + 6 * 16 * 16) * 2 * 16
    for mode in (modes["one slot"], modes["2 slots"]):
        assert not mode["refused"]
        achieved = mode["trial_steps_per_second"] * step_flops
        assert mode["share_of_peak"] * models["tiny"]["peak_flops"] == pytest.approx(achieved)
    assert modes["one slot"]["over_one_eager_trial"] == 1
    assert {"1 eager processes", "2 eager processes"} <= case["trials_per_hour"].keys()
    assert f"| {case['chosen']} |" in done.stdout


def test_what_comes_too_late_is_said_to_be_unreached(tmp_path):
    out = tmp_path / "gpu.json"
    assert benchmark("--device", "cpu", "--quick", "--seconds", 0, "--json", out).returncode == 0
    (case,) = json.loads(out.read_text())["models"]["tiny"]["cases"]
    assert {mode["refused"] for mode in case["modes"]} == {"not reached"}
    assert case["processes"] == {}
