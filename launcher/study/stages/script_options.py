"""A first plan for a user's own training script, whose options become the plan's command.

The script is read, never run. An option that could change what a run means and that forerun does
not know becomes a `TODO`, which `forerun validate` refuses until the user has decided.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from forerun._launcher.study.plan.file import TODO
from forerun._launcher.study.stages.first_plan import FirstPlan
from forerun._proxies.core.errors import ProblemsError
from forerun._proxies.core.hyperparameters import HYPERPARAMETERS, USER_TRAINER_HPARAMS, WARMUP
from forerun._proxies.core.plain_files import read_plain
from forerun._proxies.core.programs import REQUIRED_PLACEHOLDERS


class ScriptError(ProblemsError):
    """No plan can be written from the script."""


_NAMES = {
    "width": "d_model n_embd hidden_size embed_dim hidden_dim dim model_dim",
    "num_steps": "steps max_steps max_iters num_iters train_steps total_steps num_train_steps",
    "seed": "random_seed",
    "base_width": "mup_base_width base_n_embd base_dim",
    "num_layers": "n_layer n_layers layers depth num_hidden_layers",
    "num_heads": "n_head n_heads heads num_attention_heads",
    "head_dim": "head_size",
    "seq_len": "block_size context_length max_seq_len sequence_length seq_length",
    "batch_sequences": "batch_size",
    "vocab_size": "",
    "parametrization": "",
    "run_dir": "out out_dir output_dir save_dir log_dir run_folder",
}
"""Placeholders, and the other names that scripts use for them. The names of hyperparameters are in
their registry.
"""
_UNDECIDED = re.compile(
    r"(^|_)(lr|learning_rate)($|_)|decay_(iters|steps)$|accum"
    r"|^(eval|val|validate)_(interval|every|steps|freq)$"
)
"""Names of other rates, of schedules, and of numbers of steps. Each run needs its own value of
these, so the user must decide.
"""
_LOGS = {"wandb": "wandb.init", "tensorboard": "SummaryWriter"}
"""Text in a script that shows its format of metrics, by format."""
_VOCAB_SIZE = 50304
"""Vocabulary of GPT-2, padded: a guess until the plan's TODO is resolved."""


def find_placeholder(name: str) -> str:
    """Return the placeholder that an option's name stands for; empty if the name is unknown."""
    last = name.rpartition(".")[2].lower()
    for hyperparameter in map(HYPERPARAMETERS.__getitem__, (WARMUP, *USER_TRAINER_HPARAMS)):
        is_own_name = last == hyperparameter.name and not last.endswith("_fraction")
        if is_own_name or last in (hyperparameter.placeholder_name, *hyperparameter.aliases):
            return hyperparameter.placeholder_name
    return next((key for key, names in _NAMES.items() if last in (key, *names.split())), "")


def read_options(text: str) -> dict[str, tuple[str, object]]:
    """Return the options of a script by name: each with its spelling on the command line and its
    default.

    Options are those of argparse, what a function under `@hydra.main` reads from its config,
    nanoGPT's constants, or the fields of a dataclass (tyro, HfArgumentParser).

    Raises:
        SyntaxError, ValueError: The text is not Python.
    """
    tree = ast.parse(text)
    if "add_argument(" in text:
        options = _read_argparse(tree)
    elif "hydra.main" in text:
        names = re.findall(r"\b(?:cfg|config)\.([\w.]+)", text)
        options = ((name, f"{name}=", None) for name in names)
    elif "configurator.py" in text:
        options = _read_assignments(tree, "--{}=")
    else:
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        options = (
            option
            for node in classes
            if "dataclass" in " ".join(map(ast.unparse, node.decorator_list))
            for option in _read_assignments(node, "--{} ")
        )
    by_name: dict[str, tuple[str, object]] = {}
    for name, spelling, default in options:
        by_name.setdefault(name, (spelling, default))
    return by_name


def _read_argparse(tree: ast.Module) -> Iterator[tuple[str, str, object]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".add_argument"):
            flags = [flag for flag in map(_evaluate, node.args) if str(flag).startswith("--")]
            keywords = {word.arg: word.value for word in node.keywords}
            if flags and "action" not in keywords:  # a switch takes no value
                name = str(flags[0])[2:].replace("-", "_")
                yield name, f"{flags[0]} ", _evaluate(keywords.get("default"))


