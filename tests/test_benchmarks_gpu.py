"""`make gpu` and its benchmark, rehearsed on a CPU with a tiny model: they must not rot until a GPU
is lent.
"""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from trainer_venv import interpreter

from proxies.core.schedule import lr_multiplier

ROOT = Path(__file__).parents[1]
REFUSING = """
import sys

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ray", "optuna", "wandb", "pydantic", "click"}:
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
CONTROL = """#!/bin/sh
case "$1" in -d) order=start ;; *) read -r order ;; esac
echo "$order $CUDA_MPS_PIPE_DIRECTORY" >> {told}
case "$order" in
start) {start} ;;
get_server_list) {servers} ;;
esac
"""
"""A control program of MPS that notes what it was told."""


@pytest.fixture
def bare(tmp_path):
    """The environment of an interpreter that lacks what a lent machine may lack; its children lack
    it too.
    """
    (tmp_path / "refusing").mkdir()
    (tmp_path / "refusing" / "sitecustomize.py").write_text(REFUSING)
    # `MAKEFLAGS` would have our own `make` seen by the one that is asked here.
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAKE", "FORERUN_"))
    }
    return {**kept, "PYTHONPATH": str(tmp_path / "refusing")}


@pytest.fixture
def bench(monkeypatch):
    """Imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "gpu")
    return importlib.import_module


def mps(folder, start="true", servers="echo 4321"):
    """A folder with such a control program, and where it notes its orders."""
    folder.mkdir()
    control = folder / "nvidia-cuda-mps-control"
    control.write_text(CONTROL.format(told=folder / "told", start=start, servers=servers))
    control.chmod(0o755)
    return folder, folder / "told"


def orders(told):
    return [line.split()[0] for line in told.read_text().splitlines()] if told.exists() else []


def command(*arguments):
    return [sys.executable, ROOT / "benchmarks" / "gpu" / "gpu.py", *map(str, arguments)]


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
    assert len(steps_told(done.stdout)) == len(steps) - len(kept), (
        "what was kept is not measured again"
    )
    assert not set(steps_told(before)) & set(steps_told(done.stdout))
    (case,) = models["tiny"]["cases"]
    modes = {mode["mode"]: mode for mode in case["modes"]}
    assert {"one slot", "2 slots"} <= modes.keys()
    assert case["chosen"] in modes
    # A step of one slot: 6 FLOPs a weight of products and 6 * 16 * 16 of attention a token, 2
    # sequences of 16.
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
@pytest.mark.timeout(600)
def test_make_gpu_needs_neither_our_environment_nor_what_a_lent_machine_lacks(tmp_path, bare):
    python, out = tmp_path / "python", tmp_path / "out"
    python.write_text(PRETENDING)
    python.chmod(0o755)

    def made(*settings):
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
        return subprocess.run(recipe, capture_output=True, text=True, check=False, env=bare)

    short = made("GPU_SECONDS=0")
    assert short.returncode == 2 and "Error 3" in short.stderr, short.stderr
    whole = made()
    assert whole.returncode == 0, whole.stdout + whole.stderr
    marked = {
        path.name
        for path in (ROOT / "tests").rglob("test_*.py")
        if "\n@pytest.mark.gpu\n" in path.read_text()
    }
    assert marked and all(name in whole.stdout for name in marked)
    (case,) = json.loads((out / "gpu.json").read_text())["models"]["tiny"]["cases"]
    assert not any(mode["refused"] for mode in case["modes"])
    parts = json.loads((out / "gpu-core.json").read_text())["parts"]
    assert len(parts) == 9 and {part["exit_code"] for part in parts.values()} == {0}
    told = "torchtitan, compiled: " + (
        "" if interpreter("torchtitan") else "left out: torchtitan is not installed\n"
    )
    assert told in whole.stdout
    runs = json.loads((out / "gpu_transfer_published.json").read_text())["runs"].values()
    assert len(runs) == 14 and all(run["loss"] > 0 for run in runs)
    assert "gpu: " not in made().stdout, "what has ended well is not begun again"


