"""The decision as an OLMo-core run: its own configs as JSON, a script that trains them, the corpus reader.

`run.json` is in the form of OLMo-core's `Config.as_config_dict`, so its own parser reads it: model, AdamW groups by
globs, scheduler, clip, mesh, checkpoints. Embedding and residual multipliers are native there. What it lacks is in
`forerun_olmo_core.py`, whose classes the JSON names: a scale of q . k that a config can tell, the readout's multiplier,
initial values of (seed, name), the data order of (seed, step), and the brakes.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from launcher.exporters.fidelity import ExportError, FidelityReport, Judgement, judged
from launcher.exporters.olmo_core_config import HEAD_NAMES, MODULE, NAME_PARTS, run_config, trainer_names
from launcher.exporters.olmo_core_script_text import PROVE_TEXT, TRAIN_TEXT
from launcher.exporters.olmo_core_text import MODULE_TEXT
from launcher.exporters.proof import PROVE_FILE, proof_steps
from launcher.exporters.torchtitan import READER
from launcher.frozen import Decision, learning_rate_of
from proxies import canon, schedule
from proxies.shape import Shape

VERSIONS = ("3.0.0",)
SCRIPT = "train.py"
RUN_FILE = "run.json"


def export(decision: Decision, out_dir: Path, version: str = VERSIONS[-1]) -> FidelityReport:
    """Write `run.json`, its module, `train.py`, `prove.py`, `run.sh` and the corpus reader (`proxies/`) into `out_dir`.

    Returns what became of every leaf field of the decision.

    Raises:
        ExportError: an unknown version, or what OLMo-core cannot run; every problem at once, and nothing is written.
        FrozenError: the groups do not fit the shape's parameters.
    """
    if problems := _problems(decision, version):
        raise ExportError("olmo-core", problems)
    told = canon.pretty(run_config(decision))
    for module in (*READER, schedule):
        path = out_dir / module.__name__.replace(".", "/")
        path = path / "__init__.py" if hasattr(module, "__path__") else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        canon.write_atomic(path, inspect.getsource(module).encode())
    fill = {
        "VERSION": version,
        "DIGEST": decision.digest,
        "NAMES": repr(HEAD_NAMES | NAME_PARTS),
        "STEPS": repr(proof_steps(decision.learning_rate.schedule)),
    }
    texts = {f"{MODULE}.py": MODULE_TEXT, SCRIPT: TRAIN_TEXT, PROVE_FILE: PROVE_TEXT}
    for name, text in texts.items():
        canon.write_atomic(out_dir / name, re.sub(r"<<(\w+)>>", lambda found: fill[found[1]], text).encode())
    canon.write_atomic(out_dir / RUN_FILE, told)
    canon.write_atomic(out_dir / "run.sh", _run_text(decision, version).encode())
    (out_dir / "run.sh").chmod(0o755)
    return FidelityReport(trainer="olmo-core", version=version, entries=judged(decision, _JUDGEMENTS))


def parameter_names(shape: Shape) -> dict[str, str]:
    """Each of our parameters' name in OLMo-core's Transformer."""
    return trainer_names(shape)


def _problems(decision: Decision, version: str) -> list[str]:
    mesh = decision.parallelism
    share = decision.batch_tokens // decision.shape.seq_len // mesh.num_data_ranks
    holds = {
        f"version {version!r} is unknown: {', '.join(VERSIONS)} is known": version in VERSIONS,
        f"shape.family = {decision.shape.family!r}: OLMo-core has no learned positions; use the native trainer": (
            decision.shape.family == "llama"
        ),
        f"precision = {decision.precision}: this export trains in float32 or bfloat16": decision.precision != "float64",
        "abort.on_non_finite = false: this export never steps on NaN": decision.abort.on_non_finite,
        "this version's learning-rate table is not the frozen one": learning_rate_of(decision.learning_rate.schedule)
        == decision.learning_rate,
        f"microbatch_sequences = {mesh.microbatch_sequences} does not divide a rank's share of {share} sequences": (
            mesh.microbatch_sequences == 0 or share % mesh.microbatch_sequences == 0
        ),
    } | {
        f"{name} = {degree}: this export is data parallel only; export to torchtitan, or 1": degree == 1
        for name, degree in (("tensor", mesh.tensor), ("pipeline", mesh.pipeline), ("context", mesh.context))
    }
    return [problem for problem, fine in holds.items() if not fine]


def _run_text(decision: Decision, version: str) -> str:
    ranks = decision.parallelism.num_ranks
    per_node = max(n for n in range(1, 9) if ranks % n == 0)
    return f"""#!/usr/bin/env bash
