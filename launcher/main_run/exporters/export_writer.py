"""The files of an export, and the parts of a decision that several exporters write in one way.

`write_export` writes the files of an export to another trainer: the programs, their numbers
(`forerun.json`), and the corpus reader. The programs are copies of the files in `templates/`, byte
for byte. No module imports the templates; they are Python files so that linter and type checker see
them. The programs read the numbers of the decision from `forerun.json`
(`templates/forerun_numbers.py`). All other numbers are in files that the trainer itself reads.

`format_run_script` and `format_corpus_run_script` return the launch script. `make_scratch` and
`replace_folder` give an export its folder only once it is complete.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from forerun import _proxies
from forerun._launcher.main_run.exporters.comparison import choose_proof_steps
from forerun._launcher.main_run.frozen.frozen import Decision, ParameterGroup, assign_groups
from forerun._launcher.main_run.frozen.launch_file import RUN_FILE
from forerun._proxies import core, data, model
from forerun._proxies.core import canon, checks, errors, notation, plain_files, schedule
from forerun._proxies.core import muon as muon_settings
from forerun._proxies.core.canon import Json
from forerun._proxies.data import mixture, permutation, tokens, windows
from forerun._proxies.model import muon

NUMBERS_FILE = "forerun.json"
PROVE_FILE = "prove.py"
_TEMPLATES = Path(__file__).with_name("templates")
_SHARED_PROGRAMS = ("forerun_numbers.py", "forerun_torch.py")
_READER_MODULES = (
    _proxies,
    core,
    data,
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
"""Modules that read a corpus and compute learning rates, with numpy and the standard library only.
`test_exported_modules_need_neither_forerun_nor_torch` fails if one of them needs another module."""
_PACKAGE_DOCSTRING = '"""The part of forerun that reads this export\'s corpus and schedule."""\n'
_OPTIMIZER_MODULES = {"muon": (model, muon, muon_settings)}
"""Modules that an export carries because no trainer has the optimizer, by name of the optimizer."""


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
    """Write the files of an export to another trainer.

    Args:
        out_dir: Folder of the export.
        decision: The decision.
        trainer: Name of the trainer.
        version: Version of the trainer.
        numbers: Numbers of `forerun.json` in addition to those of every export.
        programs: Name of each template by the name of its copy in the export.
        files: Text of all other files by path; `run.sh` must be one of them.
    """
    body: dict[str, Json] = {
        "trainer": trainer,
        "version": version,
        "digest": decision.digest,
        "numbers": {**_collect_numbers(decision), **numbers},
    }
    templates = {**{name: name for name in _SHARED_PROGRAMS}, **programs}
    texts = {
        name: (_TEMPLATES / template).read_text("utf-8") for name, template in templates.items()
    }
    optimizers = {group.optimizer for group in decision.groups}
    carried = [module for name in optimizers for module in _OPTIMIZER_MODULES.get(name, ())]
    texts["forerun/__init__.py"] = _PACKAGE_DOCSTRING
    for module in (*_READER_MODULES, *carried):
        path = module.__name__.replace(".", "/")
        suffix = "/__init__.py" if hasattr(module, "__path__") else ".py"
        texts[path + suffix] = inspect.getsource(module)
    texts[NUMBERS_FILE] = _format_json({**body, "sha256": canon.compute_content_id(body)})
    write_files(out_dir, {**texts, **files})


def write_files(out_dir: Path, files: Mapping[str, str]) -> None:
    """Write each text to its path below `out_dir`, and make `run.sh` executable.

    Args:
        out_dir: Folder of the export.
        files: Text of each file by path; `run.sh` must be one of them.
    """
    for name, text in files.items():
        (out_dir / name).parent.mkdir(parents=True, exist_ok=True)
        canon.write_atomic(out_dir / name, text.encode())
    (out_dir / RUN_FILE).chmod(0o755)


