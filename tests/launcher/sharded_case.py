"""Two ranks without Ray: `python sharded_case.py RANK PORT FD FOLDER`, once for each; rank 0 writes what came of it.

FOLDER has `corpus/` and `asked.json`: runs, each with steps at which it is saved and taken up by a new engine.
"""

import dataclasses
import gc
import json
import os
import socket
import subprocess
import sys
import weakref
from pathlib import Path

NUM_RANKS = 2
NUM_WINDOWS = 31
"""To judge tiny models by: fewer are enough, and an odd number has one rank run a row that does not count."""


def main(rank, port, listen_fd, folder):
    from launcher.workers import sharded as group
    from launcher.workers.sharded import Sharded
    from proxies.core import canon
    from proxies.core.spec import RunSpec
    from proxies.data.tokens import TokenStore
    from proxies.training import outcome
    from sweeps.ray.actor import Seat
    from sweeps.run.pool import Advance

    seat = Seat(rank=rank, num_ranks=NUM_RANKS, address=f"127.0.0.1:{port}", one_node=True, listen_fd=listen_fd or None)
    outcome.VALIDATION_SEQUENCES = NUM_WINDOWS
    mesh, store = group.join(seat), TokenStore(folder / "corpus")
    if rank:
        group.Follower(store, mesh).advance(Advance(bank_key="", num_slots=1, admit=(), max_steps=1))
        return
    told, before = [], None
    gc.disable()  # what is only freed some day is memory that the next run lacks
    for asked in json.loads((folder / "asked.json").read_text()):
        spec, state = canon.decode(RunSpec, asked["spec"]), None
        for stop in [*asked["saves"], 10**6]:
            engine = Sharded(store, mesh, num_microbatches=asked["parts"])
            engine.admit(0, spec, state)
            assert before is None or before() is None, "the model before this one still holds its share of the device"
            before = weakref.ref(next(engine._rank.part.model.parameters()))
            engine.pause_at(0, stop)
            ended = engine.advance(10**6)
            if ended:
                break
            assert engine.steps == {0: stop}
            state = engine.state(0)
        ((_, result, curve),) = ended
        told.append({"result": canon.to_json(result), "curve": canon.to_json(curve)})
    group.tell(group.Order.REPORT)
    (folder / "told.json").write_text(json.dumps(told))


def sharded(folder, corpus, asked, *, on_gpus=False):
    """Results and curves of runs, each asked for as (spec, steps to save at, parts of a batch); a rank has a GPU, or
    sees none.
    """
    from proxies.core import canon
    from proxies.core.spec import Curve, RunResult

    folder.mkdir(exist_ok=True)
    (folder / "corpus").symlink_to(corpus)
    lines = [{"spec": canon.to_json(spec), "saves": saves, "parts": parts} for spec, saves, parts in asked]
    (folder / "asked.json").write_text(json.dumps(lines))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, listen_fd = server.getsockname()[1], server.fileno()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "error", __file__, str(rank), str(port), str(0 if rank else listen_fd), folder],
                pass_fds=[] if rank else [listen_fd],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "OMP_NUM_THREADS": "1",
                    "CUDA_VISIBLE_DEVICES": str(rank) if on_gpus else "",
                },
            )
            for rank in range(NUM_RANKS)
        ]
    try:
        assert not any(rank.wait(timeout=250) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    told = json.loads((folder / "told.json").read_text())
    return [(canon.decode(RunResult, each["result"]), canon.decode(Curve, each["curve"])) for each in told]


def ranked(spec, **changes):
    """The same run over two ranks."""
    return dataclasses.replace(spec, numerics=dataclasses.replace(spec.numerics, num_ranks=NUM_RANKS, **changes))


if __name__ == "__main__":
    main(*(int(part) for part in sys.argv[1:4]), Path(sys.argv[4]))
