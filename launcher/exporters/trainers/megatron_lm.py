"""The decision as a Megatron-LM run: arguments, a launch script, and scripts that write the data and initial weights.

Plain Megatron: its `pretrain_gpt.py`, its own parser, no code of ours in the training process. So what its flags
cannot say is judged field by field, with both numbers (`megatron_lm_numbers`), and what would be another model is
refused. Initial weights travel as a Megatron checkpoint that `seed_checkpoint.py` draws from (seed, name) as the
embedded trainer does: Megatron's own draws would have other deviations.
"""

from __future__ import annotations

from pathlib import Path

from launcher.exporters.fidelity import ExportError, FidelityReport, Judgement, judged
from launcher.exporters.foreign import JUDGEMENTS, failed, refusals
from launcher.exporters.proof import PROVE_FILE
from launcher.exporters.reader import reader_files
from launcher.exporters.trainers.megatron_lm_arguments import arguments
from launcher.exporters.trainers.megatron_lm_data_text import CONVERT_DATA
from launcher.exporters.trainers.megatron_lm_numbers import (
    SAME,
    Flags,
    differences,
    flags_of,
    numbers_of,
    scheduler_of,
    seen_before,
    sorts,
)
from launcher.exporters.trainers.megatron_lm_prove_text import PROVE
from launcher.exporters.trainers.megatron_lm_text import COMMAND, NOTES, SEED_CHECKPOINT, SETUP
from launcher.exporters.view import Run, proof_steps
from launcher.frozen.files import RUN_FILE, run_script, write_files
from launcher.frozen.frozen import Decision, assign_groups
from proxies.core.shape import Shape
from proxies.model.decoder import parameter_shapes

VERSIONS = ("0.18.2", "0.19.2")
ARGUMENTS_FILE = "arguments.txt"
SEED_FILE = "seed_checkpoint.py"
DATA_FILE = "convert_data.py"
LATE = 0.01
"""A learning rate that is nowhere farther from the frozen one than this share of the peak counts as equivalent."""


_MODULES = {
    "tok_embeddings": "embedding.word_embeddings",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attention.linear_qkv",
    "attention.wk": "self_attention.linear_qkv",
    "attention.wv": "self_attention.linear_qkv",
    "attention.q_norm": "self_attention.q_layernorm",
    "attention.k_norm": "self_attention.k_layernorm",
    "attention.wo": "self_attention.linear_proj",
    "ffn_norm": "pre_mlp_layernorm",
    "feed_forward.w1": "mlp.linear_fc1",
    "feed_forward.w3": "mlp.linear_fc1",
    "feed_forward.w2": "mlp.linear_fc2",
    "norm": "decoder.final_layernorm",
    "lm_head": "output_layer",
}
"""Our modules, and Megatron's that hold their weights."""


def export(decision: Decision, out_dir: Path, version: str = VERSIONS[-1]) -> FidelityReport:
    """Write `arguments.txt`, the scripts of the data, the seed, the proof and the run, and the reader into `out_dir`.

    Returns what became of every leaf field of the decision.

    Raises:
        ExportError: an unknown version, or what Megatron cannot run; every problem at once, and nothing is written.
        FrozenError: the groups do not fit the shape's parameters.
    """
    if problems := _problems(decision, version):
        raise ExportError("megatron-lm", problems)
    flags = flags_of(decision)
    scheduler, off = scheduler_of(decision, flags)
    lines = [" ".join(line) + "\n" for line in arguments(decision, flags, scheduler)]
    files = {
        ARGUMENTS_FILE: "".join(lines),
        SEED_FILE: _seed_text(decision, version),
        DATA_FILE: _data_text(decision, version),
        PROVE_FILE: _prove_text(decision),
        RUN_FILE: _run_text(decision, version),
        **reader_files(),
    }
    write_files(out_dir, files)
    entries = judged(decision, JUDGEMENTS | _JUDGEMENTS | _found(decision, flags, off))
    return FidelityReport(trainer="megatron-lm", version=version, entries=entries)


def parameter_names(shape: Shape) -> dict[str, str]:
    """Each of our parameters' name in Megatron, with its plain layers; wq, wk, wv share a matrix, and w1, w3."""
    return {name: _their_name(name.removesuffix(".weight")) + ".weight" for name in parameter_shapes(shape)}


