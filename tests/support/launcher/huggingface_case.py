"""Programs that the tests of the Hugging Face export run in the interpreter with transformers.

`PROBE` reports what transformers reads from an export, and `train_export` trains one.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from trainer_venv import build_torchrun_command, run_in_trainer

# This program asks each export's prove.py for its view, and runs its model on token ids. Then it
# trains the model with a NaN in the last norm: the export must stop before the weights change.
# Arguments are the file of the token ids, and the folders of the exports. The program writes
# found.json to the working directory, and found.npz to each folder.
PROBE = """
import contextlib, io, json, os, runpy, sys
from pathlib import Path
import numpy as np, torch
from transformers import GraniteConfig, HfArgumentParser, TrainingArguments
from forerun._proxies.data.tokens import TokenStore
ids = torch.from_numpy(np.load(sys.argv[1]))
results = {}
for folder in sys.argv[2:]:
    sys.path.insert(0, folder)
    for name in ("forerun_huggingface", "forerun_numbers", "forerun_torch"):
        sys.modules.pop(name, None)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(f"{folder}/prove.py", run_name="__main__")
    import forerun_huggingface as train
    arguments_file = f"{folder}/training_arguments.json"
    HfArgumentParser(TrainingArguments).parse_json_file(arguments_file)  # must accept the file
    config = GraniteConfig.from_pretrained(folder).to_dict()
    unknown = set(json.loads(Path(folder, "config.json").read_text())) - set(GraniteConfig().to_dict())
    model = train.build_model()
    with torch.no_grad():
        logits = model(ids).logits
    np.savez(f"{folder}/found.npz", logits=logits.numpy(),
             **{name: p.detach().numpy() for name, p in model.named_parameters()})
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    before = [p.detach().clone() for p in model.parameters()]
    args = train.training_arguments()
    try:
        train.FrozenTrainer(TokenStore(Path(os.environ["FORERUN_DATA"])), model, args).train()
        stopped = "went on"
    except RuntimeError as error:
        same = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, model.parameters()))
        stopped = f"{error}; weights {'kept' if same else 'changed'}"
    results[folder] = {"config": config, "unknown": sorted(unknown), "stopped": stopped,
                       "view": json.loads(printed.getvalue().splitlines()[-1])}
Path("found.json").write_text(json.dumps(results))
"""  # noqa: E501

# This program runs the exported script with two changes for CPUs. It turns on FSDP, which
# accelerate ignores on CPUs although gloo supports it. It ends without the teardown of gloo, which
# may abort.
CPU_MAIN = """
import os, sys
import torch.distributed as dist
import forerun_huggingface as train
from accelerate.state import PartialState
from accelerate.utils import DistributedType
check = train.check
def check_and_enable_sharding(args):
    check(args)
    if train.MESH.data_parallel_shard > 1:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
train.check = check_and_enable_sharding
train.main()
if dist.is_initialized():
    dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def train_export(
    python: Path, export_dir: Path, corpus: Path, *, num_ranks: int
) -> subprocess.CompletedProcess[str]:
    """Run the export's own script, by `CPU_MAIN`, on several ranks of this machine."""
    (export_dir / "cpu_main.py").write_text(CPU_MAIN)
    start = build_torchrun_command(python, num_ranks) if num_ranks > 1 else [python]
    return run_in_trainer([*start, "cpu_main.py"], export_dir, FORERUN_DATA=corpus)