@contextlib.contextmanager
def make_scratch(target: Path) -> Iterator[Path]:
    """Yield an empty folder on the disk of `target`.

    The folder is removed at the end, unless `replace_folder` has moved it to `target`.
    """
    existing_folder = next(folder for folder in target.parents if folder.is_dir())
    scratch = existing_folder / f".{target.name}.part"
    shutil.rmtree(scratch, ignore_errors=True)  # A killed export may have left it.
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def replace_folder(scratch: Path, target: Path) -> None:
    """Move the folder `scratch` to `target`, in place of the folder that is there.

    Raises:
        OSError: `target` cannot be written.
    """
    if target.exists():
        shutil.rmtree(target)
    canon.make_folder(target.parent)
    scratch.rename(target)
    canon.sync_folder(target.parent)


def _format_json(body: Mapping[str, Json]) -> str:
    """Format sorted and indented JSON, with each list of plain values on one line."""
    return re.sub(
        r"\[\n +([^\[\]{}]*?)\n *\]",
        # Every line break is one of the layout: JSON writes a line break inside a string as \\n.
        lambda match: "[" + re.sub(r"\n +", " ", match[1]) + "]",
        canon.to_pretty_json(body).decode(),
    )


def format_groups(patterns: Iterable[tuple[str, ParameterGroup]]) -> list[Json]:
    """Return optimizer groups as `templates/forerun_torch.py` reads them.

    Args:
        patterns: Pattern over the trainer's parameter names, with its group.
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


def _collect_numbers(decision: Decision) -> dict[str, Json]:
    """Return the numbers that the programs of every export read."""
    lr_schedule = decision.learning_rate.schedule
    return {
        "shape": asdict(decision.shape),
        "forward": asdict(decision.forward),
        "groups": format_groups((group.pattern, group) for group in decision.groups),
        "schedule": asdict(lr_schedule),
        "clip_norm": decision.clip_norm,
        "batch_sequences": decision.batch_tokens // decision.shape.seq_len,
        "data_id": decision.data.data_id,
        "data_weights": dict(decision.data.weights),
        "seed": decision.seed,
        "precision": decision.precision,
        "parallelism": asdict(decision.parallelism),
        "checkpointing": asdict(decision.checkpointing),
        "compiled": decision.compiled,
        "train_loss_above_nats": decision.abort.train_loss_above_nats,
        "steps": list(choose_proof_steps(lr_schedule)),
    }


def format_run_script(
    decision: Decision, trainer: str, *, notes: str, setup: str, command: str
) -> str:
    """Return a `run.sh` that starts a command under torchrun, with one process per rank.

    Args:
        decision: The decision.
        trainer: Name and version of the trainer, for the comment at the top.
        notes: Rest of that comment: what the script needs.
        setup: Lines before the launch, in which `$here` is the script's folder.
        command: Command of each rank.
    """
    ranks = decision.parallelism.num_ranks
    # The largest number of ranks, up to the 8 devices of a usual node, that divides them evenly.
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


def format_corpus_run_script(
    decision: Decision, trainer: str, *, command: str, notes: str = "", setup: str = ""
) -> str:
    """Return the `run.sh` of an export that reads the corpus itself; see `format_run_script`."""
    needs = (
        "Needs FORERUN_DATA, the corpus folder whose manifest has data_id "
        f"{decision.data.data_id[:16]}..."
    )
    exports = (
        'export FORERUN_DATA="${FORERUN_DATA:?the corpus folder}" '
        'PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"'
    )
    return format_run_script(
        decision, trainer, notes=needs + notes, setup=exports + setup, command=command
    )


# ---- Parts of a decision ----


def list_name_parts_by_group(
    decision: Decision, names: Mapping[str, str]
) -> list[tuple[ParameterGroup, list[tuple[str, ...]]]]:
    """Return each group with the trainer's names of its parameters, cut at the number of the layer.

    A name becomes the parts before and after that number, or a single part if the parameter is in
    no layer. So all layers together have one entry for each of their parameters.

    Args:
        decision: The decision.
        names: Trainer's name of each parameter by forerun's name.

    Raises:
        FrozenError: The groups do not fit the shape's parameters.
    """
    assigned = assign_groups(decision.groups, list(names))
    parts = {name: tuple(re.split(r"(?<=\.)\d+(?=\.)", names[name], maxsplit=1)) for name in names}
    return [
        (group, list(dict.fromkeys(parts[name] for name in names if assigned[name] == group)))
        for group in decision.groups
    ]
