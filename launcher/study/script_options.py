"""A first plan for a training script of one's own: its options, read from its text, as command,
axes and metrics.

Nothing of the script is run. Options are argparse's, the fields of a dataclass that some library
makes options of (tyro, HfArgumentParser), what a function under `@hydra.main` reads of its config,
or nanoGPT's constants.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.plan.file import TODO
from launcher.study.first_plan import FirstPlan
from proxies.core.errors import InputError
from proxies.core.hyperparameters import HYPERPARAMETERS, USER_TRAINER_HPARAMS, WARMUP
from proxies.core.plain_files import read_plain
from proxies.core.programs import NEEDED


class ScriptError(InputError):
    """A script from which no plan can be written. `problems` lists all of it."""

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
"""Placeholders and other names that scripts have for them; hyperparameters' are in their
registry."""
_SHAPE = {"num_layers": "num_layers", "head_dim": "head_dim", "seq_len": "seq_len"}
_VOCAB_SIZE = 50304
"""GPT-2's, padded: a guess, until the plan's TODO is resolved."""
_RATE = re.compile(r"(^|_)(lr|learning_rate)($|_)")
_NO_RATE = re.compile(
    r"(^|_)(ratio|fraction|frac|factor|decay|gamma|power|mult|multiplier|scale|percent|pct|warmup|warmdown)($|_)"
)
"""Words of options that set a learning rate's schedule or its multiples: a share of the rate, which
follows it."""
_FLOOR = re.compile(
    r"(^|_)(min|end|final|init|initial|start)_(lr|learning_rate)$|(lr|learning_rate)_(min|end|final)$"
)
"""Rates at which a schedule begins or ends: a fixed one does not follow the rate that is
searched."""
_EACH_RUN = re.compile(
    r"(^|_)decay_(iters|steps)$|^(eval|val|validate)_(interval|every|steps|freq)$"
)
"""Options that are set to the run's number of steps, so that it decays to the end and validates
there."""
_ACCUMULATION = re.compile(
    r"(^|_)(grad|gradient)_accum|^accum(ulation)?_steps$|^accumulate_grad_batches$"
)
_DASHBOARD = re.compile(r"^(use_|log_)?wandb(_log|_enabled)?$")
_STATE_KEYS = {"model", "optimizer", "state_dict", "model_state_dict", "model_args"}
"""Keys of a checkpoint; a dictionary that has one of them is saved, not logged."""
_STEP_KEYS = ("step", "iter", "iteration", "global_step", "iter_num")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptOption:
    """One option of a script."""

    name: str
    """With underscores; Hydra's with dots."""
    word: str
    """As it is given: `--max-iters`, or `train.lr=` in Hydra."""
    default: object
    is_rate: bool = False
    """Whether the default is a float and the name is that of a learning rate."""


def placeholder_of(name: str) -> str | None:
    """The placeholder that an option is for, if its name says so."""
    last = name.rpartition(".")[2].lower()
    for one in map(HYPERPARAMETERS.__getitem__, (WARMUP, *USER_TRAINER_HPARAMS)):
        if last in (one.told_as, *one.aliases) or (
            last == one.name and not last.endswith("_fraction")
        ):
            return one.told_as
    return next((ours for ours, theirs in _NAMES.items() if last == ours or last in theirs), None)


def options_of(text: str) -> list[ScriptOption]:
    """Every option found in a script, in its order, the first of a name.

    Raises:
        SyntaxError, ValueError: it is no Python.
    """
    tree = ast.parse(text)
    hydra = any(isinstance(node, ast.FunctionDef) and _under_hydra(node) for node in ast.walk(tree))
    read = _hydra if hydra else _globals if "configurator.py" in text else _dataclasses
    found = [*_argparse(tree)] or [*read(tree)]
    return list({option.name: option for option in reversed(found)}.values())[::-1]


def _argparse(tree: ast.Module) -> Iterator[ScriptOption]:
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
            given = {word.arg: word.value for word in node.keywords}
            if isinstance(given.get("action"), ast.Constant):
                continue  # a switch takes no value
            name = flags[0][2:].replace("-", "_")
            default, kind = _constant(given.get("default")), given.get("type")
            is_float = isinstance(default, float) or (
                isinstance(kind, ast.Name) and kind.id == "float"
            )
            yield ScriptOption(
                name=name,
                word=f"{flags[0]} ",
                default=default,
                is_rate=is_float and _names_rate(name),
            )


def _dataclasses(tree: ast.Module) -> Iterator[ScriptOption]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(
            "dataclass" in ast.unparse(one) for one in node.decorator_list
        ):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    name = field.target.id
                    default = _constant(field.value)
                    is_float = (
                        isinstance(default, float) or ast.unparse(field.annotation) == "float"
                    )
                    is_rate = is_float and _names_rate(name)
                    yield ScriptOption(
                        name=name, word=f"--{name} ", default=default, is_rate=is_rate
                    )