def _read_assignments(
    node: ast.Module | ast.ClassDef, spelling: str
) -> Iterator[tuple[str, str, object]]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign):
            name, value = ast.unparse(statement.target), statement.value
        elif isinstance(statement, ast.Assign):
            name, value = ast.unparse(statement.targets[0]), statement.value
        else:
            continue
        yield name, spelling.format(name), _evaluate(value)


def _evaluate(node: ast.expr | None) -> object:
    """Return the value of a literal; None for anything else."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def use_script(new: FirstPlan, script: Path) -> list[str]:
    """Make a first plan run the script. Return notes on what the user must check.

    Raises:
        ScriptError: The script is not readable Python, or lacks options that a trainer must have;
            all problems at once.
    """
    try:
        text = read_plain(script).decode()
        options = read_options(text)
    except (OSError, SyntaxError, ValueError) as error:
        raise ScriptError(script, [f"it cannot be read as Python: {error}"]) from error
    placeholders = {name: word for name in options if (word := find_placeholder(name))}
    reached = {*placeholders.values()}
    if missing := [
        f"no option for {{{name}}} is found: {reason}"
        for name, reason in REQUIRED_PLACEHOLDERS.items()
        if name not in reached
    ]:
        names = f"options found: {', '.join(options) or 'none'}"
        raise ScriptError(script, [*missing, f"{names}; or write proxy.command by hand"])

    undecided = [
        name
        for name, (_, default) in options.items()
        if _UNDECIDED.search(name.rpartition(".")[2])
        and name not in placeholders
        and not isinstance(default, bool | str)
    ]
    words = [f"{options[name][0]}{{{word}}}" for name, word in placeholders.items()]
    words += [options[name][0] + TODO for name in undecided]
    command = " ".join(["python", shlex.quote(script.name), *words])
    defaults = {word: options[name][1] for name, word in placeholders.items()}
    for section, values in _build_sections(script.name, text, command, defaults).items():
        new.set(section, **values)
    new.head = (*new.head, f"The command is read from {script.name}.")
    notes = [f"replace every {TODO} of the plan, and read its command and [model]"]
    if undecided:
        notes.append(
            f"in the command, give {', '.join(undecided)} a value: 0 for the floor of a schedule, "
            "{num_steps} for its length, or the name of an axis in search.axes for a rate"
        )
    if "batch_sequences" not in reached:
        notes.append(
            "no option sets the batch: proxy.batch_tokens must be the tokens of one optimizer step"
        )
    if "run_dir" not in reached:
        notes.append(
            "no option names a folder: the script must write its metrics below $FORERUN_RUN_DIR"
        )
    return notes


def _build_sections(
    name: str, text: str, command: str, defaults: dict[str, object]
) -> dict[str, dict[str, object]]:
    """Return the sections of the plan that follow from a script.

    Args:
        name: File name of the script.
        text: Its text.
        command: Command line with placeholders.
        defaults: Defaults of its options, by placeholder.
    """
    external, vocab_size = f"the data of {name}", defaults.get("vocab_size")
    if vocab_size is None:
        vocab_size = _VOCAB_SIZE
        external += f" ({TODO}: data.vocab_size = {vocab_size} is a guess)"
    log = next((log for log, sign in _LOGS.items() if sign in text), "jsonl")
    shape = ("num_layers", "head_dim", "seq_len")
    return {
        "data": {"path": "", "external": external, "vocab_size": vocab_size},
        "proxy": {
            "command": command,
            "metrics_format": log,
            "metrics_path": "{run_dir}/metrics.jsonl" if log == "jsonl" else "{run_dir}",
            "metrics_train_loss_key": f"{TODO}: the name of its training loss",
            "metrics_validation_loss_key": f"{TODO}: the name of its validation loss",
        },
        "model": {key: defaults[key] for key in shape if type(defaults.get(key)) is int},
        # Without a word for the parametrization there is no standard one to compare with.
        "transfer": {} if "parametrization" in defaults else {"control_widths": ()},
    }
