"""A parametrization as JSON and text: laws by kind of parameter, numbers at a shape, sources."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any

from forerun._launcher.main_run.terminal_layout import format_table
from forerun._launcher.report.views.wording import to_words
from forerun._launcher.study.plan import sources
from forerun._proxies.core.checks import SpecError
from forerun._proxies.core.hyperparameters import Hparams, get_hyperparameter
from forerun._proxies.core.muon import SHAPE_RULES
from forerun._proxies.core.notation import format_counted
from forerun._proxies.core.numbers import KINDS, Kind
from forerun._proxies.core.optimizers import OPTIMIZERS, find_recipe
from forerun._proxies.core.powers import Powers, Ratios
from forerun._proxies.core.rules import (
    Parametrization,
    depends_on_shape,
    find_run_problems,
    get_scaling,
    has_decay,
    make_forward_rule,
    make_kind_rule,
)
from forerun._proxies.core.shape import Shape

if TYPE_CHECKING:
    from forerun._launcher.main_run.frozen.frozen import ParameterGroup
    from forerun._proxies.core.canon import Json
    from forerun._proxies.core.numbers import ParameterNumbers
    from forerun._proxies.parametrization.parametrization import Parameter

# The names of a parameter's numbers; `_HEAD` and `_COLUMNS` are in one order.
_RULED_NUMBERS = ("init_std", "learning_rate", "weight_decay", "eps")
_DECAY_SHARE = "weight_decay_share"
_HEAD = ("init std", "learning rate", "weight decay", "lr*wd", "eps")
_COLUMNS = ("init_std", "learning_rate", "weight_decay", _DECAY_SHARE, "eps")
_NOTE = "lr*wd is the share of a weight that decay removes in one step at the peak of the schedule"


def describe_laws(rules: Parametrization) -> tuple[dict[str, Json], str]:
    """Return the laws of every kind of parameter, and the choices behind them, as JSON and text."""
    by_kind = {kind: _describe_kind_laws(rules, kind) for kind in KINDS}
    rows = [(kind, *(by_kind[kind][column] for column in _COLUMNS)) for kind in KINDS]
    ratios = (
        "m_N, m_L, m_B, m_D: width (fan-in of a matrix), depth, batch and tokens, relative to "
        "the base run"
    )
    table = format_table(("", *_HEAD), rows)
    parts = [
        str(rules),
        "\n".join([table, *_describe_token_powers(rules), ratios, _NOTE]),
        format_table(("forward multipliers", "law"), list(describe_forward_laws(rules).items())),
        _format_choices(rules),
    ]
    body = _describe_choices(rules) | {"laws": {kind: {**row} for kind, row in by_kind.items()}}
    return body, "\n\n".join(parts)


def describe_numbers(
    rules: Parametrization,
    shape: Shape,
    base: Shape,
    hparams: Hparams,
    batch_ratio: float,
    duration_ratio: float,
) -> tuple[dict[str, Json], str]:
    """Return the numbers and laws of every group of parameters at a shape, as JSON and text.

    Args:
        rules: The parametrization.
        shape: Shape of the model.
        base: Shape at which `hparams` were tuned.
        hparams: Hyperparameters at the base.
        batch_ratio: Batch divided by the base run's.
        duration_ratio: Tokens divided by the base run's.

    Raises:
        SpecError: The shapes cannot be compared, or the parametrization cannot be used for the run.
    """
    from forerun._proxies.parametrization import parametrization

    ratios = Ratios(
        width=shape.width / base.width,
        depth=shape.num_layers / base.num_layers,
        batch=batch_ratio,
        duration=duration_ratio,
    )
    if problems := find_run_problems(rules, ratios, hparams, tied=shape.tied):
        raise SpecError("explain", problems)
    parameters = parametrization.list_parameters(rules, shape, base)
    recipe = find_recipe(rates_by_shape=rules.rates_by_shape)
    rows = parametrization.compute_table(rules, recipe, parameters, ratios, hparams)
    forward = dataclasses.asdict(
        parametrization.compute_forward_of_shape(rules, shape, base, ratios, hparams)
    )
    groups = _describe_groups(rules, parameters, rows)
    # The first row is the embedding, and every recipe updates embeddings with AdamW.
    beta1, beta2 = (rows[0].settings[name] for name in ("beta1", "beta2"))
    notes = f"betas {beta1:.6g}, {beta2:.6g}; {_NOTE}"
    table_rows = [row for group in groups for row in _format_group(group)]
    table = format_table(("", "m_N", *_HEAD), table_rows)
    multipliers = [
        (name, f"{forward[name]:.6g}", law) for name, law in describe_forward_laws(rules).items()
    ]
    parts = [
        _format_heading(rules, shape, base, ratios),
        "\n".join([table, *_describe_token_powers(rules), notes]),
        format_table(("forward multipliers", "", "law"), multipliers),
        _format_choices(rules),
    ]
    body: dict[str, Json] = _describe_choices(rules) | {
        "ratios": dataclasses.asdict(ratios),
        "groups": list(groups),
        "betas": [beta1, beta2],
        "forward": forward,
    }
    return body, "\n\n".join(parts)


def _describe_groups(
    rules: Parametrization, parameters: tuple[Parameter, ...], rows: tuple[ParameterNumbers, ...]
) -> list[dict[str, Json]]:
    """Describe the groups of parameters that share their numbers, as the frozen config has them."""
    from forerun._launcher.main_run.frozen.frozen import assign_groups, build_groups

    group_by_name = assign_groups(build_groups(rows), [row.name for row in rows])
    members: dict[str, list[tuple[Parameter, ParameterNumbers]]] = {}
    for parameter, row in zip(parameters, rows, strict=True):
        members.setdefault(group_by_name[row.name].pattern, []).append((parameter, row))
    groups: list[dict[str, Json]] = []
    for pattern, group in members.items():
        parameter, row = group[0]
        laws_of_group = _describe_kind_laws(rules, row.kind)
        if parameter.base_std:
            law = "" if laws_of_group["init_std"] == "1" else f" {laws_of_group['init_std']}"
            laws_of_group["init_std"] = f"{parameter.base_std:.4g}{law}"
            # Without a width rule a matrix starts from its own fan-in, which is not a power of a
            # ratio.
            if rules.width == "none" and parameter.base_std == 1 / math.sqrt(row.size[-1]):
                laws_of_group["init_std"] = "1/sqrt(fan_in)"
        groups.append(
            {
                "parameters": _abbreviate_names([member.name for member, _ in group]),
                "pattern": pattern,
                "kind": row.kind,
                "width_multiplier": row.width_multiplier,
                "init_std": row.init_std,
                **{name: row.settings.get(name) for name in _RULED_NUMBERS[1:]},
                _DECAY_SHARE: row.decay_share,
                "laws": {**laws_of_group},
            }
        )
    return groups


def _format_group(group: dict[str, Json]) -> list[tuple[str, ...]]:
    """Format a group as two rows: the numbers, and below them the laws."""
    group_laws = group["laws"]
    assert isinstance(group_laws, dict)
    cells = (group[column] for column in ("width_multiplier", *_COLUMNS))
    values = ("none" if cell is None else f"{cell:.4g}" for cell in cells)
    return [
        (str(group["parameters"]), *values),
        (f"  {group['kind']}", "", *(str(group_laws[column]) for column in _COLUMNS)),
    ]


def _format_heading(rules: Parametrization, shape: Shape, base: Shape, ratios: Ratios) -> str:
    shape_text, base_text = (
        f"width {model_shape.width}, {format_counted(model_shape.num_layers, 'layer')}"
        for model_shape in (shape, base)
    )
    tokens = f", m_B = {ratios.batch:g}, m_D = {ratios.duration:g}" if rules.needs_tokens else ""
    return (
        f"{rules} at {shape_text}, relative to the base of {base_text}: "
        f"m_N = {ratios.width:g}, m_L = {ratios.depth:g}{tokens}"
    )


def _abbreviate_names(names: list[str]) -> str:
    """Abbreviate the names of a group: `layers.*.attention.wq wk wv wo, feed_forward.w1 w3`."""
    endings_by_prefix: dict[str, dict[str, None]] = {}
    for name in names:
        folded = re.sub(r"\.\d+\.", ".*.", name).removesuffix(".weight")
        match = re.match(r"layers\.\*\.((attention|feed_forward)\.)?", folded)
        prefix = match.group() if match else ""
        endings_by_prefix.setdefault(prefix, {})[folded.removeprefix(prefix)] = None
    parts = [prefix + " ".join(endings) for prefix, endings in endings_by_prefix.items()]
    return ", ".join([parts[0], *(part.removeprefix("layers.*.") for part in parts[1:])])


def _describe_kind_laws(rules: Parametrization, kind: Kind) -> dict[str, str]:
    """Return the laws of one kind as powers of width and depth.

    Powers of batch and tokens are the same for all kinds (`_describe_token_powers`).
    """
    rule = make_kind_rule(rules, kind)
    independent = rules.weight_decay == "independent"
    share = rule.weight_decay if independent else rule.learning_rate.multiply(rule.weight_decay)
    laws_by_number = {name: _format_size_powers(getattr(rule, name)) for name in _RULED_NUMBERS} | {
        _DECAY_SHARE: _format_size_powers(share)
    }
    if rules.rates_by_shape and kind == "hidden":
        by_shape = SHAPE_RULES[rules.muon_rate].law
        by_shape += f" m_N^{rules.muon_width_power:g}" if rules.muon_width_power else ""
        depth = _format_size_powers(dataclasses.replace(rule.learning_rate, width=0.0))
        laws_by_number["learning_rate"] = by_shape if depth == "1" else f"{by_shape} {depth}"
        laws_by_number |= {} if independent else {"weight_decay": f"1 / ({by_shape})"}
    settings = find_recipe(rates_by_shape=rules.rates_by_shape).get_optimizer(kind).settings
    laws_by_number |= {name: "none" for name in _RULED_NUMBERS[1:] if name not in settings}
    if kind.endswith(("gain", "bias")):
        laws_by_number["init_std"] = "ones" if kind.endswith("gain") else "zeros"
    elif rules.width == "none" and kind != "embedding":
        laws_by_number["init_std"] = "1/sqrt(fan_in)"
    if not has_decay(rules, kind):
        laws_by_number |= {"weight_decay": "none", _DECAY_SHARE: "none"}
    elif independent:
        laws_by_number["weight_decay"] = "share / lr"
    return laws_by_number


def _format_size_powers(powers: Powers) -> str:
    """Format the powers of width and depth, without those of batch and tokens."""
    return str(dataclasses.replace(powers, batch=0.0, duration=0.0))


def _describe_token_powers(rules: Parametrization) -> list[str]:
    """Return a line on the factors of batch and tokens in every row; no line if there are none."""
    rule = make_kind_rule(rules, "embedding")  # AdamW updates embeddings under every optimizer.
    powers = {
        name: str(dataclasses.replace(getattr(rule, name), width=0.0, depth=0.0))
        for name in _RULED_NUMBERS
    }
    if rules.weight_decay == "independent":
        powers["lr*wd"] = powers.pop("weight_decay")
    factors = [
        f"{name.replace('_', ' ')} times {power}" for name, power in powers.items() if power != "1"
    ]
    if rules.moments == "scaled":
        factors.append("1 - beta times m_B m_D^-1")
    return ["batch and tokens also scale every row: " + "; ".join(factors)] if factors else []


def describe_forward_laws(rules: Parametrization) -> dict[str, str]:
    """Return the law of each forward multiplier."""
    rule = make_forward_rule(rules)
    inverse = rules.attention == "inverse_head_dim"
    return {
        "embedding": "1",
        "attention": "sqrt(base head_dim) / head_dim" if inverse else "1 / sqrt(head_dim)",
        "residual": str(rule["residual"]),
        "output": str(rule["output"]),
    }


def describe_group_law(rules: Parametrization, group: ParameterGroup, name: str) -> str:
    """Describe the law that gives a number of a parameter group from the number at the base."""
    rates_by_shape = OPTIMIZERS[group.optimizer].rates_by_shape
    rule = make_kind_rule(rules, group.kind, by_shape=rates_by_shape)
    power = getattr(rule, name) if hasattr(rule, name) else get_scaling(rules, name, group.kind)
    text = f"For {to_words(group.kind)} parameters: "
    text += (
        "1 - value" if get_hyperparameter(name).scale == "log2_complement" else "the base's value"
    )
    if str(power) != "1":
        text += f" times {power}"
    if rates_by_shape and name in group.settings and depends_on_shape(name):
        source = sources.describe_answer("muon_rate", rules.muon_rate)
        text += f", by the matrix's own shape ({source})"
    return text


def _describe_choices(rules: Parametrization) -> dict[str, Json]:
    """Return every choice behind a parametrization, with its source and its alternatives."""
    choices: dict[str, Json] = {}
    for choice, answers in sources.CHOICES.items():
        value = getattr(rules, choice)
        choices[choice] = {
            "value": value,
            "source": sources.describe_answer(choice, value),
            "others": {answer: text for answer, text in answers.items() if answer != str(value)},
        }
    return {
        "parametrization": str(rules),
        "choices": choices,
        "forward_laws": {**describe_forward_laws(rules)},
    }


def _format_choices(rules: Parametrization) -> str:
    """Format every choice with its source, and its alternatives below it."""
    lines = ["choices with their sources, and the alternatives (--set CHOICE=VALUE):"]
    choices: Any = _describe_choices(rules)["choices"]
    for name, choice in choices.items():
        mark = " (changed)" if name in rules.changed else ""
        lines.append(f"  {name} = {choice['value']}{mark}: {choice['source']}")
        lines += [f"      {answer}: {text}" for answer, text in choice["others"].items()]
    return "\n".join([*lines, sources.SECOND_HAND])
