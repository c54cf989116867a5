"""The decision as a Megatron-LM run: arguments, a launch script, and scripts that write the data
and initial weights.

Plain Megatron: its `pretrain_gpt.py`, its own parser; of our code at most a layer spec, for a
residual multiplier. What its flags cannot say is judged field by field, with both numbers
(`megatron_lm_numbers`), and what would be another model is refused. Initial weights travel as a
Megatron checkpoint that `seed_checkpoint.py` draws from (seed, name) as the embedded trainer does:
Megatron's own draws would have other deviations.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from launcher.exporters.export_writer import PROVE_FILE, run_script, write_export
from launcher.exporters.fidelity import (
    ADAMW,
    Expressible,
    FidelityReport,
    Judgement,
    rank_sequences,
    refuse,
    report,
)
from launcher.exporters.trainers.megatron_lm_numbers import (
    SAME,
    WSD_STYLES,
    Flags,
    Scheduler,
    differences,
    flags_of,
    numbers_of,
    scheduler_of,
    sorts,
)
from launcher.exporters.view import RunNumbers, proof_steps
from launcher.frozen.frozen import Decision, assign_groups
from launcher.frozen.launch_file import RUN_FILE
from proxies.core.canon import Json
from proxies.core.notation import counted
from proxies.core.numbers import GroupSettings
from proxies.core.shape import Shape, parameter_shapes
from proxies.model.decoder import NORM_EPS, ROPE_BASE

# The decision as Megatron-LM's command line: every argument but the paths of a run.

Arguments = dict[str, str | int | float | bool | None]
"""By flag; True: a flag without a value; False and None: left out."""


def argument_lines(decision: Decision, flags: Flags, scheduler: Scheduler) -> str:
    """Every argument of the run but its paths, a flag and its value on each line."""
    told = {
        **_model(decision, flags),
        **_optimizer(decision, flags, scheduler),
        **_batch(decision, scheduler),
        **_machine(decision),
        "spec": None if decision.forward.residual == 1.0 else f"{SPEC_MODULE} SPEC",
    }
    lines = {
        f"--{name}": value
        for name, value in told.items()
        if value is not None and value is not False
    }
    return "".join(
        f"{name}\n" if value is True else f"{name} {value}\n" for name, value in lines.items()
    )


def _model(decision: Decision, flags: Flags) -> Arguments:
    shape, forward = decision.shape, decision.forward
    grouped = shape.num_kv_heads != shape.num_heads
    told: Arguments = {
        "num-layers": shape.num_layers,
        "hidden-size": shape.width,
        "num-attention-heads": shape.num_heads,
        "kv-channels": shape.head_dim,
        "ffn-hidden-size": shape.ffn_width,
        "seq-length": shape.seq_len,
        "max-position-embeddings": shape.seq_len,
        "tokenizer-type": "NullTokenizer",
        "vocab-size": shape.vocab_size,
        "make-vocab-size-divisible-by": 1,
        "swiglu": True,
        "disable-bias-linear": True,
        "normalization": "RMSNorm",
        "norm-epsilon": NORM_EPS,
        "position-embedding-type": "rope",
        "rotary-base": int(ROPE_BASE),
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "group-query-attention": grouped,
        "num-query-groups": shape.num_kv_heads if grouped else None,
        "untie-embeddings-and-output-weights": not shape.tied,
        "qk-layernorm": shape.qk_norm,
    }
    if flags.base_width is not None:
        # 1.0 would mean 1 / m: the number next to it is taken as it is.
        auto = forward.output == 1.0 and flags.base_width != shape.width
        told |= {
            "use-mup": True,
            "mup-base-hidden-size": flags.base_width,
            "mup-embedding-mult": forward.embedding,
            "mup-output-mult": math.nextafter(1, 0) if auto else forward.output,
            "mup-attn-scale-power": 1.0,
            "mup-base-head-dim": (forward.attention * shape.head_dim) ** 2,
        }
    return told


def _optimizer(decision: Decision, flags: Flags, scheduler: Scheduler) -> Arguments:
    final, wsd = scheduler.final_fraction, scheduler.kind == "wsd"
    return {
        "optimizer": "adam",
        "lr": flags.learning_rate,
        "min-lr": flags.learning_rate * final,
        "lr-warmup-init": flags.learning_rate * scheduler.init_share,
        "lr-decay-style": "WSD" if wsd else scheduler.kind,
        "weight-decay": flags.weight_decay,
        "adam-beta1": flags.beta1,
        "adam-beta2": flags.beta2,
        "adam-eps": flags.eps,
        "clip-grad": decision.clip_norm or 0.0,
        "lr-wsd-decay-style": WSD_STYLES[scheduler.decay_shape] if wsd else None,
    }


def _batch(decision: Decision, scheduler: Scheduler) -> Arguments:
    return {
        "micro-batch-size": rank_sequences(decision)[1],
        "global-batch-size": decision.batch_tokens // decision.shape.seq_len,
        "train-iters": scheduler.total,
        "lr-decay-iters": scheduler.total,
        "lr-warmup-iters": scheduler.warmup,
        "lr-wsd-decay-iters": scheduler.decay if scheduler.kind == "wsd" else None,
    }


def _machine(decision: Decision) -> Arguments:
    mesh, sharded = decision.parallelism, decision.parallelism.data_parallel_shard > 1
    recomputed, whole = (
        mesh.activation_checkpointing != "none",
        mesh.activation_checkpointing == "full",
    )
    replicas = mesh.data_parallel_replicate
    return {
        "tensor-model-parallel-size": mesh.tensor,
        "pipeline-model-parallel-size": mesh.pipeline,
        "context-parallel-size": mesh.context,
        "seed": 1 + decision.seed % 2**31,  # Megatron takes no 0
        "ckpt-format": "torch_dist",
        "save-interval": decision.checkpointing.every_steps,
        "log-interval": 1,
        "split": "1,0,0",
        "eval-iters": 0,
        "use-distributed-optimizer": sharded,
        "num-distributed-optimizer-instances": replicas if sharded and replicas > 1 else None,
        "recompute-granularity": mesh.activation_checkpointing if recomputed else None,
        "recompute-method": "uniform" if whole else None,
        "recompute-num-layers": 1 if whole else None,
        "bf16": decision.precision == "bfloat16",
        "no-check-for-nan-in-loss-and-grad": not decision.abort.on_non_finite,
    }


VERSIONS = ("0.19.2",)
EXPRESSIBLE = Expressible(optimizers={"adamw": ADAMW}, run_wide=("clip_norm",))
SPEC_MODULE = "forerun_megatron_spec"
"""Of the layers with a residual multiplier, in the export's folder."""
ARGUMENTS_FILE = "arguments.txt"
SEED_FILE = "seed_checkpoint.py"
DATA_FILE = "convert_data.py"
LATE = 0.01
"""A learning rate that is nowhere farther from the frozen one than this share of the peak counts as
equivalent."""


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
    """Write `arguments.txt`, the scripts of data, seed, proof and run, their numbers and the corpus
    reader.
    """
    refuse("megatron-lm", decision, version, VERSIONS, _problems(decision), EXPRESSIBLE)
    flags = flags_of(decision)
    scheduler, off = scheduler_of(decision, flags)
    programs = {SEED_FILE: SEED_FILE, DATA_FILE: DATA_FILE, PROVE_FILE: "prove_megatron_lm.py"}
    write_export(
        out_dir,
        decision,
        trainer="megatron-lm",
        version=version,
        numbers={"weights": _weights(decision)},
        programs=programs
        | ({} if decision.forward.residual == 1.0 else {f"{SPEC_MODULE}.py": f"{SPEC_MODULE}.py"}),
        files={
            ARGUMENTS_FILE: argument_lines(decision, flags, scheduler),
            RUN_FILE: _run_text(decision, version),
        },
    )
    return report(
        "megatron-lm", version, decision, _JUDGEMENTS | _found(decision, flags, off), EXPRESSIBLE
    )