# Launches {decision.digest}
# with OLMo-core {version} on {ranks} ranks; run it once on every node. Needs FORERUN_DATA, the corpus folder whose
# manifest has data_id {decision.data.data_id[:16]}..., and a folder for checkpoints that all nodes share.
# If a rank runs out of memory: `run.sh train_module.rank_microbatch_size={decision.shape.seq_len}` takes the same batch
# a sequence at a time.
set -euo pipefail
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
export FORERUN_DATA="${{FORERUN_DATA:?the corpus folder}}"
export PYTHONPATH="$here${{PYTHONPATH:+:$PYTHONPATH}}" OLMO_SHARED_FS=1
ranks_per_node="${{RANKS_PER_NODE:-{per_node}}}"
exec torchrun --nnodes "$(({ranks} / ranks_per_node))" --nproc-per-node "$ranks_per_node" \\
    --rdzv-backend c10d --rdzv-endpoint "${{RDZV_ENDPOINT:-localhost:0}}" \\
    "$here/{SCRIPT}" "$@"
"""


_LABEL: Judgement = (
    "equivalent",
    "a label: the trainer needs only the numbers it stands for; run.json names the digest",
)
_WATCHED: Judgement = ("equivalent", "OLMo-core does not read it: hold metrics.jsonl against it by hand")
_JUDGEMENTS: dict[str, Judgement] = {
    "schema_version": _LABEL,
    "shape": ("exact", ""),
    "shape.family": (
        "equivalent",
        "OLMo-core's pre-norm blocks: rotary halves and base, norm eps, no document mask as ours; angles in float32",
    ),
    "base_shape": _LABEL,
    "parametrization": _LABEL,
    "transfer": ("equivalent", "evidence: its numbers are in the optimizer's groups"),
    "forward": ("exact", ""),
    "forward.attention": ("equivalent", "multiplies q . k in the attention kernel, ours the query: other rounding"),
    "multiplier_form": ("exact", "multipliers stay in the model, so the gradient norm is the searched one's"),
    "groups": ("exact", "group_overrides"),
    "groups.pattern": ("equivalent", "rewritten as globs over OLMo-core's names; one group claims each parameter"),
    "groups.kind": _LABEL,
    "groups.init_std": ("exact", "each initial value is drawn from (seed, name) as the embedded trainer draws it"),
    "optimizer": ("exact", "torch.optim.AdamW, foreach"),
    "weight_decay_form": ("exact", "torch.optim.AdamW's"),
    "learning_rate": ("exact", "of OLMo-core's own schedulers in sequence; they multiply in another order"),
    "clip_norm": ("exact", "torch's clip by the norm of the whole gradient"),
    "batch_tokens": ("exact", "the loss is a mean over its tokens; microbatches accumulate it with other rounding"),
    "num_tokens": ("exact", "of the schedule's steps, batch warmup included"),
    "data": ("exact", "read by forerun's own reader, exported with it, which refuses another data_id"),
    "seed": ("exact", "of initial values and data order; OLMo-core's own generators get it modulo 2**32"),
    "precision": ("equivalent", "of parameters in products, by FSDP2; weights, reductions and moments in float32"),
    "parallelism": ("exact", "FSDP2, or HSDP with replicas; tensor, pipeline and context other than 1 are refused"),
    "parallelism.activation_checkpointing": (
        "equivalent",
        "selective: OLMo-core chooses what it keeps and what it computes again; the values stay the same",
    ),
    "checkpointing.every_steps": ("exact", "OLMo-core's own, weights, optimizer and position in the data"),
    "checkpointing.keep": ("equivalent", "of those that one start of the run wrote; a resumed run leaves older ones"),
    "predicted": _WATCHED,
    "spikes": _WATCHED,
    "abort": ("exact", "a callback stops before the update"),
}
