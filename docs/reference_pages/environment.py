"""Text of docs/reference/environment.md, which lists the environment variables in the code.

Each variable that a user may set has a sentence in `SENTENCES`. The other variables are listed with
the modules that name them.
"""

from __future__ import annotations

import ast
import os
import re

from reference_pages.source import parse_modules, read_sources

_VARIABLE_NAME = re.compile(
    r"_?[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|PATH|PYTHONPATH|HOME|CXX|TMPDIR|NETRC"
)
SENTENCES = {
    "FORERUN_TRACEBACK": "1: an error is shown with its place in the code.",
    "NO_COLOR": "Any value: no color on a terminal.",
    "FORERUN_HOST": "Name of this machine in results, if its host name changes or is shared.",
    "FORERUN_RUN_DIR": "Set for your own trainer: the folder of its run.",
    "FORERUN_PROVE": "Set by `forerun verify --prove`, for `forerun.hook` in your training script.",
    "FORERUN_CUDA_GRAPHS": "0: the torchtitan export records no CUDA graphs.",
    "FORERUN_LOG_EVERY_STEPS": (
        "Steps between logs of the torchtitan export; by default 10 or a part of it."
    ),
    "FORERUN_DETERMINISTIC": (
        "1: the torchtitan export uses deterministic kernels, which are slower."
    ),
    "FORERUN_DATA": "Read by exported trainers: the folder that `forerun tokenize` wrote.",
    "CUDA_VISIBLE_DEVICES": "GPUs that forerun may use.",
    "RAY_ADDRESS": (
        'Address of a Ray cluster. Used only if the plan has `cluster.address = "auto"`; '
        "otherwise a message says that it is ignored."
    ),
    "RAY_AUTH_TOKEN": "Token of a Ray cluster; a study on one machine makes its own.",
    "RAY_AUTH_TOKEN_PATH": "The same, as a file.",
    "RAY_TMPDIR": "Folder of Ray's sockets and logs.",
    "WANDB_API_KEY": "Login for `--online`; forerun never writes it to a file.",
    "WANDB_PROJECT": "Default of `dashboards --project`.",
    "WANDB_ENTITY": "Default of `dashboards --entity`.",
    "PYTHONPATH": "Passed on to workers and to your own trainer.",
}
"""Sentences on the variables that a user may set or a trainer may read. The code must name each."""
_INTERNAL_VARIABLES = {"FORERUN_ATTEMPT", "FORERUN_RAY_FOLDER"}
"""Variables by which forerun's processes find each other."""
_HEAD = """# Environment variables

No variable has to be set. `FORERUN_TRAINER_PYTHON`, with a trainer's name in capitals (`FORERUN_OLMO_CORE_PYTHON`), names a
Python in which that trainer is installed, for `forerun verify`. Without it, forerun uses the environment that
`make trainers` built.

| variable | meaning |
|---|---|
"""  # noqa: E501


def list_variables() -> dict[str, list[str]]:
    """Return the variables that modules which use the environment name, with those modules."""
    modules_by_variable: dict[str, list[str]] = {}
    for module, tree in parse_modules(r"environ\b|envvar=|_VARIABLE\b"):
        words = {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        # An export writes programs that are texts in the module, so `ast` does not see their
        # constants.
        words |= set(re.findall(r"""environ(?:\.get\(|\[)["'](\w+)""", read_sources()[module]))
        for word in sorted(words):
            # A name that the module `os` has, such as O_RDONLY, is a constant and no variable.
            if _VARIABLE_NAME.fullmatch(word) and not hasattr(os, word):
                modules_by_variable.setdefault(word, []).append(module)
    return modules_by_variable


def format_environment_page() -> str:
    """Return the text of environment.md.

    Raises:
        ValueError: A sentence is about a variable that the code does not name, or a variable of
            forerun has no sentence.
    """
    modules_by_variable = list_variables()
    forerun_variables = {
        name for name in modules_by_variable if name.startswith("FORERUN_")
    } - _INTERNAL_VARIABLES
    if differences := (SENTENCES.keys() - modules_by_variable.keys()) | (
        forerun_variables - SENTENCES.keys()
    ):
        raise ValueError(
            "docs/reference_pages/environment.py: SENTENCES and the code differ in "
            f"{sorted(differences)}"
        )
    lines = [f"| `{name}` | {sentence} |" for name, sentence in SENTENCES.items()]
    other_rows = [
        f"| `{name}` | {', '.join(f'`{module}`' for module in modules)} |"
        for name, modules in sorted(modules_by_variable.items())
        if name not in SENTENCES
    ]
    heading = [
        "",
        "## Others in the code",
        "",
        "`doctor` reads these variables, or forerun sets them for other processes.",
        "",
        "| variable | named in |",
        "|---|---|",
    ]
    return _HEAD + "\n".join([*lines, *heading, *other_rows]) + "\n"