def parameter_names(shape: Shape) -> dict[str, str]:
    """Each of our parameters' name in Megatron, with its plain layers; wq, wk, wv share a matrix,
    and w1, w3.
    """
    names = {}
    for name in parameter_shapes(shape):
        layer = re.match(r"layers\.\d+\.", name)
        within = name[layer.end() :] if layer else name
        names[name] = (
            f"{f'decoder.{layer[0]}' if layer else ''}{_MODULES[within.removesuffix('.weight')]}.weight"  # noqa: E501
        )
    return names


def foretold(decision: Decision) -> RunNumbers:
    """What Megatron does with the numbers of the decision, by its rules.

    Raises:
        FrozenError: the groups do not fit the shape's parameters.
    """
    schedule, shape, flags = decision.learning_rate.schedule, decision.shape, flags_of(decision)
    numbers = {
        name: GroupSettings(
            optimizer=group.optimizer, settings=numbers_of(flags, shape.width, sort)
        )
        for sort, members in sorts(decision).items()
        for name, group in members
    }
    scheduler, _ = scheduler_of(decision, flags)
    return RunNumbers(
        numbers=numbers, shares=tuple(scheduler.share(step) for step in proof_steps(schedule))
    )


def _problems(decision: Decision) -> dict[str, bool]:
    shape, schedule, mesh = decision.shape, decision.learning_rate.schedule, decision.parallelism
    tensor, (share, micro) = mesh.tensor, rank_sequences(decision)
    cut = {
        "num_heads": shape.num_heads,
        "num_kv_heads": shape.num_kv_heads,
        "ffn_width": shape.ffn_width,
    }
    return {
        (
            f"warmup_steps = num_steps = {schedule.num_steps}: Megatron's warmup must end before "
            "its "
            "decay"
        ): (schedule.warmup_steps < schedule.num_steps),
        f"launch.tensor = {tensor} does not divide "
        + ", ".join(f"{name} = {n}" for name, n in cut.items() if n % tensor): (
            all(n % tensor == 0 for n in cut.values())
        ),
        f"launch.tensor = {tensor} does not divide vocab_size = {shape.vocab_size}: Megatron would "
        "pad the vocabulary, "
        "and the softmax would include the padding": shape.vocab_size % tensor == 0,
        f"launch.pipeline = {mesh.pipeline} does not divide num_layers = {shape.num_layers}": (
            shape.num_layers % mesh.pipeline == 0
        ),
        f"launch.context = {mesh.context}: seq_len = {shape.seq_len} must be a multiple of "
        f"{2 * mesh.context} in Megatron": (
            mesh.context == 1 or shape.seq_len % (2 * mesh.context) == 0
        ),
        (
            f"launch.microbatch_sequences = {micro} does not divide a rank's share of "
            f"{counted(share, 'sequence')}"
        ): share % micro == 0,
        f"batch_warmup_stages = {schedule.batch_warmup_stages}: must be 1 "
        "(proxy.batch_warmup_fraction = 0), this export's batch size is fixed": (
            schedule.batch_warmup_stages == 1
        ),
    }


