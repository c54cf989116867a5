"""The files of an export: its programs, their numbers as `forerun.json`, the corpus reader and the
launch script.

Programs are the files of `templates/`, byte for byte; lint and types see them, no module imports
them. What differs from one decision to the next stands in `forerun.json`, which they read
(`templates/forerun_numbers.py`), and in files that the trainer itself reads.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import proxies
import proxies.core
import proxies.core.muon
import proxies.data
import proxies.model
import proxies.model.muon
from launcher.exporters.view import proof_steps
from launcher.frozen.frozen import Decision, ParameterGroup
from launcher.frozen.launch_file import RUN_FILE
from proxies.core import canon, checks, errors, notation, plain_files, schedule
from proxies.core.canon import Json
from proxies.data import mixture, permutation, tokens, windows

NUMBERS_FILE = "forerun.json"
PROVE_FILE = "prove.py"
_TEMPLATES = Path(__file__).with_name("templates")
_INDENT = r"\n +"
"""In no JSON text: there a new line is an escape."""
_SHARED = ("forerun_numbers.py", "forerun_torch.py")
_READER = (
    proxies,
    proxies.core,
    proxies.data,
    canon,
    checks,
    errors,
    mixture,
    notation,
    permutation,
    plain_files,
    schedule,
    tokens,
    windows,
)
"""What reads a corpus and gives the learning rates, with numpy and the standard library alone."""
_CARRIED = {"muon": (proxies.model, proxies.model.muon, proxies.core.muon)}
"""Modules that an export carries, by the optimizer that they step and no trainer has."""


def template(name: str) -> str:
    """A program as exports carry it."""
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def write_export(
    out_dir: Path,
    decision: Decision,
    *,
    trainer: str,
    version: str,
    numbers: Mapping[str, Json],
    programs: Mapping[str, str],
    files: Mapping[str, str],
) -> None:
    """Write the files of an export, the corpus reader among them.

    `programs`: templates by the name they get. `numbers`: what they read beside `run_numbers`.
    `files`: texts by path.
    """
    body: dict[str, Json] = {
        "trainer": trainer,
        "version": version,
        "digest": decision.digest,
        "numbers": {**run_numbers(decision), **numbers},
    }
    texts = {name: template(name) for name in _SHARED}
    texts |= {name: template(source) for name, source in programs.items()}
    optimizers = {group.optimizer for group in decision.groups}
    carried = [
        module for name, modules in _CARRIED.items() if name in optimizers for module in modules
    ]
    for module in (*_READER, *carried):
        path = module.__name__.replace(".", "/")
        texts[path + ("/__init__.py" if hasattr(module, "__path__") else ".py")] = (
            inspect.getsource(module)
        )
    write_files(
        out_dir,
        {**texts, NUMBERS_FILE: _readable({**body, "sha256": canon.content_id(body)}), **files},
    )


def write_files(out_dir: Path, files: Mapping[str, str]) -> None:
    """Write each text at its path under `out_dir`; `run.sh` can be executed."""
    for name, text in files.items():
        (out_dir / name).parent.mkdir(parents=True, exist_ok=True)
        canon.write_atomic(out_dir / name, text.encode())
    (out_dir / RUN_FILE).chmod(0o755)


@contextlib.contextmanager
def scratch_for(target: Path) -> Iterator[Path]:
    """An empty folder on the disk of `target`, gone at the end unless it was put in its place."""
    near = next(folder for folder in target.parents if folder.is_dir())
    scratch = near / f".{target.name}.part"
    shutil.rmtree(scratch, ignore_errors=True)  # of an export that was killed
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def put(scratch: Path, target: Path) -> None:
    """Make `scratch` the folder `target`, whatever lay there.

    Raises:
        OSError: `target` cannot be written.
    """
    if target.exists():
        shutil.rmtree(target)
    canon.make_folder(target.parent)
    scratch.rename(target)
    canon.sync_folder(target.parent)


def _readable(body: Mapping[str, Json]) -> str:
    """Sorted and indented JSON; a plain list is one line."""
    text = canon.pretty(body).decode()
    return re.sub(
        r"\[\n +([^\[\]{}]*?)\n *\]", lambda found: f"[{re.sub(_INDENT, ' ', found[1])}]", text
    )


def groups_of(patterns: Iterable[tuple[str, ParameterGroup]]) -> list[Json]:
    """Return optimizer groups by a trainer's patterns, as `templates/forerun_torch.py` reads
    them.
    """
    return [
        {
            "pattern": pattern,
            "optimizer": group.optimizer,
            "settings": {**group.settings},
            "init_std": group.init_std,
        }
        for pattern, group in patterns
    ]


def run_numbers(decision: Decision) -> dict[str, Json]:
    """What programs read of a decision, under its own names."""
    schedule, data = decision.learning_rate.schedule, decision.data
    return {
        "shape": asdict(decision.shape),
        "forward": asdict(decision.forward),
        "groups": groups_of((group.pattern, group) for group in decision.groups),
        "schedule": asdict(schedule),
        "clip_norm": decision.clip_norm,
        "batch_sequences": decision.batch_tokens // decision.shape.seq_len,
        "data_id": data.data_id,
        "data_weights": dict(data.weights),
        "seed": decision.seed,
        "precision": decision.precision,
        "parallelism": asdict(decision.parallelism),
        "checkpointing": asdict(decision.checkpointing),
        "compiled": decision.compiled,
        "train_loss_above_nats": decision.abort.train_loss_above_nats,
        "steps": list(proof_steps(schedule)),
    }


def run_script(decision: Decision, trainer: str, *, notes: str, setup: str, command: str) -> str:
    """A `run.sh` that starts `command` under torchrun, a process per rank.

    `trainer`: its name and version. `notes`: what it needs, lines of a comment that has begun.
    `setup`: lines before the launch; `$here` is the script's folder.
    """
    ranks = decision.parallelism.num_ranks
    per_node = max(n for n in range(1, 9) if ranks % n == 0)
    return f"""#!/usr/bin/env bash
