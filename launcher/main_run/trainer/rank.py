"""The process of one rank of the embedded trainer, as torchrun starts it.

    torchrun --nproc-per-node R -m forerun._launcher.main_run.trainer --config LAUNCH_JSON \\
        --data CORPUS --out RUN_DIR [--stop-after N] [--allow-world-size] [--code FOLDER]

Exit codes: 0 the run finished, or stopped at --stop-after; 1 the rank's machine failed; 2 the run
was refused; 3 the run's own abort policy ended it; 5 a file is corrupt or was tampered with; 130 a
signal interrupted the run. torchrun turns every failure into 1, so `RUN_DIR/ending.json` has the
exit code too.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from forerun._launcher.main_run.process_signals import SignalFlag, die_with_job
from forerun._launcher.main_run.supervisor.hang_detector import START_SECONDS
from forerun._launcher.main_run.trainer.inputs import RunOptions
from forerun._launcher.main_run.trainer.training import Trainer, run
from forerun._proxies.core import canon


def main(build: Callable[..., Trainer] | None = None) -> NoReturn:
    """Run this rank's process to its end.

    Args:
        build: Function that builds the trainer, as for `run`; None for `Trainer`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m forerun._launcher.main_run.trainer", description="Train a frozen config."
    )
    parser.add_argument("--config", type=Path, required=True, help="launch.json")
    parser.add_argument("--data", type=Path, required=True, help="corpus folder")
    parser.add_argument("--out", type=Path, required=True, help="run folder: metrics, checkpoints")
    parser.add_argument(
        "--stop-after", type=int, help="save and stop once this many steps are done"
    )
    parser.add_argument(
        "--allow-world-size", action="store_true", help="accept any number of ranks"
    )
    parser.add_argument("--code", type=Path, help="folder of your own model's code")
    options = RunOptions(**vars(parser.parse_args()))
    # End with torchrun. The entry points have done this before they imported torch, which takes
    # seconds; a caller of `main` alone has not.
    die_with_job()
    # The supervisor of a job that hangs sends SIGUSR1 to every rank, to get its stack into the log.
    faulthandler.register(signal.SIGUSR1)
    interrupted = SignalFlag()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: interrupted.set())
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Rank 0 hashes the newest checkpoint while the others wait. In NCCL's default limit of ten
    # minutes it could hash a few hundred GB only.
    dist.init_process_group(timeout=timedelta(seconds=START_SECONDS))
    try:
        ending = run(options, interrupted.is_set, build)
    except OSError as error:
        # A disk or file of this rank's machine failed. The other ranks do not know and may wait for
        # this one, so it exits at once, and torchrun ends them all.
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    if dist.get_rank() == 0:
        print(canon.to_canonical_json(ending), file=sys.stderr)
    # When Python destroys a gloo group at exit, the process sometimes aborts. After a barrier and a
    # hard exit it never did.
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ending.exit_code)