@pytest.mark.slow
def test_the_trainer_beside_the_proxy_is_rehearsed_resumed_and_told(tmp_path, bare):
    script = [
        sys.executable,
        ROOT / "benchmarks" / "gpu" / "gpu_trainer.py",
        "--out",
        tmp_path,
        "--quick",
    ]

    def called(*more):
        return subprocess.run(
            [*script, *more], capture_output=True, text=True, check=False, env=bare
        )

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
    script = [
        sys.executable,
        ROOT / "benchmarks" / "gpu" / "gpu_transfer.py",
        "--out",
        tmp_path,
        "--quick",
        "--seeds",
        "1",
    ]
    done = subprocess.run(script, capture_output=True, text=True, check=False, env=bare)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("width 16, rate") == 14, (
        "at its base the standard parametrization is muP"
    )
    again = subprocess.run(script, capture_output=True, text=True, check=False, env=bare)
    assert (again.returncode, again.stdout.count("\n")) == (0, 5), (
        "nothing is trained again; a line a width"
    )
    for name in ("mup", "sp", "muon"):
        table = [
            "transfer",
            "--runs",
            tmp_path / f"gpu_transfer-{name}.csv",
            "--target-width",
            "64",
            "--json",
        ]
        judged = subprocess.run(
            [sys.executable, "-m", "launcher", *table], capture_output=True, text=True, check=False
        )
        assert judged.returncode in (0, 3, 4), judged.stderr
        assert [one["size"] for one in json.loads(judged.stdout)["optima"]] == [16, 32]


@pytest.mark.slow
def test_workers_by_turns_and_by_mps_are_rehearsed_resumed_and_told(tmp_path, bare):
    folder, told = mps(tmp_path / "bin")
    env = {**bare, "PATH": f"{folder}:{bare['PATH']}"}
    out = tmp_path / "workers.json"
    script = [
        sys.executable,
        ROOT / "benchmarks" / "gpu" / "gpu_workers.py",
        "--quick",
        "--json",
        out,
    ]

    def called(*more):
        return subprocess.run(
            [*script, *more], capture_output=True, text=True, check=False, env=env
        )

    late = called("--seconds", "0")
    assert (late.returncode, steps_told(late.stdout)) == (3, []), late.stderr
    done = called()
    assert done.returncode == 0, done.stdout + done.stderr
    ways = ("alone", "in turns", "by MPS")
    assert steps_told(done.stdout) == [f"measured: tiny, 2 sequences, {way}" for way in ways]
    tiny = json.loads(out.read_text())["models"]["tiny"]
    rates = {way: tiny["steps"][f"2 sequences, {way}"]["trial_steps_per_second"] for way in ways}
    assert [len(rates[way]) for way in ways] == [1, 2, 2] and all(
        rate > 0 for each in rates.values() for rate in each
    )
    over = rates["by MPS"][1] / rates["in turns"][0]
    assert (
        "tiny, 2 sequences, by MPS: " in done.stdout
        and f"2: {rates['by MPS'][1]:.1f} ({over:.2f})\n" in done.stdout
    )
    assert orders(told) == ["start", "get_server_list", "quit"]
    again = called()
    findings = "".join(
        line for line in done.stdout.splitlines(keepends=True) if not line.startswith("measured: ")
    )
    assert (again.returncode, again.stdout, len(orders(told))) == (0, findings, 3)
    assert json.loads(out.read_text())["models"]["tiny"] == tiny


