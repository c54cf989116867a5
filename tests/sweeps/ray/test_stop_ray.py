"""Test of a stop under real Ray while one worker hangs: the other worker saves its runs, and the
driver ends within its grace period.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from sweep_fakes import list_executions, make_specs
from waiting import wait_until

from forerun._sweeps.store.ledger import Ledger

SUPPORT = Path(__file__).parents[2] / "support" / "sweeps"
GRACE_SECONDS = 5.0
CLOSING_SECONDS = 15.0
"""Maximum time in seconds that Ray takes to close on a busy machine."""

SCRIPT = """
    import signal, sys, time
    sys.path.insert(0, {here!r})
    from pathlib import Path
    from sweep_fakes import FakeHostFactory, get_bank_key, make_specs
    from forerun._sweeps.run.driver import drive
    from forerun._sweeps.store.ledger import Ledger
    from forerun._sweeps.ray.pool import RayPool
    from forerun._sweeps.search.source import StaticSource

    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    study = Path({study!r})
    pool = RayPool(2, FakeHostFactory({diary!r}, fault="hang 0", step_seconds=0.2))
    with Ledger.open(study, {{}}, create=True) as ledger:
        drive(
            StaticSource(make_specs(6, num_steps=200), get_bank_key),
            pool,
            ledger,
            study,
            bank_key_for=get_bank_key,
            should_stop=lambda: bool(stop),
            grace_seconds={grace},
        )
    print("stopped", time.monotonic(), flush=True)
    pool.close()
"""


@pytest.mark.slow
def test_driver_stops_within_its_grace_while_a_worker_hangs(tmp_path):
    study, diary = tmp_path / "study", tmp_path / "diary"
    code = textwrap.dedent(SCRIPT).format(
        here=str(SUPPORT), study=str(study), diary=str(diary), grace=GRACE_SECONDS
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        wait_until(lambda: len(list_executions(diary, "begin")) >= 6, 120)
        time.sleep(1.0)  # a few steps, so that the other worker has something to save
        os.kill(process.pid, signal.SIGTERM)
        stop_time = time.monotonic()
        out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    # All processes of a machine share its monotonic clock.
    stopped = float(out.split("stopped ")[1].split()[0])
    assert GRACE_SECONDS <= stopped - stop_time < GRACE_SECONDS + 3
    assert time.monotonic() - stop_time < GRACE_SECONDS + CLOSING_SECONDS
    # Each worker has three runs; the one that hangs has the first run.
    ids = [spec.id for spec in make_specs(6, num_steps=200)]
    assert set(list_executions(diary, "save")) == set(ids[3:])
    assert Ledger.read(study).read_records("lost") == ()
