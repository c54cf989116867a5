"""A first plan for a user's own training script. Its options are read from its text, and become the
plan's command, axes, and metrics.

The script is not run. Options are those of argparse, the fields of a dataclass (which tyro or
HfArgumentParser turn into options), the values that a function under `@hydra.main` reads from its
config, or nanoGPT's constants.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.plan.file import TODO
from launcher.study.first_plan import FirstPlan
from proxies.core.errors import InputError
from proxies.core.hyperparameters import HYPERPARAMETERS, USER_TRAINER_HPARAMS, WARMUP
from proxies.core.plain_files import read_plain
from proxies.core.programs import NEEDED


class ScriptError(InputError):
    """No plan can be written from the script. `problems` lists all reasons."""

    def __init__(self, script: Path, problems: list[str]) -> None:
        self.problems = problems
        super().__init__(f"{script}: " + "; ".join(problems))


_NAMES = {
    "width": ("d_model", "n_embd", "hidden_size", "embed_dim", "hidden_dim", "dim", "model_dim"),
    "num_steps": (
        "steps",
        "max_steps",
        "max_iters",
        "num_iters",
        "train_steps",
        "total_steps",
        "num_train_steps",
    ),
    "seed": ("random_seed",),
    "base_width": ("mup_base_width", "base_n_embd", "base_dim"),
    "num_layers": ("n_layer", "n_layers", "layers", "depth", "num_hidden_layers"),
    "num_heads": ("n_head", "n_heads", "heads", "num_attention_heads"),
    "head_dim": ("head_size",),
    "seq_len": ("block_size", "context_length", "max_seq_len", "sequence_length", "seq_length"),
    "batch_sequences": ("batch_size",),
    "vocab_size": (),
    "parametrization": (),
    "run_dir": ("out", "out_dir", "output_dir", "save_dir", "log_dir", "run_folder"),
}
"""Placeholders, and the other names that scripts use for them. The names of hyperparameters are in
their registry.
"""
_SHAPE = {"num_layers": "num_layers", "head_dim": "head_dim", "seq_len": "seq_len"}
_VOCAB_SIZE = 50304
"""Vocabulary of GPT-2, padded: a guess until the plan's TODO is resolved."""
_RATE = re.compile(r"(^|_)(lr|learning_rate)($|_)")
_NO_RATE = re.compile(
    r"(^|_)(ratio|fraction|frac|factor|decay|gamma|power|mult|multiplier|scale|percent|pct|warmup|warmdown)($|_)"
)
"""Words in the names of options that set a schedule or a multiple of the learning rate: a share of
the rate follows it.
"""
_FLOOR = re.compile(
    r"(^|_)(min|end|final|init|initial|start)_(lr|learning_rate)$|(lr|learning_rate)_(min|end|final)$"
)
"""Names of rates at which a schedule begins or ends; a fixed one does not follow the rate that is
searched.
"""
_EACH_RUN = re.compile(
    r"(^|_)decay_(iters|steps)$|^(eval|val|validate)_(interval|every|steps|freq)$"
)
"""Names of options that are set to the run's number of steps, so that it decays to the end and
validates there.
"""
_ACCUMULATION = re.compile(
    r"(^|_)(grad|gradient)_accum|^accum(ulation)?_steps$|^accumulate_grad_batches$"
)
_DASHBOARD = re.compile(r"^(use_|log_)?wandb(_log|_enabled)?$")
_STATE_KEYS = {"model", "optimizer", "state_dict", "model_state_dict", "model_args"}
"""Keys of a checkpoint. A dictionary that has one of them is saved, not logged."""
_STEP_KEYS = ("step", "iter", "iteration", "global_step", "iter_num")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptOption:
    """One option of a script."""

    name: str
    """Name with underscores; with dots in Hydra."""
    word: str
    """Spelling on the command line: `--max-iters`, or `train.lr=` in Hydra."""
    default: object
    is_rate: bool = False
    """Whether the default is a float and the name is that of a learning rate."""


