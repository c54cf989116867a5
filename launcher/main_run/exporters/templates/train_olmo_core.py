"""Train the `run.json` in this folder, and resume where it stopped.

`run.sh` starts one process per rank. The arguments are overrides in OLMo-core's form, such as
train_module.rank_microbatch_size=4096. An override of a frozen number makes it another run.
"""

import os
import sys

import torch
from forerun_numbers import other_versions, refuse
from forerun_olmo_core import (
    FROZEN,
    RUN_FILE,
    CorpusLoader,
    RunConfig,
    find_misassigned,
    frozen_name,
)
from forerun_torch import set_initial_values
from olmo_core.distributed.utils import get_world_size
from olmo_core.train import prepare_training_environment, teardown_training_environment


def main() -> None:
    """Train to the end of the schedule, from the newest checkpoint if there is one."""
    config = RunConfig.from_file(RUN_FILE, overrides=sys.argv[1:])
    on_gpu = torch.cuda.is_available()
    prepare_training_environment(
        seed=FROZEN.seed % 2**32, backend="cpu:gloo,cuda:nccl" if on_gpu else "cpu:gloo"
    )
    model = config.model.build(init_device="meta")
    problems = find_misassigned(model, config) + other_versions(FROZEN.needs)
    if config.digest != FROZEN.digest:
        problems.append(
            f"run.json is for the config {config.digest}, forerun.json for {FROZEN.digest}"
        )
    if get_world_size() != config.num_ranks:
        problems.append(f"{get_world_size()} ranks: must be {config.num_ranks}, see run.sh")
    if problems:
        refuse(*problems)
    train_module = config.train_module.build(model)
    set_initial_values(train_module.model, FROZEN, frozen_name)
    loader = CorpusLoader(train_module.dp_process_group, config.trainer.save_folder)
    config.trainer.build(train_module, loader).fit()
    if not on_gpu:  # gloo sometimes aborts in its teardown; `fit` has ended with a barrier.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    teardown_training_environment()


if __name__ == "__main__":
    main()