def _weights(decision: Decision) -> dict[str, Json]:
    """Size and initial deviation of each parameter, by our name."""
    sizes = parameter_shapes(decision.shape)
    of = assign_groups(decision.groups, list(sizes))
    return {
        name: {"size": list(size), "init_std": of[name].init_std} for name, size in sizes.items()
    }


def _run_text(decision: Decision, version: str) -> str:
    data_id = decision.data.data_id[:16]
    notes = f"""Needs
#   MEGATRON_LM    a checkout of github.com/NVIDIA/Megatron-LM at this version
#   MEGATRON_DATA  a folder that all nodes share, for the corpus with data_id {data_id}... as Megatron's indexed files
#   RUN_DIR        another such folder, for checkpoints; a run found there is resumed
# and the data and the initial weights, which these commands make once:
#   PYTHONPATH=$MEGATRON_LM python {DATA_FILE} CORPUS $MEGATRON_DATA
#   PYTHONPATH=$MEGATRON_LM python {SEED_FILE} $RUN_DIR/seed
# If a rank runs out of memory: `run.sh --micro-batch-size 1` accumulates the same batch in smaller pieces."""  # noqa: E501
    ceiling, after = (
        decision.abort.train_loss_above_nats,
        decision.learning_rate.schedule.warmup_steps + 1,
    )
    command = _COMMAND + _CEILING.replace("CEILING", repr(ceiling)).replace("AFTER", str(after))
    setup = _SETUP.replace("VERSION", version)
    return run_script(decision, f"Megatron-LM {version}", notes=notes, setup=setup, command=command)