def placeholder_of(name: str) -> str | None:
    """Return the placeholder that an option's name stands for; None if its name does not tell."""
    last = name.rpartition(".")[2].lower()
    for hyperparameter in map(HYPERPARAMETERS.__getitem__, (WARMUP, *USER_TRAINER_HPARAMS)):
        if last in (hyperparameter.told_as, *hyperparameter.aliases) or (
            last == hyperparameter.name and not last.endswith("_fraction")
        ):
            return hyperparameter.told_as
    return next(
        (
            placeholder
            for placeholder, names in _NAMES.items()
            if last == placeholder or last in names
        ),
        None,
    )


def options_of(text: str) -> list[ScriptOption]:
    """Return every option of a script, in order; of options with the same name, the first.

    Raises:
        SyntaxError, ValueError: The text is not Python.
    """
    tree = ast.parse(text)
    hydra = any(
        isinstance(node, ast.FunctionDef) and _is_hydra_main(node) for node in ast.walk(tree)
    )
    read_options = (
        _read_hydra
        if hydra
        else _read_constants
        if "configurator.py" in text
        else _read_dataclasses
    )
    options = [*_read_argparse(tree)] or [*read_options(tree)]
    return list({option.name: option for option in reversed(options)}.values())[::-1]


def _read_argparse(tree: ast.Module) -> Iterator[ScriptOption]:
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_argument"
        ):
            continue
        flags = [
            str(a.value)
            for a in node.args
            if isinstance(a, ast.Constant) and str(a.value).startswith("--")
        ]
        if flags:
            keywords = {word.arg: word.value for word in node.keywords}
            if isinstance(keywords.get("action"), ast.Constant):
                continue  # a switch takes no value
            name = flags[0][2:].replace("-", "_")
            default, type_node = _evaluate_constant(keywords.get("default")), keywords.get("type")
            is_float = isinstance(default, float) or (
                isinstance(type_node, ast.Name) and type_node.id == "float"
            )
            yield ScriptOption(
                name=name,
                word=f"{flags[0]} ",
                default=default,
                is_rate=is_float and _is_rate_name(name),
            )


def _read_dataclasses(tree: ast.Module) -> Iterator[ScriptOption]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(
            "dataclass" in ast.unparse(decorator) for decorator in node.decorator_list
        ):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    name = field.target.id
                    default = _evaluate_constant(field.value)
                    is_float = (
                        isinstance(default, float) or ast.unparse(field.annotation) == "float"
                    )
                    is_rate = is_float and _is_rate_name(name)
                    yield ScriptOption(
                        name=name, word=f"--{name} ", default=default, is_rate=is_rate
                    )