def _globals(tree: ast.Module) -> Iterator[ScriptOption]:
    """NanoGPT's configurator makes an option of every constant of the module."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, _constant(node.value)
            if isinstance(value, (int, float, str)):
                is_rate = isinstance(value, float) and _names_rate(name)
                yield ScriptOption(name=name, word=f"--{name}=", default=value, is_rate=is_rate)


def _hydra(tree: ast.Module) -> Iterator[ScriptOption]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and _under_hydra(node) and node.args.args:
            config = node.args.args[0].arg
            for read in ast.walk(node):
                name = ast.unparse(read) if isinstance(read, ast.Attribute) else ""
                if name.startswith(f"{config}."):
                    name = name.removeprefix(f"{config}.")
                    yield ScriptOption(name=name, word=f"{name}=", default=None)


def _under_hydra(node: ast.FunctionDef) -> bool:
    return any("hydra.main" in ast.unparse(one) for one in node.decorator_list)


def _names_rate(name: str) -> bool:
    """Return whether a name is that of a peak learning rate."""
    return _RATE.search(name) is not None and not _FLOOR.search(name) and not _NO_RATE.search(name)


def _constant(node: ast.expr | None) -> object:
    """Return the value of a literal, or of a product of numbers such as `5 * 8`; None for anything
    else.
    """
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _constant(node.left), _constant(node.right)
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
    """A first plan that runs the script, and what is to be looked at.

    Raises:
        ScriptError: it is no readable Python, or options that a trainer must have are not found;
            all at once.
    """
    try:
        text = read_plain(script).decode()
        options = options_of(text)
    except (OSError, SyntaxError, ValueError) as error:
        raise ScriptError(script, [f"it cannot be read as Python: {error}"]) from error
    told = {option.name: placeholder_of(option.name) for option in options}
    reached = {place for place in told.values() if place}
    if missing := [
        f"no option for {{{name}}} is found: {why}"
        for name, why in NEEDED.items()
        if name not in reached
    ]:
        names = ", ".join(option.name for option in options) or "none"
        raise ScriptError(
            script, [*missing, f"options found: {names}; or write proxy.command by hand"]
        )
    others = [option for option in options if told[option.name] is None]
    rates = [option for option in others if option.is_rate]
    words = [f"{option.word}{{{told[option.name]}}}" for option in options if told[option.name]]
    words += [f"{option.word}{{{_axis(option)}}}" for option in rates]
    notes = ["read the command, the metrics and [model] before you run it"]
    metrics, said = _metrics(text)
    set_words = [
        (option.name, option.word + value)
        for option in others
        if (value := _set_value(option, metrics))
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
    notes += said
    for option in rates:
        notes.append(f"{option.name} is searched as an axis of its own")
    values = {section: dict(keys) for section, keys in new.values.items()}
    defaults = {
        told[option.name]: option.default for option in options if type(option.default) is int
    }
    external, guess = f"the data of {script.name}", f"data.vocab_size = {_VOCAB_SIZE} is a guess"
    if "vocab_size" not in defaults:
        external += f" ({TODO}: {guess})"
        notes.append(f"{guess}: set it, and remove the {TODO} from data.external")
    vocab_size = defaults.get("vocab_size", _VOCAB_SIZE)
    values["data"] = {"path": "", "external": external, "vocab_size": vocab_size}
    command = " ".join(["python", shlex.quote(script.name), *words])
    values["proxy"] = values.get("proxy", {}) | {"command": command, **metrics}
    values["model"] = values.get("model", {}) | {
        key: defaults[name] for name, key in _SHAPE.items() if name in defaults
    }
    if rates:
        axes = {_axis(option): {"range": _range(option.default)} for option in rates}
        values["search"] = values.get("search", {}) | {"axes": axes}
    if "parametrization" not in reached:
        values["transfer"] = values.get("transfer", {}) | {"control_widths": ()}
    return FirstPlan(
        name=new.name, values=values, head=(*new.head, f"The command is read from {script.name}.")
    ), notes


def _set_value(option: ScriptOption, metrics: dict[str, object]) -> str:
    """Return what the command gives an option so that each run is the plan's; empty to leave the
    option alone.
    """
    name = option.name.rpartition(".")[2]
    if _EACH_RUN.search(name):
        return "{num_steps}"
    if _FLOOR.search(name):
        return "0.0"  # right at any rate, as a share of it would be
    if _ACCUMULATION.search(name):
        return "1"  # the plan's batch is a whole step's
    if _DASHBOARD.search(name) and option.default is False and metrics["metrics_format"] == "wandb":
        return "True"
    return TODO if _names_rate(name) and option.default is None else ""


def _axis(option: ScriptOption) -> str:
    return option.name.replace(".", "_")


def _range(default: object) -> tuple[float, float]:
    """A decade either way of a rate's default."""
    middle = (
        float(default)
        if isinstance(default, (int, float)) and 0 < default < sys.float_info.max
        else 1e-2
    )
    return middle / 10, middle * 10


def _metrics(text: str) -> tuple[dict[str, object], list[str]]:
    """Return the script's log, and the keys of its step and losses; keys that are not certain are
    `TODO`.
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
    """Return the keys of dictionaries except checkpoints, of items that are assigned, and of
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
