"""The decision as a torchtitan run: a module with one config function, the corpus reader beside it, a command line.

torchtitan 0.3 takes `--module M --config F`. The module written here states the decision's numbers as literals and
builds torchtitan's own components from them: its Llama 3 blocks, per-pattern AdamW groups, scheduler, checkpoints. What
those lack, small subclasses add: forward multipliers, initial values of (seed, name), the data order of (seed, step)
and the brakes. So the run starts from the embedded trainer's weights, sees its batches and takes its steps.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import proxies
import proxies.data
from launcher.exporters.fidelity import ExportError, FidelityReport, Judgement, judged
from launcher.exporters.torchtitan_text import IMPORTS, MACHINERY
from launcher.frozen import Decision, ParameterGroup, assign_groups, learning_rate_of
from proxies import canon, checks
from proxies.data import mixture, permutation, tokens, windows
from proxies.model import NORM_EPS, ROPE_BASE, parameter_shapes
from proxies.schedule import Schedule
from proxies.shape import Shape

VERSIONS = ("0.3.0",)
MODULE = "forerun_torchtitan"
READER = (proxies, proxies.data, canon, checks, mixture, permutation, tokens, windows)
"""What reads a corpus, with numpy and the standard library alone."""


def export(decision: Decision, out_dir: Path, version: str = VERSIONS[-1]) -> FidelityReport:
    """Write `forerun_torchtitan.py`, `run.sh` and the corpus reader (`proxies/`) into `out_dir`.

    Returns what became of every leaf field of the decision.

    Raises:
        ExportError: an unknown version, or what torchtitan cannot run; every problem at once, and nothing is written.
        FrozenError: the groups do not fit the shape's parameters.
    """
    if problems := _problems(decision, version):
        raise ExportError("torchtitan", problems)
    for module in READER:
        path = out_dir / module.__name__.replace(".", "/")
        path = path / "__init__.py" if hasattr(module, "__path__") else path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        canon.write_atomic(path, inspect.getsource(module).encode())
    canon.write_atomic(out_dir / f"{MODULE}.py", _module_text(decision, version).encode())
    canon.write_atomic(out_dir / "run.sh", _run_text(decision, version).encode())
    (out_dir / "run.sh").chmod(0o755)
    return FidelityReport(trainer="torchtitan", version=version, entries=judged(decision, _JUDGEMENTS))


def parameter_names(shape: Shape) -> dict[str, str]:
    """Each of our parameters' name in torchtitan."""
    return {
        name: re.sub(r"\.attention\.(w[qkv])\.", r".attention.qkv_linear.\1.", name) for name in parameter_shapes(shape)
    }


def group_patterns(decision: Decision) -> list[tuple[str, ParameterGroup]]:
    """One regex per group over torchtitan's names, each parameter matched by exactly one.

    Raises:
        FrozenError: the groups do not fit the shape's parameters.
    """
    names = parameter_names(decision.shape)
    assigned = assign_groups(decision.groups, list(names))
    return [
        (_pattern([names[n] for n, claimed in assigned.items() if claimed == group], decision.shape.num_layers), group)
        for group in decision.groups
    ]


def _pattern(names: list[str], num_layers: int) -> str:
    layers: dict[str, list[str]] = {}
    for name in names:
        match = re.fullmatch(r"layers\.(\d+)(\..+)", name)
        layers.setdefault(match[2] if match else name, []).append(match[1] if match else "")
    parts = []
    for rest, found in layers.items():
        which = r"\d+" if len(found) == num_layers else f"(?:{'|'.join(found)})"
        # Activation checkpointing puts `_checkpoint_wrapped_module` into the names the patterns are searched in.
        wrapped = rf"layers\.{which}(?:\._\w+)*" if rest.startswith(".") else ""
        parts.append(wrapped + re.escape(rest))
    return f"^(?:{'|'.join(parts)})$"


