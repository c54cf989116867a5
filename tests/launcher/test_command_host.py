"""Commands behind the pool: through the driver for real, over JSON, retried, and gone with their
worker.
"""

import importlib.util
from pathlib import Path

import pytest

from launcher.study.stages import bank_key
from launcher.workers.host import HostFactory
from sweeps.run.driver import drive
from sweeps.run.pool import InlinePool
from sweeps.search.source import StaticSource
from sweeps.store.ledger import Ledger

_spec = importlib.util.spec_from_file_location(
    "cases", Path(__file__).parents[1] / "proxies" / "command_cases.py"
)
cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cases)

FLAKY = """
if RUN["values"]["seed"] == 1 and not RUN["values"]["run_dir"].endswith("attempt-2"): sys.exit("no memory")
if RUN["values"]["seed"] == 2: sys.exit("no luck")
if RUN["values"]["seed"] == 3: log(step=2, train_loss=float("nan"))
for step in range(1, N + 1): log(step=step, train_loss=3.0, norm=1.0)
log(step=N, val_loss=2.0 + RUN["values"]["seed"])
"""  # noqa: E501


@pytest.fixture
def factory(tmp_path):
    (tmp_path / "code").mkdir()
    return HostFactory(
        study_dir=str(tmp_path / "study"),
        code_dir=str(tmp_path / "code"),
        corpus="",
        timeout_seconds=30.0,
    )


def trainer(factory, code):
    (Path(factory.code_dir) / "trainer.py").write_text(cases.PREAMBLE + code)


def run(factory, pool, specs, **options):
    study_dir = Path(factory.study_dir)
    with Ledger.open(study_dir, {}, create=True) as ledger:
        source = StaticSource(specs, bank_key)
        drive(
            source,
            pool,
            ledger,
            study_dir,
            num_slots_for=lambda spec: 1,
            bank_key_for=bank_key,
            **options,
        )
        return [ledger.results()[spec.id] for spec in specs]


def test_outcomes_of_every_kind_through_the_driver(factory):
    trainer(factory, FLAKY)
    specs = [
        cases.command_spec(cases.command(grad_norm_key="norm"), seed=seed) for seed in range(4)
    ]
    good, retried, failed, diverged = run(factory, InlinePool(factory), specs, max_attempts=2)
    assert (good.status, good.loss_nats) == ("finished", 2.0)
    assert (retried.status, retried.loss_nats) == ("finished", 3.0)
    assert failed.status == "failed" and failed.reason.startswith(
        "lost 2 times, the last: your code failed: run "
    )
    assert "exit code 1" in failed.reason and failed.reason.endswith("no luck")
    assert (diverged.status, diverged.reason) == ("diverged", "train_loss is NaN at step 2")
    folder = Path(factory.study_dir) / "external"
    assert [len(list((folder / spec.id).iterdir())) for spec in specs] == [1, 2, 2, 1]
