"""The fixed text of the scripts that the Megatron-LM export writes; `@NAME@` stands for a number of the decision.

Text, not code, since Megatron lives in an environment of its own. Written against Megatron-core's public classes;
nothing of theirs is copied.
"""

NOTES = """Needs
#   MEGATRON_LM    a checkout of github.com/NVIDIA/Megatron-LM at this version
#   MEGATRON_DATA  a folder all nodes see, for the corpus with data_id @DATA_ID@... as Megatron's indexed files
#   RUN_DIR        another, for checkpoints; a run that is found there goes on
# and, each once, the data and the initial weights:
#   PYTHONPATH=$MEGATRON_LM python convert_data.py CORPUS $MEGATRON_DATA
#   PYTHONPATH=$MEGATRON_LM python seed_checkpoint.py $RUN_DIR/seed
# If a rank runs out of memory: `run.sh --micro-batch-size 1` accumulates the same batch in smaller pieces."""

SETUP = r""": "${MEGATRON_LM:?a checkout of Megatron-LM}" "${MEGATRON_DATA:?the converted corpus}"
: "${RUN_DIR:?for checkpoints}"
if [ ! -e "$MEGATRON_DATA/data_args.txt" ]; then
    echo "no data: PYTHONPATH=$MEGATRON_LM python $here/convert_data.py CORPUS $MEGATRON_DATA" >&2
    exit 2
fi
if [ ! -e "$RUN_DIR/seed/latest_checkpointed_iteration.txt" ]; then
    echo "no initial weights: PYTHONPATH=$MEGATRON_LM python $here/seed_checkpoint.py $RUN_DIR/seed" >&2
    exit 2
fi
export CUDA_DEVICE_MAX_CONNECTIONS=1  # Megatron asks for it where tensors or sequences are cut, before Blackwell
export PYTHONPATH="$MEGATRON_LM${PYTHONPATH:+:$PYTHONPATH}"
read -r -d "" -a arguments < "$here/arguments.txt" || true"""

COMMAND = r""""$MEGATRON_LM/pretrain_gpt.py" "${arguments[@]}" --data-args-path "$MEGATRON_DATA/data_args.txt" \
    --save "$RUN_DIR/checkpoints" --load "$RUN_DIR/checkpoints" --pretrained-checkpoint "$RUN_DIR/seed" "$@" 2>&1 |
    awk -v ceiling=@CEILING@ -v after=@AFTER@ '
        { print; fflush() }
        /lm loss:/ {
            step = $0; sub(/\/.*/, "", step); sub(/.* iteration +/, "", step)
            loss = $0; sub(/.*lm loss: */, "", loss)
            if (step + 0 > after && loss + 0 > ceiling) {
                printf "training loss %g > %g nats at step %d: stopped\n", loss + 0, ceiling, step + 0
                exit 3  # the next line that the last rank prints finds the pipe closed, and ends it
            }
        }'"""

SEED_CHECKPOINT = '''"""Initial weights of a frozen launch config of forerun, as a checkpoint for Megatron-LM @VERSION@.

digest @DIGEST@

`python seed_checkpoint.py FOLDER`, in one process; no GPU is needed, but memory for the whole model. The checkpoint is
of Megatron's own `torch_dist` format, which it loads at any tensor and pipeline degrees. Generated: an edit makes it
another run.
"""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from torch import distributed
from torch.nn import functional

SEED = @SEED@
SHAPE = @CONFIG@
VOCAB_SIZE = @VOCAB_SIZE@
SEQ_LEN = @SEQ_LEN@
TIED = @TIED@
QK_NORM = @QK_NORM@
WEIGHTS = {  # forerun's name: size, standard deviation
@WEIGHTS@}


def drawn(name: str) -> torch.Tensor:
    """Ones for norm gains, else normal(0, std) drawn from a seed of (SEED, name)."""
    size, std = WEIGHTS[name]
    if len(size) == 1:
        return torch.ones(size)
    seed = int.from_bytes(hashlib.sha256(f"{SEED}/{name}".encode()).digest()[:7], "big")
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * std


def queries_keys_values(attention: str) -> torch.Tensor:
    """One matrix: for each group of heads its queries, then its keys, then its values."""
    groups = SHAPE["num_query_groups"]
    parts = [drawn(f"{attention}.{name}.weight").unflatten(0, (groups, -1)) for name in ("wq", "wk", "wv")]
    return torch.cat(parts, dim=1).flatten(0, 1)


def weights() -> Iterator[tuple[str, torch.Tensor]]:
    """Megatron's name and the value of every parameter."""
    yield "embedding.word_embeddings.weight", drawn("tok_embeddings.weight")
    for i in range(SHAPE["num_layers"]):
        ours, theirs = f"layers.{i}", f"decoder.layers.{i}"
        yield f"{theirs}.input_layernorm.weight", drawn(f"{ours}.attention_norm.weight")
        yield f"{theirs}.self_attention.linear_qkv.weight", queries_keys_values(f"{ours}.attention")
        if QK_NORM:
            yield f"{theirs}.self_attention.q_layernorm.weight", drawn(f"{ours}.attention.q_norm.weight")
            yield f"{theirs}.self_attention.k_layernorm.weight", drawn(f"{ours}.attention.k_norm.weight")
        yield f"{theirs}.self_attention.linear_proj.weight", drawn(f"{ours}.attention.wo.weight")
        yield f"{theirs}.pre_mlp_layernorm.weight", drawn(f"{ours}.ffn_norm.weight")
        gate, up = (drawn(f"{ours}.feed_forward.{name}.weight") for name in ("w1", "w3"))
        yield f"{theirs}.mlp.linear_fc1.weight", torch.cat((gate, up))
        yield f"{theirs}.mlp.linear_fc2.weight", drawn(f"{ours}.feed_forward.w2.weight")
    yield "decoder.final_layernorm.weight", drawn("norm.weight")
    if not TIED:
        yield "output_layer.weight", drawn("lm_head.weight")


def model() -> GPTModel:
    """Megatron's model with these weights; of plain layers: Transformer Engine's read the same checkpoint."""
    config = TransformerConfig(
        **SHAPE, normalization="RMSNorm", gated_linear_unit=True, activation_func=functional.silu,
        add_bias_linear=False, persist_layer_norm=False, qk_layernorm=QK_NORM, use_cpu_initialization=True,
        perform_initialization=False,
    )
    built = GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(qk_layernorm=QK_NORM, normalization="RMSNorm"),
        vocab_size=VOCAB_SIZE, max_sequence_length=SEQ_LEN, share_embeddings_and_output_weights=TIED,
        position_embedding_type="rope",
    )
    parameters = dict(built.named_parameters())
    with torch.no_grad():
        for name, value in weights():
            parameters.pop(name).copy_(value)
    if parameters:
        raise ValueError(f"no initial value for {', '.join(parameters)}: another version of Megatron?")
    return built


def main(folder: Path) -> None:
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: "cpu"  # Megatron asks for both, though nothing is computed here
        torch.cuda.synchronize = lambda *device: None
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    (folder / "release").mkdir(parents=True)
    state = {"model": model().sharded_state_dict(), "checkpoint_version": 3.0, "iteration": 0}
    dist_checkpointing.save(state, str(folder / "release"))
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
'''
