"""Test of a user's training command that the real driver runs on a host: all kinds of outcomes,
retries, and a folder for each attempt.
"""

from pathlib import Path

import command_cases as cases
import pytest

from forerun._launcher.study.plan.study import build_bank_key
from forerun._launcher.study.workers.host import HostFactory
from forerun._sweeps.run.driver import drive
from forerun._sweeps.run.pool import InlinePool
from forerun._sweeps.search.source import StaticSource
from forerun._sweeps.store.ledger import Ledger

FLAKY = """
if RUN["values"]["seed"] == 1 and not RUN["values"]["run_dir"].endswith("attempt-2"): sys.exit("no memory")
if RUN["values"]["seed"] == 2: sys.exit("no luck")
if RUN["values"]["seed"] == 3: log(step=2, train_loss=float("nan"))
for step in range(1, N + 1): log(step=step, train_loss=3.0, norm=1.0)
log(step=N, val_loss=2.0 + RUN["values"]["seed"])
"""  # noqa: E501
# A trainer that fails once (seed 1), always (seed 2), diverges (seed 3), or finishes (seed 0)


@pytest.fixture
def factory(tmp_path):
    (tmp_path / "code").mkdir()
    return HostFactory(
        study_dir=str(tmp_path / "study"),
        code_dir=str(tmp_path / "code"),
        corpus="",
        timeout_seconds=30.0,
    )


def write_trainer(factory, code):
    (Path(factory.code_dir) / "trainer.py").write_text(cases.PREAMBLE + code)


def drive_runs(factory, pool, specs, **options):
    """Drive the runs to their end; return their results."""
    study_dir = Path(factory.study_dir)
    with Ledger.open(study_dir, {}, create=True) as ledger:
        source = StaticSource(specs, build_bank_key)
        drive(source, pool, ledger, study_dir, bank_key_for=build_bank_key, **options)
        return [ledger.get_results()[spec.id] for spec in specs]


def test_driver_records_outcomes_of_every_kind(factory):
    write_trainer(factory, FLAKY)
    specs = [
        cases.make_command_spec(cases.make_command(grad_norm_key="norm"), seed=seed)
        for seed in range(4)
    ]
    good, retried, failed, diverged = drive_runs(
        factory, InlinePool(factory), specs, max_attempts=2
    )
    assert (good.status, good.loss_nats) == ("finished", 2.0)
    assert (retried.status, retried.loss_nats) == ("finished", 3.0)
    assert failed.status == "failed" and failed.reason.startswith(
        "lost 2 times, the last: your code failed: run "
    )
    assert "exit code 1" in failed.reason and failed.reason.endswith("no luck")
    assert (diverged.status, diverged.reason) == ("diverged", "train_loss is NaN at step 2")
    folder = Path(factory.study_dir) / "external"
    assert [len(list((folder / spec.id).iterdir())) for spec in specs] == [1, 2, 2, 1]
