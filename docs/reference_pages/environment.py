"""environment.md: the variables that the code names, those for a user to set with a sentence."""

from __future__ import annotations

import ast
import os
import re

from reference_pages.source import sources, trees

_NAME = re.compile(r"_?[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|PATH|PYTHONPATH|HOME|CXX|TMPDIR|NETRC")
SENTENCES = {
    "FORERUN_TRACEBACK": "1: an error is shown with where in the code it happened.",
    "NO_COLOR": "Any value: no color on a terminal.",
    "FORERUN_HOST": (
        "Name of this machine in results, where the host's own name changes or is shared."
    ),
    "FORERUN_RUN_DIR": "Set for a trainer of your own: the folder of its run.",
    "FORERUN_PROVE": "Set by `forerun verify --prove`, for `forerun.hook` in your training script.",
    "FORERUN_CUDA_GRAPHS": "0: the torchtitan export records no CUDA graphs.",
    "FORERUN_LOG_EVERY_STEPS": (
        "Steps between logs of the torchtitan export; by default 10 or a part of it."
    ),
    "FORERUN_DETERMINISTIC": (
        "1: the torchtitan export uses deterministic kernels, which are slower."
    ),
    "FORERUN_DATA": "Read by exported trainers: the folder that `forerun tokenize` wrote.",
    "CUDA_VISIBLE_DEVICES": "Which GPUs there are.",
    "RAY_ADDRESS": (
        "Said to be set, and not used: `cluster.address` in the plan names a cluster, "
        "`auto` this one."
    ),
    "RAY_AUTH_TOKEN": "A cluster's own token; a study on its own machine makes one for itself.",
    "RAY_AUTH_TOKEN_PATH": "The same, as a file.",
    "RAY_TMPDIR": "Where Ray keeps its sockets and logs.",
    "WANDB_API_KEY": "Login for `--online`; never written anywhere.",
    "WANDB_PROJECT": "Default of `dashboards --project`.",
    "WANDB_ENTITY": "Default of `dashboards --entity`.",
    "PYTHONPATH": "Given on to workers and to trainers of your own.",
}
"""Of those a user may set, or a trainer may read. Each must stand in the code."""
_HEAD = """# Environment variables

None has to be set. `FORERUN_TRAINER_PYTHON`, with a trainer's name in capitals (`FORERUN_OLMO_CORE_PYTHON`), names a
Python in which that trainer is installed, for `forerun verify`; without it, what `make trainers` built is asked.

| variable | what |
|---|---|
"""  # noqa: E501


def named() -> dict[str, list[str]]:
    """Names of variables in modules that deal with the environment, and those modules."""
    found: dict[str, list[str]] = {}
    for module, tree in trees(r"environ\b|envvar=|_VARIABLE\b"):
        words = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        words |= set(
            re.findall(r"""environ(?:\.get\(|\[)["'](\w+)""", sources()[module])
        )  # in programs that exports carry
        for word in sorted(words):
            if _NAME.fullmatch(word) and not hasattr(os, word):
                found.setdefault(word, []).append(module)
    return found


def environment_page() -> str:
    """environment.md.

    Raises:
        ValueError: a sentence is about a variable that the code does not name, or one of ours has
            none.
    """
    found = named()
    ours = {name for name in found if name.startswith("FORERUN_")} - _INNER
    if wrong := (SENTENCES.keys() - found.keys()) | (ours - SENTENCES.keys()):
        raise ValueError(
            f"docs/reference_pages/environment.py: SENTENCES and the code differ in {sorted(wrong)}"
        )
    lines = [f"| `{name}` | {said} |" for name, said in SENTENCES.items()]
    others = [
        f"| `{name}` | {', '.join(f'`{module}`' for module in modules)} |"
        for name, modules in sorted(found.items())
        if name not in SENTENCES
    ]
    after = [
        "",
        "## Others in the code",
        "",
        "Looked at by `doctor`, given on to other processes, or set for them.",
        "",
        "| variable | named in |",
        "|---|---|",
    ]
    return _HEAD + "\n".join([*lines, *after, *others]) + "\n"


_INNER = {"FORERUN_COMMAND", "FORERUN_ATTEMPT", "FORERUN_RAY_FOLDER"}
"""By which processes of ours find each other."""