def _read_constants(tree: ast.Module) -> Iterator[ScriptOption]:
    """Yield the constants of the module, from which nanoGPT's configurator makes options."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, _evaluate_constant(node.value)
            if isinstance(value, (int, float, str)):
                is_rate = isinstance(value, float) and _is_rate_name(name)
                yield ScriptOption(name=name, word=f"--{name}=", default=value, is_rate=is_rate)


def _read_hydra(tree: ast.Module) -> Iterator[ScriptOption]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and _is_hydra_main(node) and node.args.args:
            config = node.args.args[0].arg
            for read in ast.walk(node):
                name = ast.unparse(read) if isinstance(read, ast.Attribute) else ""
                if name.startswith(f"{config}."):
                    name = name.removeprefix(f"{config}.")
                    yield ScriptOption(name=name, word=f"{name}=", default=None)


def _is_hydra_main(node: ast.FunctionDef) -> bool:
    return any("hydra.main" in ast.unparse(decorator) for decorator in node.decorator_list)


def _is_rate_name(name: str) -> bool:
    """Return whether a name is that of a peak learning rate."""
    return _RATE.search(name) is not None and not _FLOOR.search(name) and not _NO_RATE.search(name)


def _evaluate_constant(node: ast.expr | None) -> object:
    """Return the value of a literal, or of a product of numbers such as `5 * 8`; None for anything
    else.
    """
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _evaluate_constant(node.left), _evaluate_constant(node.right)
        return (
            left * right
            if isinstance(left, int | float) and isinstance(right, int | float)
            else None
        )
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def plan_for(script: Path, new: FirstPlan) -> tuple[FirstPlan, list[str]]:
    """Return a first plan that runs the script, and notes on what the user must check.

    Raises:
        ScriptError: The script is not readable Python, or lacks options that a trainer must have;
            all problems at once.
    """
    text, options = _read_options(script)
    placeholders = {option.name: placeholder_of(option.name) for option in options}
    reached = {placeholder for placeholder in placeholders.values() if placeholder}
    _require_placeholders(script, options, reached)
    other_options = [option for option in options if placeholders[option.name] is None]
    rates = [option for option in other_options if option.is_rate]
    words = [
        f"{option.word}{{{placeholders[option.name]}}}"
        for option in options
        if placeholders[option.name]
    ]
    words += [f"{option.word}{{{_name_axis(option)}}}" for option in rates]
    notes = ["read the command, the metrics and [model] before you run it"]
    metrics, metric_notes = _find_metrics(text)
    set_words = [
        (option.name, option.word + value)
        for option in other_options
        if (value := _choose_fixed_value(option, metrics))
    ]
    words += [word for _, word in set_words]
    notes += [f"{name} is set by the command: {word}" for name, word in set_words]
    if "batch_sequences" not in reached:
        notes.append(
            "no option sets the batch: proxy.batch_tokens must be the tokens of one optimizer step"
        )
    if not reached & {"run_dir"}:
        notes.append(
            "no option names a folder: the script must write its metrics below $FORERUN_RUN_DIR"
        )
    notes += metric_notes
    for option in rates:
        notes.append(f"{option.name} is searched as an axis of its own")
    values = {section: dict(keys) for section, keys in new.values.items()}
    defaults = {
        placeholders[option.name]: option.default
        for option in options
        if type(option.default) is int
    }
    values["data"], data_notes = _describe_data(script, defaults.get("vocab_size"))
    command = " ".join(["python", shlex.quote(script.name), *words])
    values["proxy"] = values.get("proxy", {}) | {"command": command, **metrics}
    values["model"] = values.get("model", {}) | {
        key: defaults[name] for name, key in _SHAPE.items() if name in defaults
    }
    if rates:
        axes = {_name_axis(option): {"range": _choose_range(option.default)} for option in rates}
        values["search"] = values.get("search", {}) | {"axes": axes}
    if "parametrization" not in reached:
        values["transfer"] = values.get("transfer", {}) | {"control_widths": ()}
    return FirstPlan(
        name=new.name, values=values, head=(*new.head, f"The command is read from {script.name}.")
    ), [*notes, *data_notes]


def _describe_data(script: Path, vocab_size: object) -> tuple[dict[str, object], list[str]]:
    """Return the section `[data]`, and a note if the vocabulary size is a guess.

    Args:
        script: Training script, which brings its own data.
        vocab_size: Default of the script's option; None if it has none.
    """
    external = f"the data of {script.name}"
    if vocab_size is not None:
        return {"path": "", "external": external, "vocab_size": vocab_size}, []
    guess = f"data.vocab_size = {_VOCAB_SIZE} is a guess"
    external += f" ({TODO}: {guess})"
    note = f"{guess}: set it, and remove the {TODO} from data.external"
    return {"path": "", "external": external, "vocab_size": _VOCAB_SIZE}, [note]


def _read_options(script: Path) -> tuple[str, list[ScriptOption]]:
    """Return the text of a script, and its options.

    Raises:
        ScriptError: The script is not readable Python.
    """
    try:
        text = read_plain(script).decode()
        return text, options_of(text)
    except (OSError, SyntaxError, ValueError) as error:
        raise ScriptError(script, [f"it cannot be read as Python: {error}"]) from error


def _require_placeholders(
    script: Path, options: Sequence[ScriptOption], reached: Collection[str]
) -> None:
    """Check that the script has an option for every placeholder that a trainer must have.

    Raises:
        ScriptError: Some are missing; all are named.
    """
    missing = [
        f"no option for {{{name}}} is found: {reason}"
        for name, reason in NEEDED.items()
        if name not in reached
    ]
    if missing:
        names = ", ".join(option.name for option in options) or "none"
        raise ScriptError(
            script, [*missing, f"options found: {names}; or write proxy.command by hand"]
        )


def _choose_fixed_value(option: ScriptOption, metrics: dict[str, object]) -> str:
    """Return the value that the command gives an option so that each run follows the plan; empty to
    leave the option alone.
    """
    name = option.name.rpartition(".")[2]
    if _EACH_RUN.search(name):
        return "{num_steps}"
    if _FLOOR.search(name):
        return "0.0"  # correct at any learning rate
    if _ACCUMULATION.search(name):
        return "1"  # the plan's batch is the batch of a whole step
    if _DASHBOARD.search(name) and option.default is False and metrics["metrics_format"] == "wandb":
        return "True"
    return TODO if _is_rate_name(name) and option.default is None else ""


def _name_axis(option: ScriptOption) -> str:
    return option.name.replace(".", "_")


def _choose_range(default: object) -> tuple[float, float]:
    """Return the range from a tenth to ten times a learning rate's default."""
    middle = (
        float(default)
        if isinstance(default, (int, float)) and 0 < default < sys.float_info.max
        else 1e-2
    )
    return middle / 10, middle * 10


