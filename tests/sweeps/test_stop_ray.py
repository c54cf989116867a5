"""A stop under real Ray while one worker hangs: the other one saves, the driver keeps to its
grace.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from sweep_fakes import executions, make_specs

from sweeps.store.ledger import Ledger

HERE = Path(__file__).parent
GRACE_SECONDS = 5.0
CLOSING_SECONDS = 15.0  # of Ray, on a busy machine

SCRIPT = """
    import signal, sys, time
    sys.path.insert(0, {here!r})
    from pathlib import Path
    from sweep_fakes import FakeHostFactory, bank_key, make_specs, num_slots
    from sweeps.run.driver import drive
    from sweeps.store.ledger import Ledger
    from sweeps.ray.pool import RayPool
    from sweeps.search.source import StaticSource

    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    study = Path({study!r})
    pool = RayPool(2, FakeHostFactory({diary!r}, fault="hang 0", step_seconds=0.2))
    with Ledger.open(study, {{}}, create=True) as ledger:
        drive(
            StaticSource(make_specs(6, num_steps=200), bank_key), pool, ledger, study, num_slots_for=num_slots,
            bank_key_for=bank_key, should_stop=lambda: bool(stop), grace_seconds={grace},
        )
    print("stopped", time.monotonic(), flush=True)
    pool.close()
"""  # noqa: E501


@pytest.mark.slow
def test_grace_is_kept_though_a_worker_hangs(tmp_path):
    study, diary = tmp_path / "study", tmp_path / "diary"
    code = textwrap.dedent(SCRIPT).format(
        here=str(HERE), study=str(study), diary=str(diary), grace=GRACE_SECONDS
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while len(executions(diary, "begin")) < 6 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.0)
        os.kill(process.pid, signal.SIGTERM)
        asked = time.monotonic()
        out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    stopped = float(out.split("stopped ")[1].split()[0])  # the monotonic clock is the machine's
    assert GRACE_SECONDS <= stopped - asked < GRACE_SECONDS + 3
    assert time.monotonic() - asked < GRACE_SECONDS + CLOSING_SECONDS
    ids = [spec.id for spec in make_specs(6, num_steps=200)]
    hung = next(set(three) for three in (ids[:3], ids[3:]) if ids[0] in three)
    assert set(executions(diary, "save")) == set(ids) - hung
    assert Ledger.read(study).records("lost") == ()