def _problems(decision: Decision, version: str) -> list[str]:
    schedule = decision.learning_rate.schedule
    checks = {
        f"version {version!r} is unknown: {', '.join(VERSIONS)} is known": version in VERSIONS,
        "shape.tied = true: this export writes untied matrices only; untie, or use the native trainer": (
            not decision.shape.tied
        ),
        f"precision = {decision.precision}: torchtitan trains in float32 or bfloat16": decision.precision != "float64",
        "abort.on_non_finite = false: torchtitan always stops at a loss that is not finite": (
            decision.abort.on_non_finite
        ),
        f"shape.family = {decision.shape.family!r}: this export writes Llama 3 blocks": (
            decision.shape.family == "llama"
        ),
        "shape.qk_norm = true: this export writes blocks without it": not decision.shape.qk_norm,
        f"forward.residual = {decision.forward.residual:g}: torchtitan's blocks have no residual multiplier": (
            decision.forward.residual == 1.0
        ),
        f"batch_warmup_stages = {schedule.batch_warmup_stages}: torchtitan's batch has one size": (
            schedule.batch_warmup_stages == 1
        ),
        "this version's learning-rate table is not the frozen one": learning_rate_of(schedule)
        == decision.learning_rate,
    }
    return [problem for problem, holds in checks.items() if not holds]


def _scheduler(schedule: Schedule) -> tuple[float | None, str]:
    """The `decay_ratio` and `decay_type` of torchtitan, whose step convention is ours."""
    if schedule.kind == "constant":
        return 0.0, "linear"
    if schedule.kind == "wsd":
        return schedule.decay_steps / schedule.num_steps, "linear"  # it rounds num_steps * ratio back
    return None, schedule.kind


def _numbers(decision: Decision) -> dict[str, object]:
    """The literals of the module, in its order."""
    shape, schedule = decision.shape, decision.learning_rate.schedule
    decay_ratio, decay_type = _scheduler(schedule)
    num_sequences = decision.batch_tokens // shape.seq_len
    return {
        "DIGEST": decision.digest,
        "NUM_LAYERS": shape.num_layers,
        "WIDTH": shape.width,
        "NUM_HEADS": shape.num_heads,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "FFN_WIDTH": shape.ffn_width,
        "VOCAB_SIZE": shape.vocab_size,
        "SEQ_LEN": shape.seq_len,
        "NORM_EPS": NORM_EPS,
        "ROPE_BASE": ROPE_BASE,
        "EMBEDDING_MULTIPLIER": decision.forward.embedding,
        "ATTENTION_SCALE": decision.forward.attention,
        "OUTPUT_MULTIPLIER": decision.forward.output,
        "NUM_STEPS": schedule.num_steps,
        "WARMUP_STEPS": schedule.warmup_steps,
        "DECAY_RATIO": decay_ratio,
        "DECAY_TYPE": decay_type,
        "FINAL_FRACTION": schedule.final_fraction,
        "CLIP_NORM": decision.clip_norm,
        "GLOBAL_SEQUENCES": num_sequences,
        "LOCAL_SEQUENCES": num_sequences // decision.parallelism.num_ranks,
        "DATA_PARALLEL_SHARD": decision.parallelism.data_parallel_shard,
        "DATA_PARALLEL_REPLICATE": decision.parallelism.data_parallel_replicate,
        "PRECISION": decision.precision,
        "CHECKPOINT_EVERY_STEPS": decision.checkpointing.every_steps,
        "CHECKPOINT_KEEP": decision.checkpointing.keep,
        "SEED": decision.seed,
        "DATA_ID": decision.data.data_id,
        "DATA_WEIGHTS": dict(decision.data.weights),
        "ABORT_ABOVE_NATS": decision.abort.train_loss_above_nats,
    }


