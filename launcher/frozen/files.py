"""What the files of several exports have in common: a header, groups as literals, the launch script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from launcher.frozen.frozen import Decision, ParameterGroup
from proxies.core import canon

RUN_FILE = "run.sh"


def write_files(out_dir: Path, files: Mapping[str, str]) -> None:
    """Write each text at its path under `out_dir`; `run.sh` can be executed."""
    for name, text in files.items():
        (out_dir / name).parent.mkdir(parents=True, exist_ok=True)
        canon.write_atomic(out_dir / name, text.encode())
    (out_dir / RUN_FILE).chmod(0o755)


def module_header(decision: Decision, what: str) -> str:
    """The docstring of a generated Python module."""
    return f'"""{what} Generated: an edit makes it another run.\n\ndigest {decision.digest}\n"""\n'


def group_literals(groups: Iterable[tuple[str, ParameterGroup]]) -> str:
    """`GROUPS`, a list of dicts: pattern, initial deviation, arguments of torch.optim.AdamW."""
    lines = "".join(
        f"    {{\n        'pattern': {pattern!r},\n        'init_std': {group.init_std!r},\n"
        f"        'optimizer_kwargs': {{\n            'lr': {group.learning_rate!r},\n"
        f"            'weight_decay': {group.weight_decay!r},\n            'eps': {group.eps!r},\n"
        f"            'betas': ({group.beta1!r}, {group.beta2!r}),\n        }},\n    }},\n"
        for pattern, group in groups
    )
    return f"GROUPS = [\n{lines}]\n"


def run_script(decision: Decision, trainer: str, *, notes: str, setup: str, command: str) -> str:
    """A `run.sh` that starts `command` under torchrun, a process per rank.

    `trainer`: its name and version. `notes`: what it needs, lines of a comment that has begun. `setup`: lines before
    the launch; `$here` is the script's folder.
    """
    ranks = decision.parallelism.num_ranks
    per_node = max(n for n in range(1, 9) if ranks % n == 0)
    return f"""#!/usr/bin/env bash
# Launches {decision.digest}
# with {trainer}; ranks: {ranks}.
# Run it once on every node: {per_node} ranks each, or RANKS_PER_NODE; several nodes meet at RDZV_ENDPOINT=HOST:PORT.
# {notes}
set -euo pipefail
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
{setup}
ranks_per_node="${{RANKS_PER_NODE:-{per_node}}}"
if [ "$(({ranks} % ranks_per_node))" != 0 ]; then
    echo "RANKS_PER_NODE=$ranks_per_node does not divide the {ranks} ranks" >&2
    exit 2
fi
exec torchrun --nnodes "$(({ranks} / ranks_per_node))" --nproc-per-node "$ranks_per_node" \\
    --rdzv-backend c10d --rdzv-endpoint "${{RDZV_ENDPOINT:-localhost:0}}" \\
    {command}
"""


def corpus_run_script(decision: Decision, trainer: str, *, command: str, notes: str = "", setup: str = "") -> str:
    """As `run_script`, of an export that carries the corpus reader."""
    needs = f"Needs FORERUN_DATA, the corpus folder whose manifest has data_id {decision.data.data_id[:16]}..."
    told = 'export FORERUN_DATA="${FORERUN_DATA:?the corpus folder}" PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"'
    return run_script(decision, trainer, notes=needs + notes, setup=told + setup, command=command)
