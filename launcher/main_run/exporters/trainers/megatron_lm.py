"""Export to Megatron-LM: its arguments, a launch script, and scripts that write the data and the
initial weights.

The run uses Megatron's own `pretrain_gpt.py` and its own parser. The only code of forerun in it is
a layer spec, if there is a residual multiplier. For each field that the flags cannot express, the
fidelity report has the frozen number and Megatron's (`megatron_lm_numbers`). A decision for which
Megatron would build another model is refused. The initial weights are a Megatron checkpoint, which
`seed_checkpoint.py` draws by (seed, name) as the embedded trainer does. Megatron's own draws would
have other standard deviations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from forerun._launcher.main_run.exporters.comparison import RunNumbers, choose_proof_steps
from forerun._launcher.main_run.exporters.export_checks import (
    ADAMW_SETTINGS,
    Expressible,
    count_rank_sequences,
    list_batch_problems,
    require_runnable,
)
from forerun._launcher.main_run.exporters.export_writer import (
    PROVE_FILE,
    format_run_script,
    write_export,
)
from forerun._launcher.main_run.exporters.fidelity import (
    FidelityReport,
    Judgement,
    Verdict,
    build_report,
)
from forerun._launcher.main_run.exporters.trainers.megatron_lm_numbers import (
    SAME_TOLERANCE,
    WSD_STYLES,
    Flags,
    Scheduler,
    choose_flags,
    choose_scheduler,
    derive_settings,
    describe_differences,
    sort_parameters,
)
from forerun._launcher.main_run.frozen.frozen import Decision, assign_groups
from forerun._launcher.main_run.frozen.launch_file import RUN_FILE
from forerun._proxies.core.canon import Json
from forerun._proxies.core.numbers import GroupSettings
from forerun._proxies.core.shape import Shape, list_parameter_shapes
from forerun._proxies.model.layers import NORM_EPS
from forerun._proxies.model.rotary import ROPE_BASE

VERSIONS = ("0.19.2",)
EXPRESSIBLE = Expressible(optimizers={"adamw": ADAMW_SETTINGS}, run_wide=("clip_norm",))
SPEC_MODULE = "forerun_megatron_spec"
"""Module of the layers with a residual multiplier, in the export's folder."""
ARGUMENTS_FILE = "arguments.txt"
SEED_FILE = "seed_checkpoint.py"
DATA_FILE = "convert_data.py"
MAX_EQUIVALENT_ERROR = 0.01
"""Maximum difference between a learning rate and the frozen one, as a share of the peak, that
counts as equivalent."""
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
"""Megatron's module that holds a weight, by forerun's name of the module."""


def export(decision: Decision, out_dir: Path, version: str = VERSIONS[-1]) -> FidelityReport:
    """Write `arguments.txt`, the scripts for data, seed, proof, and run, their numbers, and the
    corpus reader.
    """
    problems = _find_problems(decision)
    require_runnable("megatron-lm", decision, version, VERSIONS, problems, EXPRESSIBLE)
    flags = choose_flags(decision)
    scheduler, error = choose_scheduler(decision, flags)
    programs = {SEED_FILE: SEED_FILE, DATA_FILE: DATA_FILE, PROVE_FILE: "prove_megatron_lm.py"}
    if decision.forward.residual != 1.0:
        programs[f"{SPEC_MODULE}.py"] = f"{SPEC_MODULE}.py"
    write_export(
        out_dir,
        decision,
        trainer="megatron-lm",
        version=version,
        numbers={"weights": _list_weights(decision)},
        programs=programs,
        files={
            ARGUMENTS_FILE: format_arguments(decision, flags, scheduler),
            RUN_FILE: _format_run_script(decision, version),
        },
    )
    judgements = _JUDGEMENTS | _judge_numbers(decision, flags, error)
    return build_report("megatron-lm", version, decision, judgements, EXPRESSIBLE)


def parameter_names(shape: Shape) -> dict[str, str]:
    """Return Megatron's name of each parameter by forerun's name.

    Megatron's plain layers, without Transformer Engine, have these names. wq, wk, and wv share a
    matrix, and so do w1 and w3.
    """
    names = {}
    for name in list_parameter_shapes(shape):
        layer, module = re.fullmatch(r"(layers\.\d+\.)?(.+)\.weight", name).groups("")  # type: ignore[union-attr]
        names[name] = f"{layer and f'decoder.{layer}'}{_MODULES[module]}.weight"
    return names


def predict_run(decision: Decision) -> RunNumbers:
    """Return the numbers with which Megatron trains, by its own rules.

    Raises:
        FrozenError: The groups do not fit the shape's parameters.
    """
    flags = choose_flags(decision)
    numbers = {
        name: GroupSettings(
            optimizer=group.optimizer, settings=derive_settings(flags, decision.shape.width, sort)
        )
        for sort, parameters in sort_parameters(decision).items()
        for name, group in parameters
    }
    scheduler, _ = choose_scheduler(decision, flags)
    steps = choose_proof_steps(decision.learning_rate.schedule)
    return RunNumbers(numbers=numbers, shares=tuple(map(scheduler.compute_share, steps)))