def _module_text(decision: Decision, version: str) -> str:
    groups = "".join(
        f"    {{\n        'pattern': {pattern!r},\n        'init_std': {group.init_std!r},\n"
        f"        'optimizer_kwargs': {{\n            'lr': {group.learning_rate!r},\n"
        f"            'weight_decay': {group.weight_decay!r},\n            'eps': {group.eps!r},\n"
        f"            'betas': ({group.beta1!r}, {group.beta2!r}),\n        }},\n    }},\n"
        for pattern, group in group_patterns(decision)
    )
    header = (
        f'"""A frozen launch config of forerun, for torchtitan {version}. Generated: an edit makes it another run.\n\n'
        f'digest {decision.digest}\n"""\n'
    )
    numbers = "".join(f"{name} = {value!r}\n" for name, value in _numbers(decision).items())
    return f"{header}{IMPORTS}\n{numbers}GROUPS = [\n{groups}]\n{MACHINERY}"


def _run_text(decision: Decision, version: str) -> str:
    ranks = decision.parallelism.num_ranks
    per_node = max(n for n in range(1, 9) if ranks % n == 0)
    return f"""#!/usr/bin/env bash
# Launches {decision.digest}
# with torchtitan {version} on {ranks} ranks; run it once on every node. Needs FORERUN_DATA, the corpus folder whose
# manifest has data_id {decision.data.data_id[:16]}...
# If a rank runs out of memory: `run.sh --training.local_batch_size 1` accumulates the same batch in smaller pieces.
set -euo pipefail
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
export FORERUN_DATA="${{FORERUN_DATA:?the corpus folder}}"
export PYTHONPATH="$here${{PYTHONPATH:+:$PYTHONPATH}}"
ranks_per_node="${{RANKS_PER_NODE:-{per_node}}}"
exec torchrun --nnodes "$(({ranks} / ranks_per_node))" --nproc-per-node "$ranks_per_node" \\
    --rdzv-backend c10d --rdzv-endpoint "${{RDZV_ENDPOINT:-localhost:0}}" \\
    -m torchtitan.train --module {MODULE} --config main_run "$@"
"""


_LABEL: Judgement = (
    "equivalent",
    "a label: the trainer needs only the numbers it stands for; the module names the digest",
)
_WATCHED: Judgement = ("equivalent", "torchtitan does not read it: hold the run against it by hand")
_JUDGEMENTS: dict[str, Judgement] = {
    "schema_version": _LABEL,
    "shape": ("exact", ""),
    "shape.family": (
        "equivalent",
        "Llama 3 blocks; rotary pairs and base, norm eps, no document mask as ours; rotary angles in float32",
    ),
    "base_shape": _LABEL,
    "parametrization": _LABEL,
    "transfer": ("equivalent", "evidence: its numbers are in groups"),
    "forward": ("exact", "the multipliers are modules of the model"),
    "forward.attention": ("equivalent", "multiplies q . k in the attention kernel, ours the query: other rounding"),
    "groups": ("exact", ""),
    "groups.pattern": ("equivalent", "rewritten for torchtitan's parameter names; one pattern claims each parameter"),
    "groups.kind": _LABEL,
    "groups.init_std": ("exact", "each initial value is drawn from (seed, name) as the embedded trainer draws it"),
    "optimizer": ("exact", "torch.optim.AdamW, foreach"),
    "learning_rate": ("exact", "torchtitan 0.3's own scheduler gives the table bit for bit"),
    "clip_norm": ("exact", "torch's clip_grad_norm_; none is an infinite norm"),
    "batch_tokens": ("exact", "in sequences; a smaller training.local_batch_size accumulates, with other rounding"),
    "num_tokens": ("exact", "num_steps times batch_tokens"),
    "data": ("exact", "read by forerun's own reader, exported with it, which refuses another data_id"),
    "seed": ("exact", "of initial values and data order; torchtitan's own generator gets it too"),
    "precision": ("equivalent", "of parameters in products, by FSDP; weights, reductions and moments stay in float32"),
    "parallelism": ("exact", ""),
    "checkpointing": ("exact", "torchtitan's own checkpoints, weights and optimizer both"),
    "predicted": _WATCHED,
    "abort.on_non_finite": ("exact", "a gradient that is not finite raises before the step"),
    "abort.train_loss_above_nats": ("equivalent", "raises after that step's update, before anything more is saved"),
}
