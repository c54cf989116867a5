"""Commands behind the pool: through the driver for real, over JSON, retried, and gone with their worker."""

import contextlib
import dataclasses
import importlib.util
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.study.stages import bank_key
from launcher.workers.host import HostFactory
from proxies.core import canon
from sweeps.run.drive import drive
from sweeps.run.pool import Advance, InlinePool
from sweeps.search.source import StaticSource
from sweeps.store.ledger import Ledger

_spec = importlib.util.spec_from_file_location("cases", Path(__file__).parents[1] / "proxies" / "command_cases.py")
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)

FLAKY = """
if RUN["values"]["seed"] == 1 and not RUN["values"]["run_dir"].endswith("attempt-2"): sys.exit("no memory")
if RUN["values"]["seed"] == 2: sys.exit("no luck")
if RUN["values"]["seed"] == 3: log(step=2, train_loss=float("nan"))
for step in range(1, N + 1): log(step=step, train_loss=3.0, norm=1.0)
log(step=N, val_loss=2.0 + RUN["values"]["seed"])
"""


@pytest.fixture
def factory(tmp_path):
    (tmp_path / "code").mkdir()
    return HostFactory(
        study_dir=str(tmp_path / "study"), code_dir=str(tmp_path / "code"), corpus="", timeout_seconds=30.0
    )


def trainer(factory, code):
    (Path(factory.code_dir) / "trainer.py").write_text(cases.PREAMBLE + code)


def run(factory, pool, specs, **options):
    study_dir = Path(factory.study_dir)
    with Ledger.open(study_dir, {}, create=True) as ledger:
        source = StaticSource(specs, bank_key)
        drive(
            source, pool, ledger, study_dir,
            num_slots_for=lambda spec: 1, bank_key_for=bank_key, steps_per_call=50, **options,
        )  # fmt: skip
        return [ledger.results()[spec.id] for spec in specs]


def test_outcomes_of_every_kind_through_the_driver(factory):
    trainer(factory, FLAKY)
    specs = [cases.command_spec(cases.command(grad_norm_key="norm"), seed=seed) for seed in range(4)]
    good, retried, failed, diverged = run(factory, InlinePool(factory), specs, max_attempts=2)
    assert (good.status, good.loss_nats) == ("finished", 2.0)
    assert (retried.status, retried.loss_nats) == ("finished", 3.0)
    assert failed.status == "failed" and failed.reason.startswith("lost 2 times, the last: your code failed: run ")
    assert "exit code 1" in failed.reason and failed.reason.endswith("log.txt ends: no luck")
    assert (diverged.status, diverged.reason) == ("diverged", "train_loss is NaN at step 2")
    folder = Path(factory.study_dir) / "external"
    assert [len(list((folder / spec.id).iterdir())) for spec in specs] == [1, 2, 2, 1]


def test_the_users_own_python_path_reaches_the_command(factory, monkeypatch):
    """And its worker needs no torch."""
    trainer(factory, "assert os.environ['PYTHONPATH'] == 'the users'\n" + cases.GOOD)
    monkeypatch.setenv("PYTHONPATH", "the users")
    made = pickle.dumps(dataclasses.replace(factory, python_path=os.environ["PYTHONPATH"]))
    code = (
        f"import json, pickle, sys; sys.path[:0] = {sys.path!r}; host = pickle.loads({made!r})(); done = ()\n"
        "from sweeps.run.pool import Advance\n"
        "admit = ((0, json.load(sys.stdin)),)\n"
        "while not done:\n"
        "    done = host.advance(Advance(bank_key='a', num_slots=1, admit=admit, max_steps=50)).finished\n"
        "    admit = ()\n"
        "assert done[0].result['status'] == 'finished' and 'torch' not in sys.modules"
    )
    spec = canon.canonical(cases.command_spec())
    monkeypatch.setenv("PYTHONPATH", "ours")
    subprocess.run([sys.executable, "-c", code], input=spec, text=True, check=True)


@pytest.mark.slow
def test_a_worker_of_rays_is_killed_with_all_it_ran(factory):
    """Ray kills a worker's children, but not theirs: the keeper must be none of them."""
    from sweeps.ray.pool import RayPool

    code = "child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
    trainer(factory, code + "open('up', 'w').write(str(child.pid))\ntime.sleep(300)")
    with contextlib.closing(RayPool(1, factory)) as pool:
        spec = canon.to_json(cases.command_spec())
        pool.start(0, Advance(bank_key="a", num_slots=1, admit=((0, spec),), max_steps=50))
        pid = cases.number_in(Path(factory.code_dir) / "up", 30)
        pool.restart(0)
        assert cases.gone(pid)
