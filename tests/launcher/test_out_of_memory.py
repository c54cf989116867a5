"""A worker that has too little memory for a whole batch, for real: the same run, in parts."""

import json
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HEADROOM_MIB = 1400
CHILD = """
    import dataclasses, json, resource, sys
    sys.path.insert(0, {here!r})
    from pathlib import Path
    import torch
    from main_run import spec_of, write_corpus
    from launcher.workers.host import HostFactory
    from launcher.study.stages import bank_key
    from proxies.core.spec import Numerics
    from sweeps.run.driver import drive
    from sweeps.store.ledger import Ledger
    from sweeps.run.pool import InlinePool
    from sweeps.search.source import StaticSource

    folder = Path({folder!r})
    spec = spec_of(write_corpus(folder / "corpus").data_id)
    large = {{name: dataclasses.replace(getattr(spec, name), vocab_size=2**15) for name in ("shape", "base_shape")}}
    schedule = dataclasses.replace(spec.schedule, num_steps=3, warmup_steps=1)
    spec = dataclasses.replace(
        spec, **large, schedule=schedule, batch_tokens=64 * 32, numerics=Numerics(num_slots={num_slots})
    )
    factory = HostFactory(study_dir=str(folder / "study"), corpus=str(folder / "corpus" / "tokens"))

    def run(study, headroom_bytes):
        with Ledger.open(study, {{}}, create=True) as ledger:
            if headroom_bytes:
                used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used + headroom_bytes, -1))
            try:
                drive(
                    StaticSource([spec], bank_key), InlinePool(factory), ledger, study,
                    num_slots_for=lambda spec: spec.numerics.num_slots, bank_key_for=bank_key,
                )
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
            result = ledger.results()[spec.id]
            return [result.loss_nats, result.environment.get("num_microbatches"), result.status,
                    [record.body["cause"] for record in ledger.records("lost")]]

    print(json.dumps(run(folder / "study", {headroom_mib} * 2**20)))
"""  # noqa: E501


def run_with(tmp_path, headroom_mib, num_slots=2):
    """What a process of its own makes of the run: what one has freed it would use again, whatever
    the limit.
    """
    code = textwrap.dedent(CHILD).format(
        here=str(Path(__file__).parent),
        folder=str(tmp_path / str(headroom_mib)),
        num_slots=num_slots,
        headroom_mib=headroom_mib,
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_batch_too_large_is_trained_in_parts(tmp_path):
    """A batch's logits alone take 256 MiB a slot, and so do their gradients and what the loss
    keeps.
    """
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY, (
        "this test needs room to begin with"
    )
    whole, tight = run_with(tmp_path, 0), run_with(tmp_path, HEADROOM_MIB)
    assert whole[1:] == [None, "finished", []]
    assert tight[0] == pytest.approx(whole[0], abs=1e-5)
    assert int(tight[1]) >= 2 and tight[2] == "finished"
    assert tight[3] and set(tight[3]) == {"out_of_memory"}