# Launches {decision.digest}
# with {trainer}; ranks: {ranks}.
# Run it once on every node. A node has {per_node} ranks, or RANKS_PER_NODE; several nodes need RDZV_ENDPOINT=HOST:PORT.
# {notes}
set -euo pipefail
here="$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)"
{setup}
ranks_per_node="${{RANKS_PER_NODE:-{per_node}}}"
if [ "$(({ranks} % ranks_per_node))" != 0 ]; then
    echo "RANKS_PER_NODE=$ranks_per_node does not divide the {ranks} ranks" >&2
    exit 2
fi
if [ "$ranks_per_node" != {ranks} ] && [ -z "${{RDZV_ENDPOINT:-}}" ]; then
    echo "$(({ranks} / ranks_per_node)) nodes: set RDZV_ENDPOINT=HOST:PORT, a free port of one, the same on each" >&2
    exit 2
fi
exec torchrun --nnodes "$(({ranks} / ranks_per_node))" --nproc-per-node "$ranks_per_node" \\
    --rdzv-backend c10d --rdzv-endpoint "${{RDZV_ENDPOINT:-localhost:0}}" \\
    {command}
"""  # noqa: E501


def corpus_run_script(
    decision: Decision, trainer: str, *, command: str, notes: str = "", setup: str = ""
) -> str:
    """As `run_script`, of an export that reads the corpus itself."""
    needs = (
        "Needs FORERUN_DATA, the corpus folder whose manifest has data_id "
        f"{decision.data.data_id[:16]}..."
    )
    exports = (
        'export FORERUN_DATA="${FORERUN_DATA:?the corpus folder}" '
        'PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"'
    )
    return run_script(
        decision, trainer, notes=needs + notes, setup=exports + setup, command=command
    )