def _find_problems(decision: Decision) -> Iterator[str]:
    """Yield what Megatron cannot do."""
    shape, schedule, mesh = decision.shape, decision.learning_rate.schedule, decision.parallelism
    yield from list_batch_problems(decision, can_grow=False)
    if schedule.warmup_steps >= schedule.num_steps:
        yield (
            f"warmup_steps = num_steps = {schedule.num_steps}: Megatron's warmup must end before "
            "its decay"
        )
    undivided_sizes = [
        f"{name} = {size}"
        for name in ("num_heads", "num_kv_heads", "ffn_width")
        if (size := getattr(shape, name)) % mesh.tensor
    ]
    if undivided_sizes:
        yield f"launch.tensor = {mesh.tensor} does not divide {', '.join(undivided_sizes)}"
    if shape.vocab_size % mesh.tensor:
        yield (
            f"launch.tensor = {mesh.tensor} does not divide vocab_size = {shape.vocab_size}: "
            "Megatron would pad the vocabulary, and the softmax would include the padding"
        )
    if shape.num_layers % mesh.pipeline:
        yield f"launch.pipeline = {mesh.pipeline} does not divide num_layers = {shape.num_layers}"
    if mesh.context != 1 and shape.seq_len % (2 * mesh.context):
        yield (
            f"launch.context = {mesh.context}: seq_len = {shape.seq_len} must be a multiple of "
            f"{2 * mesh.context} in Megatron"
        )


def _list_weights(decision: Decision) -> dict[str, Json]:
    """Return size and initial standard deviation of each parameter by forerun's name."""
    shapes = list_parameter_shapes(decision.shape)
    groups = assign_groups(decision.groups, list(shapes))
    return {
        name: {"size": list(shape), "init_std": groups[name].init_std}
        for name, shape in shapes.items()
    }


# ---- Arguments ----

Arguments = dict[str, str | int | float | bool | None]
"""Value by flag: True for a flag without a value, False or None for a flag that is left out."""


def format_arguments(decision: Decision, flags: Flags, scheduler: Scheduler) -> str:
    """Return every argument of the run except its paths, one flag with its value per line."""
    arguments = {
        **_build_model_arguments(decision, flags),
        **_build_optimizer_arguments(decision, flags, scheduler),
        **_build_batch_arguments(decision, scheduler),
        **_build_machine_arguments(decision),
        "spec": None if decision.forward.residual == 1.0 else f"{SPEC_MODULE} SPEC",
    }
    return "".join(
        f"--{name}\n" if value is True else f"--{name} {value}\n"
        for name, value in arguments.items()
        if value is not None and value is not False
    )


