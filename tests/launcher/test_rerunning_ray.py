"""Real worker processes of a real `forerun sweep` on Ray: one of them flips a bit, and is found."""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest
from rerun_case import PLAN, flipped
from tiny_study import forerun, plan_with, write_corpus

from launcher.workers import host as host_module
from launcher.workers.host import HostFactory
from sweeps.store.ledger import Ledger


@dataclasses.dataclass(frozen=True, kw_only=True)
class OddFactory(HostFactory):
    """The first process that makes a host flips a bit of a gradient in every second step, from then on."""

    claim: str = ""

    def __call__(self):
        try:
            Path(self.claim).touch(exist_ok=False)
        except FileExistsError:
            return super().__call__()
        from proxies.model.optimizer import BankAdamW

        gather, steps = BankAdamW.gather_gradients, [0]

        def gathered(self):
            norms_K = gather(self)
            steps[0] += 1
            if steps[0] % 5 == 0:
                for row_P in self.gradients_KP:
                    flipped(row_P, 20, everywhere=False)
            return norms_K

        BankAdamW.gather_gradients = gathered  # this process is the worker's own, and ends with it
        return super().__call__()


@pytest.mark.slow  # `test_rerunning` finds such a machine in this process
@pytest.mark.parametrize("corrupt", [True, False])
def test_a_worker_process_that_flips_a_bit_is_found(tmp_path, corrupt):
    write_corpus(tmp_path)
    ray = '[cluster]\nbackend = "ray"\nnum_workers = 2\n'
    plan, claim = plan_with(tmp_path, PLAN.format(num_slots=2) + ray), tmp_path / "claim"
    if not corrupt:
        claim.touch()
    factory = mock.patch.object(host_module, "HostFactory", lambda **more: OddFactory(claim=str(claim), **more))
    with factory:
        code, out, err = forerun("sweep", plan, "--study", tmp_path / "study")
    ledger = Ledger.read(tmp_path / "study")
    bodies = [record.body for record in ledger.records("replayed")]
    assert [body["apart"] for body in bodies] == ["process"], err
    assert len({run.result.environment["process"] for run in ledger.runs()}) == 2
    if corrupt:
        assert code == 3 and "differs" in {body["outcome"] for body in bodies}, err + out
    else:
        assert code == 0 and {body["outcome"] for body in bodies} == {"agrees"}, err + out
