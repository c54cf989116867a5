"""Test of a worker without the memory for a full batch: it trains the same run in microbatches."""

import json
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HEADROOM_MIB = 1400
"""Memory that the process may take in addition. A full batch of two slots takes six times 256 MiB
for its logits, their gradients, and the loss; half a batch takes half of that."""
CHILD = """
    import dataclasses, json, resource, sys
    sys.path.insert(0, {here!r})
    from pathlib import Path
    import torch
    from main_run import make_spec, write_corpus
    from forerun._launcher.study.workers.host import HostFactory
    from forerun._launcher.study.plan.study import build_bank_key
    from forerun._proxies.core.spec import Numerics
    from forerun._sweeps.run.driver import drive
    from forerun._sweeps.store.ledger import Ledger
    from forerun._sweeps.run.pool import InlinePool
    from forerun._sweeps.search.source import StaticSource

    folder = Path({folder!r})
    spec = make_spec(write_corpus(folder / "corpus").data_id)
    large = {{name: dataclasses.replace(getattr(spec, name), vocab_size=2**15) for name in ("shape", "base_shape")}}
    schedule = dataclasses.replace(spec.schedule, num_steps=3, warmup_steps=1)
    spec = dataclasses.replace(
        spec, **large, schedule=schedule, batch_tokens=64 * 32, numerics=Numerics(num_slots=2)
    )
    factory = HostFactory(study_dir=str(folder / "study"), corpus=str(folder / "corpus" / "tokens"))

    def run(study, headroom_bytes):
        with Ledger.open(study, {{}}, create=True) as ledger:
            if headroom_bytes:
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + headroom_bytes, -1))
            try:
                drive(
                    StaticSource([spec], build_bank_key), InlinePool(factory), ledger, study,
                    bank_key_for=build_bank_key,
                )
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
            result = ledger.get_results()[spec.id]
            return [result.loss_nats, result.environment.get("num_microbatches"), result.status,
                    [record.body["cause"] for record in ledger.read_records("lost")]]

    print(json.dumps(run(folder / "study", {headroom_mib} * 2**20)))
"""  # noqa: E501


def run_in_child(tmp_path, headroom_mib):
    """Train the run in a new process, and return what it printed; 0 MiB means no limit of memory.

    A process that had trained before would use its freed memory again, in spite of the limit.
    """
    code = textwrap.dedent(CHILD).format(
        here=str(Path(__file__).parents[2] / "support" / "launcher"),
        folder=str(tmp_path / str(headroom_mib)),
        headroom_mib=headroom_mib,
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_batch_that_exceeds_the_memory_is_trained_in_microbatches(tmp_path):
    """Two slots, which are two runs that the worker trains at once, share the limited memory."""
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY, (
        "this test needs room to begin with"
    )
    full_loss, *full_outcome = run_in_child(tmp_path, 0)
    assert full_outcome == [None, "finished", []]
    loss, num_microbatches, status, causes = run_in_child(tmp_path, HEADROOM_MIB)
    assert loss == pytest.approx(full_loss, abs=1e-5)
    assert int(num_microbatches) >= 2 and status == "finished"
    assert causes and set(causes) == {"out_of_memory"}