@pytest.mark.parametrize(
    ("start", "servers", "failing", "refused", "told"),
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
def test_mps_is_quit_whatever_happens_and_what_it_does_not_do_is_a_finding(
    tmp_path, monkeypatch, bench, start, servers, failing, refused, told
):
    folder, log = mps(tmp_path / "bin", start or "", servers)
    if start is None:
        (folder / "nvidia-cuda-mps-control").unlink()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    seen = []

    def measured(environment):
        seen.append(Path(environment["CUDA_MPS_PIPE_DIRECTORY"]))
        assert seen[0].is_dir()
        if failing:
            raise RuntimeError("a process ended without an answer, exit code 1: no context")
        return {"trial_steps_per_second": [1.0]}

    found = bench("gpu_workers").by_mps(measured)
    assert refused in found.get("refused", "") and ("refused" in found) == bool(refused)
    assert "not_quit" not in found
    assert orders(log) == told
    assert not any(place.exists() for place in seen), "its folder was temporary"


@pytest.fixture
def first_mps(tmp_path, bare, bench):
    """Starts the benchmark where only its processes under MPS are left; with the program's
    orders.
    """
    folder, told = mps(tmp_path / "bin")
    done = {
        f"2 sequences, {way}": {"trial_steps_per_second": [1.0, 2.0]}
        for way in ("alone", "in turns")
    }
    tiny = {"machine": bench("gpu_runs").machine(), "steps": done}
    (tmp_path / "workers.json").write_text(json.dumps({"models": {"tiny": tiny}}))
    script = [
        sys.executable,
        ROOT / "benchmarks" / "gpu" / "gpu_workers.py",
        "--quick",
        "--json",
        tmp_path / "workers.json",
    ]
    env = {**bare, "PATH": f"{folder}:{bare['PATH']}"}
    with subprocess.Popen(script, env=env, stdout=subprocess.PIPE, text=True) as job:
        yield job, told
        job.kill()


@pytest.mark.slow
def test_a_call_that_is_ended_ends_mps_too(first_mps):
    job, told = first_mps
    while not told.exists():
        assert job.poll() is None
        time.sleep(0.05)
    job.terminate()
    assert job.wait(60) == 143 and orders(told) == ["start", "quit"]


def test_mps_that_was_not_to_be_had_is_not_tried_again(bench, monkeypatch, tmp_path, capsys):
    """Neither for the next batch nor in the next call."""
    workers, gpu, tried = bench("gpu_workers"), bench("gpu"), []
    monkeypatch.setattr(workers, "processes", lambda *_: {"trial_steps_per_second": [1.0, 2.0]})
    monkeypatch.setattr(
        workers, "by_mps", lambda run: (tried.append(run), {"refused": "it hangs"})[1]
    )
    settings = gpu.quick(gpu.Settings(device="cpu", plain=gpu.Numerics(), models={}, seconds=60))
    settings, file = dataclasses.replace(settings, batches=(2, 4)), {"models": {"tiny": {}}}
    for call in ("first", "second"):
        (tmp_path / call).mkdir()
        workers.workers(settings, tmp_path / call, file, lambda: None)
    assert len(tried) == 1 and capsys.readouterr().out.count("by MPS: left out: it hangs") == 4


def test_a_process_that_fails_or_hangs_is_told_with_its_last_words(bench):
    together = bench("process_tree").together

    def program(text):
        return [sys.executable, "-c", text]

    saying = "import sys; print('ready', flush=True)\nfor _ in sys.stdin: print({}, flush=True)"
    rates, start_seconds = together(program(saying.format("2.5")), [1, 3])
    assert rates == [2.5, 7.5] and start_seconds > 0
    with pytest.raises(RuntimeError, match=r"answer, exit code 1: ValueError: no kernel\n"):
        together(program("raise ValueError('no kernel')"), [2])
    with pytest.raises(RuntimeError, match="exit code 1: ZeroDivisionError"):
        together(program(saying.format("1 / 0")), [2])
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="killed at the time limit: no output"):
        together(program("import time; time.sleep(60)"), [1], limit_seconds=0.5)
    assert time.monotonic() - began < 20


def test_a_step_whose_processes_fail_makes_the_call_fail(tmp_path, bench, capsys):
    gpu = bench("gpu")
    settings = gpu.quick(gpu.Settings(device="cpu", plain=gpu.Numerics(), models={}, seconds=60))
    steps = gpu.Steps(model="tiny", body={}, deadline=0.0, save=lambda: None)
    failing = lambda: gpu.processes(settings, "tiny", 2, tmp_path / "nowhere", [1], settings.plain)  # noqa: E731
    found = steps.once("2 sequences, 1 processes", lambda: gpu.attempt(failing), needed=True)
    assert "nowhere" in found["error"] and gpu.exit_code([steps]) == 1
    assert (
        "tiny, 2 sequences, 1 processes: FAILED: RuntimeError: a process ended"
        in capsys.readouterr().out
    )