_SETUP = r""": "${MEGATRON_LM:?a checkout of Megatron-LM}" "${MEGATRON_DATA:?the converted corpus}"
: "${RUN_DIR:?for checkpoints}"
read_version='import runpy, sys; print(runpy.run_path(sys.argv[1])["__version__"])'
installed="$(python -c "$read_version" "$MEGATRON_LM/megatron/core/package_info.py" 2>/dev/null || true)"
if [ "${installed%%+*}" != VERSION ]; then
    echo "MEGATRON_LM=$MEGATRON_LM is Megatron-LM ${installed:-of no known version}: must be VERSION;" \
        "check out its release, or export with a version of forerun that knows yours" >&2
    exit 2
fi
if [ ! -e "$MEGATRON_DATA/data_args.txt" ]; then
    echo "no data: PYTHONPATH=$MEGATRON_LM python $here/convert_data.py CORPUS $MEGATRON_DATA" >&2
    exit 2
fi
if [ ! -e "$RUN_DIR/seed/latest_checkpointed_iteration.txt" ]; then
    echo "no initial weights: PYTHONPATH=$MEGATRON_LM python $here/seed_checkpoint.py $RUN_DIR/seed" >&2
    exit 2
fi
export CUDA_DEVICE_MAX_CONNECTIONS=1  # Megatron needs it with tensor or context parallelism, before Blackwell
export PYTHONPATH="$here:$MEGATRON_LM${PYTHONPATH:+:$PYTHONPATH}"
read -r -d "" -a arguments < "$here/arguments.txt" || true"""  # noqa: E501
_COMMAND = r""""$MEGATRON_LM/pretrain_gpt.py" "${arguments[@]}" --data-args-path "$MEGATRON_DATA/data_args.txt" \
    --save "$RUN_DIR/checkpoints" --load "$RUN_DIR/checkpoints" --pretrained-checkpoint "$RUN_DIR/seed" "$@" 2>&1 |
"""  # noqa: E501
_CEILING = r"""    awk -v ceiling=CEILING -v after=AFTER '
        { print; fflush() }
        /lm loss:/ {
            step = $0; sub(/\/.*/, "", step); sub(/.* iteration +/, "", step)
            loss = $0; sub(/.*lm loss: */, "", loss)
            if (step + 0 > after && loss + 0 > ceiling) {
                printf "training loss %g > %g nats at step %d: stopped\n", loss + 0, ceiling, step + 0
                exit 3  # the next line that the last rank prints finds the pipe closed, and ends it
            }
        }'"""  # noqa: E501


