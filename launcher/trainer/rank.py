"""The embedded trainer's process: one rank of a frozen config's run, started by torchrun.

    torchrun --nproc-per-node R -m launcher.trainer --config LAUNCH_JSON --data CORPUS --out RUN_DIR
    [--stop-after N]

Exit codes of a rank: 0 finished, or stopped where asked; 1 its own machine failed it; 2 refused; 3
stopped by the run's own brake; 5 corrupt or tampered; 130 interrupted. torchrun turns every failure
into 1, so `RUN_DIR/ending.json` says it again.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from launcher.base import metrics
from launcher.base.metrics import AttemptEnd
from launcher.base.signals import Flag, die_with_job
from launcher.base.watchdog import START_SECONDS
from launcher.frozen.frozen import Decision, assign_groups
from launcher.frozen.launch_file import read_launch
from launcher.trainer.assembly import unfit
from launcher.trainer.ranks import TrainerError, together
from launcher.trainer.trained_model import trained_model
from launcher.trainer.training import Trainer
from proxies.core import canon
from proxies.core.notation import counted
from proxies.data.tokens import TokenStore


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOptions:
    """The command line."""

    config: Path
    data: Path
    out: Path
    stop_after: int | None = None
    """Save and stop when so many steps of the whole run are done."""
    allow_world_size: bool = False
    """Take the ranks there are (all sharding) instead of the frozen parallelism: the same curve up
    to rounding."""
    code: Path | None = None
    """Folder of the user's own model; None: this process's."""


def run(
    options: RankOptions,
    interrupted: Callable[[], bool] = lambda: False,
    build: Callable[..., Trainer] = Trainer,
) -> AttemptEnd:
    """Train, on every rank of an initialized process group, and say how it ended; a refusal is an
    ending too.

    `build` makes the trainer; a rehearsal gives one with a fault in it.
    """
    try:
        decision, store = together(lambda: _prepare(options))
        trainer = build(decision, store, options.out, interrupted, code_dir=options.code)
        ending = trainer.train(options.stop_after)
    except TrainerError as error:
        ending = AttemptEnd(event="refused", exit_code=error.exit_code, step=0, reason=str(error))
    if dist.get_rank() == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        metrics.write_ending(options.out, ending)
    return ending


def _prepare(options: RankOptions) -> tuple[Decision, TokenStore]:
    """The decision and the corpus, if they fit each other, the ranks there are, and what this
    trainer does.
    """
    decision = read_launch(options.config)
    store = TokenStore(options.data, weights=dict(decision.data.weights) or None)
    if problems := _problems(decision, store, options, dist.get_world_size()):
        raise TrainerError(problems)
    outline = trained_model(decision, options.code).outline()
    assign_groups(decision.groups, [name for name, _ in outline.named_parameters()])
    return decision, store


def _problems(
    decision: Decision, store: TokenStore, options: RankOptions, num_ranks: int
) -> list[str]:
    shape, schedule, manifest = decision.shape, decision.learning_rate.schedule, store.manifest
    own_ranks = num_ranks == decision.parallelism.num_ranks
    stages = schedule.batch_warmup_stages
    corpus, expected_corpus = manifest.data_id[:16], decision.data.data_id[:16]
    expected = {
        f"the corpus {options.data} has data_id {corpus}..., must be {expected_corpus}...": (
            manifest.data_id == decision.data.data_id
        ),
        f"{counted(num_ranks, 'rank')}: must be {decision.parallelism.num_ranks}, as in the config": (  # noqa: E501
            own_ranks or options.allow_world_size
        ),
        f"batch_tokens = {decision.batch_tokens} does not give {counted(num_ranks, 'rank')} whole "
        "sequences of "
        f"{shape.seq_len}"
        + (f" in each of batch_warmup_stages = {stages}" if stages > 1 else ""): (
            decision.batch_tokens % (shape.seq_len * num_ranks * stages) == 0
        ),
        f"vocab_size = {shape.vocab_size} is smaller than the corpus's {manifest.vocab_size}": (
            manifest.vocab_size <= shape.vocab_size
        ),
        f"seq_len = {shape.seq_len} is longer than the validation split": (
            store.num_windows("validation", shape.seq_len) > 0
        ),
        f"stop_after = {options.stop_after}: must be above 0": options.stop_after is None
        or options.stop_after > 0,
    }
    return [problem for problem, holds in expected.items() if not holds] + unfit(decision)


def main(build: Callable[..., Trainer] = Trainer) -> NoReturn:
    """One rank's process, as torchrun starts it; `build` as in `run`."""
    parser = argparse.ArgumentParser(
        prog="python -m launcher.trainer", description="Train a frozen config."
    )
    parser.add_argument("--config", type=Path, required=True, help="launch.json")
    parser.add_argument("--data", type=Path, required=True, help="corpus folder")
    parser.add_argument("--out", type=Path, required=True, help="run folder: metrics, checkpoints")
    parser.add_argument("--stop-after", type=int, help="save and stop when so many steps are done")
    parser.add_argument(
        "--allow-world-size", action="store_true", help="accept any number of ranks"
    )
    parser.add_argument("--code", type=Path, help="folder of your own model's module")
    options = RankOptions(**vars(parser.parse_args()))
    die_with_job()  # as `__main__` has it do already; of the ranks that others start
    # the supervisor of a job that hangs asks every rank where it is
    faulthandler.register(signal.SIGUSR1)
    told = Flag()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Rank 0 hashes the newest checkpoint while the others wait; NCCL's own limit is ten minutes,
    # some hundred GB.
    dist.init_process_group(timeout=timedelta(seconds=START_SECONDS))
    try:
        ending = run(options, told.is_set, build)
    except (
        OSError
    ) as error:  # of this rank alone, so nothing can be agreed upon: torchrun ends the others
        print(f"rank {dist.get_rank()}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    if dist.get_rank() == 0:
        print(canon.canonical(ending), file=sys.stderr)
    # Tearing gloo down at exit aborts now and then; a barrier and a hard exit never did.
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(ending.exit_code)
