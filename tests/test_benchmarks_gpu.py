"""`make gpu` and its benchmark, rehearsed on a CPU with a tiny model: they must not rot until a GPU is lent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
REFUSING = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ray", "optuna", "wandb", "pydantic"}:
            raise ModuleNotFoundError(f"a lent machine lacks {name}", name=name)

sys.meta_path.insert(0, Refusing())
"""
PRETENDING = f"""#!/bin/sh
case "$*" in
-c*) ;;
*) exec {sys.executable} "$@" --quick ;;
esac
"""
"""An interpreter on a CPU that has the recipe believe in a GPU."""


@pytest.fixture
def bare(tmp_path):
    """The environment of an interpreter that lacks what a lent machine may lack; its children lack it too."""
    (tmp_path / "refusing").mkdir()
    (tmp_path / "refusing" / "sitecustomize.py").write_text(REFUSING)
    # `MAKEFLAGS` would have our own `make` seen by the one that is asked here.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return {**kept, "PYTHONPATH": str(tmp_path / "refusing")}


def command(*arguments):
    return [sys.executable, ROOT / "benchmarks" / "gpu.py", *map(str, arguments)]


def benchmark(*arguments, **given):
    return subprocess.run(command(*arguments), capture_output=True, text=True, check=False, **given)


def steps_told(output):
    return [line for line in output.splitlines() if line.startswith("measured: ")]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_nothing_is_measured(tmp_path):
    done = benchmark("--json", tmp_path / "gpu.json")
    assert (done.returncode, done.stderr) == (2, "needs a CUDA device; not measured\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_there_was_no_time_for_is_left_out(tmp_path, bare):
    done = benchmark("--quick", "--seconds", 0, "--json", tmp_path / "gpu.json", env=bare)
    assert done.returncode == 3, done.stderr
    tiny = json.loads((tmp_path / "gpu.json").read_text())["models"]["tiny"]
    assert not tiny["cases"] and tiny["peak_flops"] > 0


@pytest.mark.slow
def test_a_killed_call_is_resumed_and_every_figure_is_told(tmp_path, bare):
    out = tmp_path / "gpu.json"
    elsewhere = {"machine": {"device": "another"}, "steps": {"peak": 1.0}}
    out.write_text(json.dumps({"models": {"40M": "of an earlier run", "tiny": elsewhere}}))
    asked = ("--quick", "--json", out)
    with subprocess.Popen(command(*asked), stdout=subprocess.PIPE, text=True, env=bare) as killed:
        before = killed.stdout.readline() + killed.stdout.readline()
        killed.kill()
        before += killed.stdout.read()
    kept = json.loads(out.read_text())["models"]["tiny"]["steps"]
    assert len(kept) >= 2 and kept.get("peak") != 1.0, "of another machine"

    done = benchmark(*asked, env=bare)
    assert done.returncode == 0, done.stderr
    models = json.loads(out.read_text())["models"]
    assert models["40M"] == "of an earlier run"
    steps = models["tiny"]["steps"]
    assert kept == {name: steps[name] for name in kept}
    assert len(steps_told(done.stdout)) == len(steps) - len(kept), "what was kept is not measured again"
    assert not set(steps_told(before)) & set(steps_told(done.stdout))
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
    assert case["plain_loop"]["steps_per_second"] > 0
    assert {"1 eager processes", "2 eager processes"} <= case["trials_per_hour"].keys()
    assert f"| {case['chosen']} |" in done.stdout

    again = benchmark(*asked, env=bare)
    assert again.returncode == 0 and not steps_told(again.stdout)
    assert json.loads(out.read_text())["models"] == models


@pytest.mark.slow
def test_make_gpu_needs_neither_our_environment_nor_what_a_lent_machine_lacks(tmp_path, bare):
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(PRETENDING)
    python.chmod(0o755)

    def made(*settings):
        recipe = ["make", "-C", ROOT, "gpu", f"PYTHON={python}", f"GPU_OUT={out}", "VENV=/nowhere", *settings]
        return subprocess.run(recipe, capture_output=True, text=True, check=False, env=bare)

    short = made("GPU_SECONDS=0")
    assert short.returncode == 2 and "Error 3" in short.stderr, short.stderr
    whole = made()
    assert whole.returncode == 0, whole.stdout + whole.stderr
    marked = {path.name for path in (ROOT / "tests").rglob("test_*.py") if "\n@pytest.mark.gpu\n" in path.read_text()}
    assert marked and all(name in whole.stdout for name in marked)
    (case,) = json.loads((out / "gpu.json").read_text())["models"]["tiny"]["cases"]
    assert not any(mode["refused"] for mode in case["modes"])
    parts = json.loads((out / "gpu-core.json").read_text())["parts"]
    assert len(parts) == 6 and {part["exit_code"] for part in parts.values()} == {0}
    assert "gpu: " not in made().stdout, "what has ended well is not begun again"


@pytest.mark.slow
def test_the_trainer_beside_the_proxy_is_rehearsed_resumed_and_told(tmp_path, bare):
    script = [sys.executable, ROOT / "benchmarks" / "gpu_trainer.py", "--out", tmp_path, "--quick"]

    def called(*more):
        return subprocess.run([*script, *more], capture_output=True, text=True, check=False, env=bare)

    late = called("--seconds", "0")
    assert (late.returncode, steps_told(late.stdout)) == (3, ["measured: tiny, peak"]), late.stderr
    done = called()
    assert done.returncode == 0, done.stdout + done.stderr
    ways = [f"{who}, {how}" for how in ("eager", "compiled") for who in ("trainer", "proxy")]
    assert steps_told(done.stdout) == [f"measured: tiny, {name}" for name in ways]
    tiny = json.loads((tmp_path / "gpu_trainer.json").read_text())["models"]["tiny"]
    eager = tiny["steps"]["proxy, eager"]["losses"]
    assert len(eager) == 14
    assert all(tiny["steps"][way]["losses"] == pytest.approx(eager, abs=0.01) for way in ways)
    assert sum(" of the peak, " in line for line in tiny["findings"]) == 4
    # Where a way failed, it is told, and the call fails.
    content = json.loads((tmp_path / "gpu_trainer.json").read_text())
    content["models"]["tiny"]["steps"]["trainer, eager"] = {"error": "RuntimeError: no kernel"}
    (tmp_path / "gpu_trainer.json").write_text(json.dumps(content))
    again = called()
    assert (again.returncode, steps_told(again.stdout)) == (1, [])
    assert "tiny, trainer, eager: FAILED: RuntimeError: no kernel" in again.stdout


@pytest.mark.slow
def test_the_transfer_on_a_gpu_is_rehearsed_and_its_tables_are_judged(tmp_path, bare):
    script = [sys.executable, ROOT / "benchmarks" / "gpu_transfer.py", "--out", tmp_path, "--quick", "--seeds", "1"]
    done = subprocess.run(script, capture_output=True, text=True, check=False, env=bare)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("width 16, rate") == 14, "at its base the standard parametrization is muP"
    again = subprocess.run(script, capture_output=True, text=True, check=False, env=bare)
    assert (again.returncode, again.stdout.count("\n")) == (0, 5), "nothing is trained again; a line a width"
    for name in ("mup", "sp", "muon"):
        table = ["transfer", "--runs", tmp_path / f"gpu_transfer-{name}.csv", "--target-width", "64", "--json"]
        judged = subprocess.run([sys.executable, "-m", "launcher", *table], capture_output=True, text=True, check=False)
        assert judged.returncode in (0, 3, 4), judged.stderr
        assert [one["size"] for one in json.loads(judged.stdout)["optima"]] == [16, 32]