_JUDGEMENTS: dict[str, Judgement] = {
    "shape.family": (
        "equivalent",
        (
            "Megatron's GPT model: rotary pairs, norm eps and gates as in forerun, no document "
            "mask; "
            "other rounding"
        ),
    ),
    "forward.residual": (
        "equivalent",
        "a layer spec of ours (--spec) multiplies each branch; with 1, Megatron's own",
    ),
    "forward.attention": (
        "equivalent",
        "set by --mup-base-head-dim, to one part in 1e15; multiplies q . k in the kernel",
    ),
    "forward.output": (
        "equivalent",
        "multiplies the logits, forerun the readout's input: rounding differs",
    ),
    "groups.pattern": (
        "equivalent",
        "Megatron groups parameters by type; each group's numbers are compared",
    ),
    "optimizer": (
        "exact",
        (
            "Megatron's adam is AdamW: fused where Transformer Engine or Apex is installed, else "
            "torch's"
        ),
    ),
    "learning_rate": ("exact", ""),
    "clip_norm": ("exact", "clips by the global norm; --clip-grad 0 is no clipping"),
    "data": (
        "equivalent",
        f"{DATA_FILE} writes the same tokens to Megatron's files, and refuses another data_id",
    ),
    "data.weights": (
        "equivalent",
        f"they become Megatron's blend in the data_args.txt that {DATA_FILE} writes",
    ),
    "seed": (
        "equivalent",
        "exact for initial values; Megatron's own generators shuffle with the seed plus 1",
    ),
    "precision": ("exact", ""),
    "parallelism": ("exact", ""),
    "parallelism.data_parallel_shard": (
        "equivalent",
        (
            "Megatron's distributed optimizer shards moments and main weights; every rank keeps "
            "all "
            "compute weights"
        ),
    ),
    "parallelism.activation_checkpointing": (
        "equivalent",
        "--recompute-granularity; selective recomputes the attention core",
    ),
    "checkpointing": ("exact", ""),
    "checkpointing.keep": (
        "equivalent",
        "Megatron keeps every checkpoint: remove old ones by hand",
    ),
    "abort.on_non_finite": (
        "exact",
        "Megatron stops at a loss or gradient that is not finite, before the step",
    ),
    "abort.train_loss_above_nats": (
        "equivalent",
        "run.sh reads the log and stops the run, a step or two later",
    ),
    "spikes": (
        "equivalent",
        "the response is by hand: --load an older checkpoint, --iterations-to-skip",
    ),
}


def _found(decision: Decision, flags: Flags, off: float) -> dict[str, Judgement]:
    """Judgements that depend on the decision's numbers."""
    found: dict[str, Judgement] = {
        f"groups.{field}": ("not_expressible", f"Megatron's flags give another number: {said}")
        for field, said in differences(decision, flags).items()
    }
    narrow = decision.precision == "bfloat16"
    drawn = f"drawn from (seed, name) by {SEED_FILE}, as the embedded trainer draws them"
    found["groups.init_std"] = (
        ("equivalent", f"{drawn}; --bf16 rounds them to bfloat16 once")
        if narrow
        else ("exact", drawn)
    )
    if narrow:
        found["precision"] = (
            "equivalent",
            "--bf16: weights and products in bfloat16, main weights and sums in float32",
        )
    if off > SAME:
        where = (
            f"at most {off:.2g} of the peak off the frozen table: Megatron's warmup is t / W, "
            "not (t + 1) / W"
        )
        late: Judgement = ("equivalent" if off <= LATE * (1 + SAME) else "not_expressible", where)
        found |= dict.fromkeys(
            (
                "learning_rate.step_convention",
                "learning_rate.samples",
                "learning_rate.table_sha256",
            ),
            late,
        )
    once = decision.num_tokens <= decision.data.num_train_tokens
    order = "Megatron shuffles documents and sequences with its own generator: "
    found["data.order"] = (
        (
            "equivalent",
            order
            + "a sequence still comes at most once, unless a weight asks for more than a source has",  # noqa: E501
        )
        if once
        else (
            "not_expressible",
            order
            + "over all epochs together, so a sequence may come twice before another comes once",
        )
    )
    return found