def _their_name(module: str) -> str:
    if not module.startswith("layers."):
        return _MODULES[module]
    _, layer, rest = module.split(".", 2)
    return f"decoder.layers.{layer}.{_MODULES[rest]}"


def foretold(decision: Decision) -> Run:
    """What Megatron does with the numbers of the decision, by its rules.

    Raises:
        FrozenError: the groups do not fit the shape's parameters.
    """
    schedule, shape, flags = decision.learning_rate.schedule, decision.shape, flags_of(decision)
    numbers = {
        name: numbers_of(flags, shape.width, sort) for sort, members in sorts(decision).items() for name, _ in members
    }
    scheduler, _ = scheduler_of(decision, flags)
    seen = seen_before(schedule, decision.batch_tokens // shape.seq_len)
    return Run(numbers=numbers, shares=tuple(scheduler.share(seen[step]) for step in proof_steps(schedule)))


def _problems(decision: Decision, version: str) -> list[str]:
    shape, schedule, mesh = decision.shape, decision.learning_rate.schedule, decision.parallelism
    smallest = decision.batch_tokens // schedule.batch_warmup_stages // shape.seq_len
    tensor, micro = mesh.tensor, mesh.microbatch_sequences or 1
    cut = {"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads, "ffn_width": shape.ffn_width}
    checks = {
        f"shape.family = {shape.family!r}: this export writes llama-like models": shape.family == "llama",
        f"forward.residual = {decision.forward.residual:g}: Megatron's blocks have no residual multiplier": (
            decision.forward.residual == 1.0
        ),
        f"warmup_steps = num_steps = {schedule.num_steps}: Megatron's warmup must end before its decay": (
            schedule.warmup_steps < schedule.num_steps
        ),
        f"tensor = {tensor} does not divide " + ", ".join(f"{name} = {n}" for name, n in cut.items() if n % tensor): (
            all(n % tensor == 0 for n in cut.values())
        ),
        f"tensor = {tensor} does not divide vocab_size = {shape.vocab_size}: Megatron would add tokens, and the "
        "softmax runs over them": shape.vocab_size % tensor == 0,
        f"pipeline = {mesh.pipeline} does not divide num_layers = {shape.num_layers}": (
            shape.num_layers % mesh.pipeline == 0
        ),
        f"context = {mesh.context}: Megatron cuts seq_len = {shape.seq_len} into {2 * mesh.context} equal parts": (
            mesh.context == 1 or shape.seq_len % (2 * mesh.context) == 0
        ),
        f"microbatch_sequences = {micro} does not divide the {smallest // mesh.num_data_ranks} of a rank": (
            smallest // mesh.num_data_ranks % micro == 0
        ),
    }
    return refusals(decision, version, VERSIONS) + failed(checks)


def _run_text(decision: Decision, version: str) -> str:
    told = {
        "DATA_ID": decision.data.data_id[:16],
        "CEILING": repr(decision.abort.train_loss_above_nats),
        "AFTER": str(decision.learning_rate.schedule.warmup_steps + 1),
    }
    notes, setup, command = (_filled(text, told) for text in (NOTES, SETUP, COMMAND))
    return run_script(decision, f"Megatron-LM {version}", notes=notes, setup=setup, command=command)


def _seed_text(decision: Decision, version: str) -> str:
    shape = decision.shape
    of = assign_groups(decision.groups, list(parameter_shapes(shape)))
    numbers = {name: (list(size), of[name].init_std) for name, size in parameter_shapes(shape).items()}
    told = {
        "DIGEST": decision.digest,
        "VERSION": version,
        "WEIGHTS": "".join(f"    {name!r}: {value!r},\n" for name, value in numbers.items()),
        "SEED": repr(decision.seed),
        "CONFIG": repr(
            {
                "num_layers": shape.num_layers,
                "hidden_size": shape.width,
                "num_attention_heads": shape.num_heads,
                "num_query_groups": shape.num_kv_heads,
                "ffn_hidden_size": shape.ffn_width,
            }
        ),
        "VOCAB_SIZE": repr(shape.vocab_size),
        "SEQ_LEN": repr(shape.seq_len),
        "TIED": repr(shape.tied),
        "QK_NORM": repr(shape.qk_norm),
    }
    return _filled(SEED_CHECKPOINT, told)


def _data_text(decision: Decision, version: str) -> str:
    told = {
        "DIGEST": decision.digest,
        "VERSION": version,
        "DATA_ID": repr(decision.data.data_id),
        "WEIGHTS": repr(dict(decision.data.weights)),
    }
    return _filled(CONVERT_DATA, told)


def _prove_text(decision: Decision) -> str:
    steps = repr(list(proof_steps(decision.learning_rate.schedule)))
    return _filled(PROVE, {"STEPS": steps, "NUM_RANKS": str(decision.parallelism.num_ranks)})


def _filled(text: str, told: dict[str, str]) -> str:
    for name, value in told.items():
        text = text.replace(f"@{name}@", value)
    return text


_JUDGEMENTS: dict[str, Judgement] = {
    "shape.family": (
        "equivalent",
        "Megatron's GPT model: rotary pairs, norm eps and gates as ours, no document mask; its kernels round otherwise",
    ),
    "forward.attention": ("equivalent", "by --mup-base-head-dim, to one part in 1e15; multiplies q . k in the kernel"),
    "forward.output": ("equivalent", "multiplies the logits, ours the readout's input: other rounding"),
    "groups.pattern": ("equivalent", "Megatron groups by sort of parameter; the numbers of each are compared"),
    "optimizer": ("exact", "Megatron's adam is AdamW: fused where Transformer Engine or Apex is there, else torch's"),
    "learning_rate": ("exact", ""),
    "clip_norm": ("exact", "of the global norm; none is --clip-grad 0"),
    "data": ("equivalent", f"token by token in the files that {DATA_FILE} writes, which refuses another data_id"),
    "data.weights": ("equivalent", f"shares of Megatron's blend, in the data_args.txt of {DATA_FILE}"),
    "seed": ("equivalent", "of initial values exactly so; Megatron's own generators shuffle from it plus 1"),
    "precision": ("exact", ""),
    "parallelism": ("exact", ""),
    "parallelism.data_parallel_shard": (
        "equivalent",
        "Megatron's distributed optimizer shards moments and main weights; a rank keeps what it computes with",
    ),
    "parallelism.activation_checkpointing": ("equivalent", "--recompute-granularity; selective is the attention core"),
    "checkpointing": ("exact", ""),
    "checkpointing.keep": ("equivalent", "Megatron keeps every checkpoint: remove old ones by hand"),
    "abort.on_non_finite": ("exact", "Megatron stops at a loss or gradient that is not finite, before the step"),
    "abort.train_loss_above_nats": ("equivalent", "run.sh reads the log and stops the run, a step or two later"),
    "spikes": ("equivalent", "what to do by hand: --load of an older checkpoint, --iterations-to-skip"),
}


def _found(decision: Decision, flags: Flags, off: float) -> dict[str, Judgement]:
    """Judgements that depend on the decision's numbers."""
    found: dict[str, Judgement] = {
        f"groups.{field}": ("not_expressible", f"Megatron's flags give another number to {said}")
        for field, said in differences(decision, flags).items()
    }
    narrow = decision.precision == "bfloat16"
    drawn = f"drawn from (seed, name) by {SEED_FILE}, as the embedded trainer draws them"
    found["groups.init_std"] = (
        ("equivalent", f"{drawn}; --bf16 rounds them to bfloat16 once") if narrow else ("exact", drawn)
    )
    if narrow:
        found["precision"] = (
            "equivalent",
            "--bf16: weights and products in bfloat16, main weights and sums in float32",
        )
    if off > SAME:
        where = f"at most {off:.2g} of the peak from the frozen table: Megatron warms up from t / W, not (t + 1) / W"
        late: Judgement = ("equivalent" if off <= LATE else "not_expressible", where)
        found |= dict.fromkeys(
            ("learning_rate.step_convention", "learning_rate.samples", "learning_rate.table_sha256"), late
        )
    once = decision.num_tokens <= decision.data.num_train_tokens
    order = "Megatron shuffles documents and windows by its own generator: "
    found["data.order"] = (
        ("equivalent", order + "every window at most once here too, unless a weight asks for more of a source")
        if once
        else ("not_expressible", order + "over all epochs together, so that a window may come twice before another")
    )
    return found
