"""The decision as an OLMo-core run: its own configs as JSON, a script that trains them, the corpus reader.

`run.json` is in the form of OLMo-core's `Config.as_config_dict`, so its own parser reads it: model, AdamW groups by
globs, scheduler, clip, mesh, checkpoints. Embedding and residual multipliers are native there. What it lacks is in
`forerun_olmo_core.py`, whose classes the JSON names: a scale of q . k that a config can tell, the readout's multiplier,
initial values of (seed, name), the data order of (seed, step), and the brakes.
"""

from __future__ import annotations

import re
from pathlib import Path

from launcher.exporters.fidelity import ExportError, FidelityReport, Judgement, judged
from launcher.exporters.foreign import JUDGEMENTS, failed, refusals
from launcher.exporters.proof import PROVE_FILE
from launcher.exporters.reader import reader_files
from launcher.exporters.trainers.olmo_core_config import HEAD_NAMES, MODULE, NAME_PARTS, run_config, trainer_names
from launcher.exporters.trainers.olmo_core_script_text import PROVE_TEXT, TRAIN_TEXT
from launcher.exporters.trainers.olmo_core_text import MODULE_TEXT
from launcher.exporters.view import proof_steps
from launcher.frozen.files import RUN_FILE, corpus_run_script, write_files
from launcher.frozen.frozen import Decision
from proxies.core import canon, schedule
from proxies.core.flops import flops_per_token
from proxies.core.shape import Shape

VERSIONS = ("3.0.0",)
SCRIPT = "train.py"
CONFIG_FILE = "run.json"


def export(decision: Decision, out_dir: Path, version: str = VERSIONS[-1]) -> FidelityReport:
    """Write `run.json`, its module, `train.py`, `prove.py`, `run.sh` and the corpus reader (`proxies/`) into `out_dir`.

    Returns what became of every leaf field of the decision.

    Raises:
        ExportError: an unknown version, or what OLMo-core cannot run; every problem at once, and nothing is written.
        FrozenError: the groups do not fit the shape's parameters.
    """
    if problems := _problems(decision, version):
        raise ExportError("olmo-core", problems)
    fill = {
        "VERSION": version,
        "DIGEST": decision.digest,
        "NAMES": repr(HEAD_NAMES | NAME_PARTS),
        "STEPS": repr(proof_steps(decision.learning_rate.schedule)),
        "FLOPS": repr(flops_per_token(decision.shape, "olmo")),
    }
    texts = {f"{MODULE}.py": MODULE_TEXT, SCRIPT: TRAIN_TEXT, PROVE_FILE: PROVE_TEXT}
    files = {name: re.sub(r"<<(\w+)>>", lambda found: fill[found[1]], text) for name, text in texts.items()}
    files |= {CONFIG_FILE: canon.pretty(run_config(decision)).decode(), RUN_FILE: _run_text(decision, version)}
    write_files(out_dir, reader_files(schedule) | files)
    entries = judged(decision, JUDGEMENTS | _JUDGEMENTS | {"num_tokens": _counted(decision)})
    return FidelityReport(trainer="olmo-core", version=version, entries=entries)


def parameter_names(shape: Shape) -> dict[str, str]:
    """Each of our parameters' name in OLMo-core's Transformer."""
    return trainer_names(shape)


def _problems(decision: Decision, version: str) -> list[str]:
    mesh = decision.parallelism
    share = decision.batch_tokens // decision.shape.seq_len // mesh.num_data_ranks
    holds = {
        f"shape.family = {decision.shape.family!r}: OLMo-core has no learned positions; use the native trainer": (
            decision.shape.family == "llama"
        ),
        "abort.on_non_finite = false: this export never steps on NaN": decision.abort.on_non_finite,
        f"microbatch_sequences = {mesh.microbatch_sequences} does not divide a rank's share of {share} sequences": (
            mesh.microbatch_sequences == 0 or share % mesh.microbatch_sequences == 0
        ),
    } | {
        f"{name} = {degree}: this export is data parallel only; export to torchtitan, or 1": degree == 1
        for name, degree in (("tensor", mesh.tensor), ("pipeline", mesh.pipeline), ("context", mesh.context))
    }
    return refusals(decision, version, VERSIONS) + failed(holds)


def _counted(decision: Decision) -> Judgement:
    flops, (verdict, note) = flops_per_token(decision.shape, "olmo"), JUDGEMENTS["num_tokens"]
    return verdict, f"{note}; {flops} FLOPs each by OLMo-core's own count, our convention olmo"


def _run_text(decision: Decision, version: str) -> str:
    notes = f"""
# Checkpoints go to outputs/{decision.digest[:16]} of the folder it is started in, which all nodes must share.
# If a rank runs out of memory: `run.sh train_module.rank_microbatch_size={decision.shape.seq_len}` takes the same batch
# a sequence at a time."""
    setup, command = " OLMO_SHARED_FS=1", f'"$here/{SCRIPT}" "$@"'
    return corpus_run_script(decision, f"OLMo-core {version}", command=command, notes=notes, setup=setup)


_JUDGEMENTS: dict[str, Judgement] = {
    "shape.family": (
        "equivalent",
        "OLMo-core's pre-norm blocks: rotary halves and base, norm eps, no document mask as ours; angles in float32",
    ),
    "groups": ("exact", "group_overrides"),
    "groups.pattern": ("equivalent", "rewritten as globs over OLMo-core's names; one group claims each parameter"),
    "learning_rate": ("exact", "of OLMo-core's own schedulers in sequence; they multiply in another order"),
    "clip_norm": ("exact", "torch's clip by the norm of the whole gradient"),
    "seed": ("exact", "of initial values and data order; OLMo-core's own generators get it modulo 2**32"),
    "precision": ("equivalent", "of parameters in products, by FSDP2; weights, reductions and moments in float32"),
    "parallelism": ("exact", "FSDP2, or HSDP with replicas; tensor, pipeline and context other than 1 are refused"),
    "parallelism.activation_checkpointing": (
        "equivalent",
        "selective: OLMo-core chooses what it keeps and what it computes again; the values stay the same",
    ),
    "checkpointing.every_steps": ("exact", "OLMo-core's own, weights, optimizer and position in the data"),
    "checkpointing.keep": ("equivalent", "of those that one start of the run wrote; a resumed run leaves older ones"),
    "abort": ("exact", "a callback stops before the update"),
}