@pytest.mark.slow
def test_torchtitan_is_rehearsed_beside_the_embedded_trainer(tmp_path, bare):
    python = interpreter("torchtitan")
    script = [
        sys.executable,
        ROOT / "benchmarks" / "gpu" / "gpu_trainer.py",
        "--out",
        tmp_path,
        "--quick",
    ]
    env = {**bare, "FORERUN_TORCHTITAN_PYTHON": str(python)}

    def called(ways):
        return subprocess.run(
            [*script, "--ways", ways], capture_output=True, text=True, check=False, env=env
        )

    assert called("trainer,proxy").returncode == 0
    env["PYTHONPATH"] = ""
    done = called("torchtitan")
    assert done.returncode == 0, done.stdout + done.stderr
    assert steps_told(done.stdout) == [
        f"measured: tiny, torchtitan, {how}" for how in ("eager", "compiled")
    ]
    tiny = json.loads((tmp_path / "gpu_trainer.json").read_text())["models"]["tiny"]["steps"]
    for how in ("eager", "compiled"):
        assert tiny[f"torchtitan, {how}"]["losses"] == pytest.approx(
            tiny["trainer, eager"]["losses"], abs=1e-4
        )
        assert min(tiny[f"torchtitan, {how}"]["seconds"]) > 0
    assert called("torchtitan").returncode == 0


@pytest.fixture
def titan(tmp_path, monkeypatch, bench):
    """What a program in place of torchtitan's gives."""
    trainer = bench("gpu_trainer")
    monkeypatch.setattr(trainer, "MAIN", program := tmp_path / "program.py")
    monkeypatch.setattr(trainer, "LIMIT_SECONDS", 20.0)
    monkeypatch.setattr(trainer, "torchtitan_python", lambda: Path(sys.executable))
    monkeypatch.setattr(trainer.torchtitan, "export", lambda decision, folder: None)

    def found(text):
        program.write_text(text)
        return trainer.by_torchtitan(trainer.quick(trainer.Settings(sizes={})), tmp_path, None)

    return found


@pytest.mark.slow
def test_a_torchtitan_that_hangs_leaves_the_gpu(tmp_path, titan):
    told = tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        titan(f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(100)")
    assert not Path("/proc", told.read_text()).exists()


def test_a_torchtitan_that_does_not_load_is_a_finding_and_one_that_fails_is_told(titan):
    found = titan("from os import DataParallelMeshDims")
    assert (
        "torchtitan does not load here: ImportError: cannot import name 'DataPar"
        in found["refused"]
    )
    with pytest.raises(RuntimeError, match=r"torchtitan: exit code 1: \['ValueError: no kernel'\]"):
        titan("raise ValueError('no kernel')")
    with pytest.raises(RuntimeError, match="ImportError"):
        titan("import os; open(os.environ['LOSSES'], 'w'); raise ImportError('amid the steps')")


def test_the_published_protocol_is_that_of_its_scripts(bench):
    transfer = bench("gpu_transfer")
    protocol, rate = transfer.PROTOCOLS["published"], 2.0**-8
    spec = transfer.spec_of(protocol, transfer.CONDITIONS["mup"], 2048, rate, 1, "0" * 64)
    shape, hparams = spec.shape, spec.hparams
    assert (shape.num_layers, shape.num_heads, shape.ffn_width, shape.seq_len) == (
        2,
        32,
        8192,
        1024,
    )
    assert (spec.base_shape.width, spec.batch_sequences, spec.schedule.num_steps) == (256, 32, 1000)
    assert (hparams.beta1, hparams.beta2, hparams.weight_decay, hparams.clip_norm) == (
        0.9,
        0.95,
        0.1,
        1.0,
    )
    # 2,000 steps of warmup in a run of 1,000.
    assert lr_multiplier(spec.schedule, 499) * hparams.learning_rate == pytest.approx(
        rate * 500 / 2000
    )
    assert lr_multiplier(spec.schedule, 999) * hparams.learning_rate == pytest.approx(rate / 2)
