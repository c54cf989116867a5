"""Plans for real situations: what `forerun init --preset NAME` writes, and why. Standard library only.

Sizes follow published practice, named beside each; the shares of the main run that they cost are what `forerun
estimate` counts. None of these plans has been run on its GPUs by this project.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

Values = Mapping[str, Mapping[str, object]]
NODE_GPUS = 8
NOT_MEASURED = (
    "Not measured: this project has run no plan of this size on a GPU. Hours and dollars are arithmetic from published",
    "shares of the peak; `forerun estimate` says what it assumed. Measure some steps first (docs/first-plan.md).",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """A situation, and the plan for it."""

    about: str
    gpu: str
    """Name in the reference table; empty: none."""
    num_gpus: int
    budget_flops: float
    """Of the main run, where nobody gave another."""
    values: Values
    reasons: Mapping[str, str]
    head: tuple[str, ...] = ()


_NEW: Values = {
    "proxy": {"num_slots": "auto", "compiled": "auto"},
    "search": {"max_extensions": 2, "num_replays": 2},
    "ladder": {"num_slots": "auto"},
    "launch": {"validate_every_steps": 100, "layers_every_steps": 20, "spike_rollbacks": 2},
}
"""What a plan that `init` writes asks for. One without these keys is older, and asks what it asked: the defaults."""

_GPU: Values = {
    "model": {"head_dim": 64, "ffn_ratio": 2.75},
    "proxy": {
        "base_width": 256, "num_steps": 500, "weight_decay": 0.1, "dtype": "bfloat16", "num_slots": "auto",
        "compiled": "auto",
    },
    "search": {
        "num_trials": 24, "learning_rate": (2.0**-11, 2.0**-5), "warmup_fraction": (0.01, 0.3),
        "clip_norm": (0.25, 4.0), "max_extensions": 2, "num_replays": 2,
    },
    "transfer": {
        "num_seeds": 2, "durations": (1.0, 2.0, 4.0), "axis_num_seeds": 1, "control_num_seeds": 1,
        "check_widths": (128, 256, 512, 1024), "check_depths": (2, 4, 8),
    },
    "ladder": {"num_slots": "auto"},
    "cluster": {"worker_gpus": 1.0},
    "launch": {
        "precision": "bfloat16", "compiled": True, "checkpoint_every_steps": 500, "validate_every_steps": 500,
        "layers_every_steps": 50, "spike_rollbacks": 2,
    },
}  # fmt: skip
_WHY: Mapping[str, str] = {
    "model.num_layers": "the main run's own depth: then only width and duration are carried over.",
    "model.head_dim": "the usual one; it stays the same at every width, and heads grow in number.",
    "model.ffn_ratio": "close to SwiGLU's 8/3, and a whole number at every width that is a multiple of 64.",
    "proxy.base_width": "published practice holds that transfer wants a width of 256 and a depth of 4 at least "
    "(muTransfer, arXiv 2203.03466; Cerebras-GPT's base is 256).",
    "proxy.num_steps": "enough for a warmup and a decay; longer runs are [transfer] durations and the ladder's.",
    "proxy.weight_decay": "what nearly every published decoder uses; muP scales it with width.",
    "proxy.microbatch_tokens": "so that the logits of a pass fit the GPU. Proxies of this size fill a GPU by "
    "themselves, and so train one at a time.",
    "search.learning_rate": "about the 6e-3 (2^-7.4) of Cerebras-GPT's base of 256 (arXiv 2304.03208); it grows if it "
    "must.",
    "transfer.widths": "the base's, up to about a quarter of the main run's guessed width, or to twice the base.",
    "transfer.num_seeds": "seeds cost more here than on a laptop; --spend adds some where a verdict cannot tell.",
    "ladder.num_steps": "the longest within twice the measured durations, so that the rate's rule reaches it.",
    "ladder.widths": "its largest rung takes about 1/100 of the budget: forecasts were back-tested to 100 times.",
    "cluster.num_workers": "a worker for each GPU.",
    "launch.data_parallel_shard": "the GPUs of a node share the model (FSDP2).",
    "launch.gpu": "what `forerun estimate` takes peak, memory and price of.",
}


def slurm_options(num_gpus: int) -> tuple[str, ...]:
    """Of `sbatch`, for whole nodes; partition and account are the user's own to add."""
    nodes, each = max(1, num_gpus // NODE_GPUS), min(num_gpus, NODE_GPUS)
    return (f"--nodes={nodes}", f"--gpus-per-node={each}", "--cpus-per-task=64", "--time=24:00:00")


def _joined(*parts: Values) -> Values:
    """Sections key by key, the later part's values winning."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: {key: value for part in parts for key, value in part.get(name, {}).items()} for name in names}


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "cpu": Preset(
            about="a laptop without a GPU: a toy main run of a quarter of a million parameters, in minutes",
            gpu="", num_gpus=2, budget_flops=1e13, values=_NEW, reasons={},
        ),
        "gpu-24gb": Preset(
            about="one card of 24 GB (RTX 4090, A10G): a main run of 0.4e9 parameters in days",
            gpu="RTX4090", num_gpus=1, budget_flops=2e19,
            head=("One card of 24 GB. Main run: about 0.4e9 parameters, 8e9 tokens, some six days.", *NOT_MEASURED),
            reasons={**_WHY, "target.budget_flops": "some six days of an RTX 4090, by published runs."},
            values=_joined(_GPU, {
                "model": {"num_layers": 16, "seq_len": 1024},
                "proxy": {"batch_tokens": 131_072, "microbatch_tokens": 8192},
                "transfer": {"widths": (256, 384, 512), "control_widths": (512,)},
                "ladder": {"widths": (256, 384, 512, 640), "num_steps": (500, 1500, 4000)},
                "target": {"width_multiple": 128},
                "cluster": {"num_workers": 1},
                "launch": {"gpu": "RTX4090", "data_parallel_shard": 1, "microbatch_sequences": 4,
                           "activation_checkpointing": "selective"},
            }),
        ),
        "8xh100": Preset(
            about="one node of 8 H100: a main run of 2.4e9 parameters in days",
            gpu="H100", num_gpus=8, budget_flops=7e20,
            head=("One node of 8 H100. Main run: about 2.4e9 parameters, 48e9 tokens, some five days.", *NOT_MEASURED),
            reasons={**_WHY, "target.budget_flops": "some five days of 8 H100, by published runs."},
            values=_joined(_GPU, {
                "model": {"num_layers": 24, "seq_len": 2048},
                "proxy": {"batch_tokens": 524_288, "microbatch_tokens": 32_768},
                "transfer": {"widths": (256, 384, 640), "control_widths": (512,)},
                "ladder": {"widths": (256, 384, 512, 768, 1024), "num_steps": (500, 1500, 4000)},
                "target": {"width_multiple": 128},
                "cluster": {"num_workers": 8},
                "launch": {"gpu": "H100", "data_parallel_shard": 8, "microbatch_sequences": 4,
                           "activation_checkpointing": "selective"},
            }),
        ),
        "slurm": Preset(
            about="a SLURM cluster, 4 nodes of 8 H100: a main run of 7e9 parameters in ten days",
            gpu="H100", num_gpus=32, budget_flops=6e21,
            head=(
                "A SLURM cluster, 4 nodes of 8 H100. Main run: about 7e9 parameters, 140e9 tokens, some ten days.",
                *NOT_MEASURED,
                "Start it with `forerun run PLAN --study STUDY --sbatch job.sh`, then `sbatch job.sh`: plan, study and",
                "corpus lie where all nodes see them (docs/clusters.md). Add your partition and account below.",
            ),
            reasons={
                **_WHY, "target.budget_flops": "some ten days of 32 H100, by published runs.",
                "cluster.slurm_options": "whole nodes; add --partition and --account of your own.",
                "launch.data_parallel_replicate": "a replica a node: only gradients cross between nodes (HSDP).",
            },
            values=_joined(_GPU, {
                "model": {"num_layers": 32, "head_dim": 128, "seq_len": 2048},
                "proxy": {"batch_tokens": 1_048_576, "microbatch_tokens": 32_768},
                "transfer": {"widths": (256, 512, 1024), "control_widths": (512,)},
                "ladder": {"widths": (256, 512, 768, 1024, 1536), "num_steps": (500, 1500, 4000)},
                "target": {"width_multiple": 256},
                "cluster": {
                    "num_workers": 32,
                    "slurm_options": slurm_options(32),
                },
                "launch": {"gpu": "H100", "data_parallel_shard": 8, "data_parallel_replicate": 4,
                           "microbatch_sequences": 2, "activation_checkpointing": "full"},
            }),
        ),
    }
)  # fmt: skip


def preset_for(memory_gb: float, num_gpus: int) -> str:
    """The preset that is nearest to so many GPUs of such a memory."""
    if num_gpus > NODE_GPUS:
        return "slurm"
    return "gpu-24gb" if num_gpus == 1 and memory_gb < 40 else "8xh100"


def layout(num_gpus: int) -> dict[str, object]:
    """Degrees of `[launch]` over so many GPUs: a node's share the model, nodes are replicas."""
    return {
        "data_parallel_shard": min(num_gpus, NODE_GPUS),
        "data_parallel_replicate": max(1, num_gpus // NODE_GPUS),
    }