def _build_model_arguments(decision: Decision, flags: Flags) -> Arguments:
    shape, forward = decision.shape, decision.forward
    grouped = shape.num_kv_heads != shape.num_heads
    arguments: Arguments = {
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
        # Megatron replaces an output multiplier of exactly 1.0 by 1 / (its width multiplier), but
        # takes the nearest other number as it is.
        would_be_replaced = forward.output == 1.0 and flags.base_width != shape.width
        arguments |= {
            "use-mup": True,
            "mup-base-hidden-size": flags.base_width,
            "mup-embedding-mult": forward.embedding,
            "mup-output-mult": math.nextafter(1, 0) if would_be_replaced else forward.output,
            "mup-attn-scale-power": 1.0,
            "mup-base-head-dim": (forward.attention * shape.head_dim) ** 2,
        }
    return arguments


def _build_optimizer_arguments(decision: Decision, flags: Flags, scheduler: Scheduler) -> Arguments:
    schedule, is_wsd = scheduler.frozen, scheduler.frozen.kind == "wsd"
    return {
        "optimizer": "adam",
        "lr": flags.learning_rate,
        "min-lr": flags.learning_rate * schedule.final_fraction,
        "lr-warmup-init": flags.learning_rate * scheduler.init_share,
        "lr-decay-style": "WSD" if is_wsd else schedule.kind,
        "weight-decay": flags.weight_decay,
        "adam-beta1": flags.beta1,
        "adam-beta2": flags.beta2,
        "adam-eps": flags.eps,
        "clip-grad": decision.clip_norm or 0.0,
        "lr-wsd-decay-style": WSD_STYLES[schedule.decay_shape] if is_wsd else None,
    }


def _build_batch_arguments(decision: Decision, scheduler: Scheduler) -> Arguments:
    schedule = scheduler.frozen
    return {
        "micro-batch-size": count_rank_sequences(decision)[1],
        "global-batch-size": decision.batch_tokens // decision.shape.seq_len,
        "train-iters": schedule.num_steps,
        "lr-decay-iters": schedule.num_steps,
        "lr-warmup-iters": scheduler.warmup,
        "lr-wsd-decay-iters": schedule.decay_steps if schedule.kind == "wsd" else None,
    }


def _build_machine_arguments(decision: Decision) -> Arguments:
    mesh, recomputation = decision.parallelism, decision.parallelism.activation_checkpointing
    is_sharded, replicas = mesh.data_parallel_shard > 1, mesh.data_parallel_replicate
    recomputes_blocks = recomputation == "full"
    return {
        "tensor-model-parallel-size": mesh.tensor,
        "pipeline-model-parallel-size": mesh.pipeline,
        "context-parallel-size": mesh.context,
        "seed": 1 + decision.seed % 2**31,  # Megatron does not accept 0.
        "ckpt-format": "torch_dist",
        "save-interval": decision.checkpointing.every_steps,
        "log-interval": 1,
        "split": "1,0,0",
        "eval-iters": 0,
        "use-distributed-optimizer": is_sharded,
        "num-distributed-optimizer-instances": replicas if is_sharded and replicas > 1 else None,
        "recompute-granularity": None if recomputation == "none" else recomputation,
        "recompute-method": "uniform" if recomputes_blocks else None,
        "recompute-num-layers": 1 if recomputes_blocks else None,
        "bf16": decision.precision == "bfloat16",
        "no-check-for-nan-in-loss-and-grad": not decision.abort.on_non_finite,
    }


# ---- Launch script ----


def _format_run_script(decision: Decision, version: str) -> str:
    data_id = decision.data.data_id[:16]
    notes = f"""Needs
#   MEGATRON_LM    a checkout of github.com/NVIDIA/Megatron-LM at this version
#   MEGATRON_DATA  a folder that all nodes share, for the corpus with data_id {data_id}... as Megatron's indexed files
#   RUN_DIR        another such folder, for checkpoints; a run found there is resumed
# and the data and the initial weights, which these commands make once:
#   PYTHONPATH=$MEGATRON_LM python {DATA_FILE} CORPUS $MEGATRON_DATA
#   PYTHONPATH=$MEGATRON_LM python {SEED_FILE} $RUN_DIR/seed
# If a rank runs out of memory: `run.sh --micro-batch-size 1` accumulates the same batch in smaller pieces."""  # noqa: E501
    ceiling = _CEILING.replace("CEILING", repr(decision.abort.train_loss_above_nats))
    after = decision.learning_rate.schedule.warmup_steps + 1
    return format_run_script(
        decision,
        f"Megatron-LM {version}",
        notes=notes,
        setup=_SETUP.replace("VERSION", version),
        command=_COMMAND + ceiling.replace("AFTER", str(after)),
    )


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


# ---- Judgements ----

_JUDGEMENTS: dict[str, Judgement] = {
    "shape.family": (
        "equivalent",
        (
            "Megatron's GPT model: rotary pairs, norm eps and gates as in forerun, no document "
            "mask; other rounding"
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
            "all compute weights"
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


def _judge_numbers(decision: Decision, flags: Flags, rate_error: float) -> dict[str, Judgement]:
    """Return the judgements that depend on the decision's numbers.

    Args:
        decision: The decision.
        flags: Flags of the export.
        rate_error: Largest difference from the frozen learning rate, as a share of the peak.
    """
    judgements: dict[str, Judgement] = {
        f"groups.{setting}": ("not_expressible", f"Megatron's flags give another number: {text}")
        for setting, text in describe_differences(decision, flags).items()
    }
    init_std = f"drawn from (seed, name) by {SEED_FILE}, as the embedded trainer draws them"
    judgements["groups.init_std"] = ("exact", init_std)
    if decision.precision == "bfloat16":
        rounded = f"{init_std}; --bf16 rounds them to bfloat16 once"
        judgements["groups.init_std"] = ("equivalent", rounded)
        judgements["precision"] = (
            "equivalent",
            "--bf16: weights and products in bfloat16, main weights and sums in float32",
        )
    if rate_error > SAME_TOLERANCE:
        verdict: Verdict = (
            "equivalent"
            if rate_error <= MAX_EQUIVALENT_ERROR * (1 + SAME_TOLERANCE)
            else "not_expressible"
        )
        note = (
            f"at most {rate_error:.2g} of the peak off the frozen table: Megatron's warmup is t / "
            "W, not (t + 1) / W"
        )
        for name in ("step_convention", "samples", "table_sha256"):
            judgements[f"learning_rate.{name}"] = (verdict, note)
    order = "Megatron shuffles documents and sequences with its own generator: "
    if decision.num_tokens <= decision.data.num_train_tokens:
        order += (
            "a sequence still comes at most once, unless a weight asks for more than a source has"
        )
        judgements["data.order"] = ("equivalent", order)
    else:
        order += "over all epochs together, so a sequence may come twice before another comes once"
        judgements["data.order"] = ("not_expressible", order)
    return judgements