def _find_metrics(text: str) -> tuple[dict[str, object], list[str]]:
    """Return the format of the script's log, and the keys of its step and losses. Keys that are not
    certain are `TODO`.
    """
    kinds = {"wandb": "wandb.init", "tensorboard": "SummaryWriter", "jsonl": "json.dumps"}
    kind = next((kind for kind, sign in kinds.items() if sign in text), "jsonl")
    keys = _find_logged_keys(ast.parse(text))
    losses = [key for key in keys if "loss" in key and "best" not in key]
    held_out = [key for key in losses if re.search(r"val|eval|test|dev", key)]
    trained = [key for key in losses if key not in held_out]
    steps = [key for key in _STEP_KEYS if key in keys] or (["_step"] if kind == "wandb" else [])
    candidates = {"metrics_train_loss_key": trained, "metrics_validation_loss_key": held_out}
    if kind != "tensorboard":
        candidates["metrics_step_key"] = steps[:1]
    values: dict[str, object] = {
        "metrics_format": kind,
        "metrics_path": "{run_dir}/metrics.jsonl" if kind == "jsonl" else "{run_dir}",
        **{
            name: keys[0] if len(keys) == 1 else f"{TODO}: {name}"
            for name, keys in candidates.items()
        },
    }
    notes = [
        f"proxy.{name} is left as {TODO}: the script logs {', '.join(keys) or 'none that is found'}"
        for name, keys in candidates.items()
        if len(keys) != 1
    ]
    return values, notes


def _find_logged_keys(tree: ast.Module) -> list[str]:
    """Return the keys of dictionaries that are not checkpoints, of assigned items, and of
    TensorBoard's scalars.
    """
    keys: list[str] = []
    for node in ast.walk(tree):
        nodes: list[ast.expr | None] = []
        if isinstance(node, ast.Dict):
            nodes = list(node.keys)
        elif isinstance(node, ast.Assign):
            nodes = [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_scalar"
        ):
            nodes = list(node.args[:1])
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "dict"
        ):
            keys += [word.arg for word in node.keywords if word.arg]
        names = [
            key.value
            for key in nodes
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        ]
        keys += [] if _STATE_KEYS & set(names) else names
    return list(dict.fromkeys(keys))
