"""A parametrization as tables: laws per kind of parameter, numbers at a shape, and sources."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING

from launcher.cli.options import table
from launcher.plan import sources
from proxies.core.checks import SpecError
from proxies.core.hyperparameters import Hparams
from proxies.core.muon import SHAPE_RULES
from proxies.core.notation import counted
from proxies.core.numbers import KINDS, Kind
from proxies.core.optimizers import find_recipe
from proxies.core.powers import Powers, Ratios
from proxies.core.rules import Parametrization, decays, forward_rule, kind_rule, refusals
from proxies.core.shape import Shape

if TYPE_CHECKING:
    from proxies.core.canon import Json
    from proxies.core.numbers import ParameterNumbers
    from proxies.parametrization.parametrization import Parameter

_RULED_NUMBERS = ("init_std", "learning_rate", "weight_decay", "eps")
_BETAS = ("beta1", "beta2")
_DECAY_SHARE = "weight_decay_share"
_HEAD = ("init std", "learning rate", "weight decay", "lr*wd", "eps")
_COLUMNS = ("init_std", "learning_rate", "weight_decay", _DECAY_SHARE, "eps")
_NOTE = "lr*wd is the share of a weight that decay removes in one step at the peak of the schedule"


def laws(rules: Parametrization) -> tuple[dict[str, Json], str]:
    """Return the laws of every kind of parameter, and the choices behind them, as JSON and text."""
    by_kind = {kind: _describe_laws(rules, kind) for kind in KINDS}
    rows = [(kind, *(by_kind[kind][column] for column in _COLUMNS)) for kind in KINDS]
    ratios = (
        "m_N, m_L, m_B, m_D: width (fan-in of a matrix), depth, batch and tokens, relative to "
        "the base run"
    )
    parts = [
        str(rules),
        "\n".join([table(("", *_HEAD), rows), *_describe_token_powers(rules), ratios, _NOTE]),
        table(("forward multipliers", "law"), list(forward_laws(rules).items())),
        _format_choices(rules),
    ]
    return {
        **_describe_choices(rules),
        "laws": {kind: dict(row) for kind, row in by_kind.items()},
    }, "\n\n".join(parts)


def numbers(
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
    from proxies.parametrization.parametrization import forward_of, parameters_of, table_of

    ratios = Ratios(
        width=shape.width / base.width,
        depth=shape.num_layers / base.num_layers,
        batch=batch_ratio,
        duration=duration_ratio,
    )
    if problems := refusals(rules, ratios, hparams, tied=shape.tied):
        raise SpecError("explain", problems)
    parameters = parameters_of(rules, shape, base)
    recipe = find_recipe(rates_by_shape=rules.rates_by_shape)
    rows = table_of(rules, recipe, parameters, ratios, hparams)
    forward = forward_of(rules, shape, base, ratios, hparams)
    groups = _describe_groups(rules, parameters, rows)
    # The first row is the embedding, which every recipe steps with AdamW.
    betas = [rows[0].settings[name] for name in _BETAS]
    betas_line = f"betas {betas[0]:.6g}, {betas[1]:.6g}; {_NOTE}"
    lines = [line for group in groups for line in _format_group(group)]
    values = [
        (name, f"{getattr(forward, name):.6g}", law) for name, law in forward_laws(rules).items()
    ]
    parts = [
        _format_heading(rules, shape, base, ratios),
        "\n".join([table(("", "m_N", *_HEAD), lines), *_describe_token_powers(rules), betas_line]),
        table(("forward multipliers", "", "law"), values),
        _format_choices(rules),
    ]
    body: dict[str, Json] = {
        **_describe_choices(rules),
        "ratios": dataclasses.asdict(ratios),
        "groups": list(groups),
        "betas": [*betas],
        "forward": dataclasses.asdict(forward),
    }
    return body, "\n\n".join(parts)


def _describe_groups(
    rules: Parametrization, parameters: tuple[Parameter, ...], rows: tuple[ParameterNumbers, ...]
) -> list[dict[str, Json]]:
    """Describe the groups of parameters that share their numbers, as the frozen config has them."""
    from launcher.frozen.frozen import assign_groups, groups_of

    claimed = assign_groups(groups_of(rows), [row.name for row in rows])
    members: dict[str, list[tuple[Parameter, ParameterNumbers]]] = {}
    for parameter, row in zip(parameters, rows, strict=True):
        members.setdefault(claimed[row.name].pattern, []).append((parameter, row))
    groups: list[dict[str, Json]] = []
    for pattern, group in members.items():
        parameter, row = group[0]
        laws_of_group: dict[str, Json] = {**_describe_laws(rules, row.kind)}
        if parameter.base_std:
            # Without a width rule a matrix starts from its own fan-in, which is not a power of a
            # ratio.
            is_from_fan_in = rules.width == "none" and parameter.base_std == 1 / math.sqrt(
                row.size[-1]
            )
            law = "" if laws_of_group["init_std"] == "1" else f" {laws_of_group['init_std']}"
            laws_of_group["init_std"] = (
                "1/sqrt(fan_in)" if is_from_fan_in else f"{parameter.base_std:.4g}{law}"
            )
        values: dict[str, Json] = {
            "init_std": row.init_std,
            **{name: row.settings.get(name) for name in _RULED_NUMBERS[1:]},
        }
        groups.append(
            {
                "parameters": _abbreviate_names([p.name for p, _ in group]),
                "pattern": pattern,
                "kind": row.kind,
                "width_multiplier": row.width_multiplier,
                **values,
                _DECAY_SHARE: row.decay_share,
                "laws": laws_of_group,
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
        (f"  {group['kind']}", "", *(str(group_laws[c]) for c in _COLUMNS)),
    ]


def _format_heading(rules: Parametrization, shape: Shape, base: Shape, ratios: Ratios) -> str:
    shape_text, base_text = (
        f"width {model_shape.width}, {counted(model_shape.num_layers, 'layer')}"
        for model_shape in (shape, base)
    )
    tokens = f", m_B = {ratios.batch:g}, m_D = {ratios.duration:g}" if rules.needs_tokens else ""
    return (
        f"{rules} at {shape_text}, relative to the base of {base_text}: "
        f"m_N = {ratios.width:g}, m_L = {ratios.depth:g}{tokens}"
    )


def _abbreviate_names(names: list[str]) -> str:
    """Abbreviate the names of a group: `layers.*.attention.wq wk wv wo, feed_forward.w1 w3`."""
    by_place: dict[str, dict[str, None]] = {}
    for name in names:
        folded = re.sub(r"\.\d+\.", ".*.", name).removesuffix(".weight")
        match = re.match(r"layers\.\*\.((attention|feed_forward)\.)?", folded)
        place = match.group() if match else ""
        by_place.setdefault(place, {})[folded.removeprefix(place)] = None
    parts = [place + " ".join(endings) for place, endings in by_place.items()]
    return ", ".join([parts[0], *(part.removeprefix("layers.*.") for part in parts[1:])])


def _describe_laws(rules: Parametrization, kind: Kind) -> dict[str, str]:
    """Return the laws of one kind as powers of width and depth.

    Powers of batch and tokens are the same for all kinds (`_describe_token_powers`).
    """
    rule = kind_rule(rules, kind)
    independent = rules.weight_decay == "independent"
    share = rule.weight_decay if independent else rule.learning_rate.times(rule.weight_decay)
    laws_by_number = {name: _format_size_powers(getattr(rule, name)) for name in _RULED_NUMBERS} | {
        _DECAY_SHARE: _format_size_powers(share)
    }
    if rules.rates_by_shape and kind == "hidden":
        by_shape = SHAPE_RULES[rules.muon_rate].law
        by_shape += f" m_N^{rules.muon_width_power:g}" if rules.muon_width_power else ""
        depth = _format_size_powers(dataclasses.replace(rule.learning_rate, width=0.0))
        laws_by_number["learning_rate"] = by_shape if depth == "1" else f"{by_shape} {depth}"
        laws_by_number |= {} if independent else {"weight_decay": f"1 / ({by_shape})"}
    settings = find_recipe(rates_by_shape=rules.rates_by_shape).optimizer_for(kind).settings
    laws_by_number |= {name: "none" for name in _RULED_NUMBERS[1:] if name not in settings}
    if kind.endswith(("gain", "bias")):
        laws_by_number["init_std"] = "ones" if kind.endswith("gain") else "zeros"
    elif rules.width == "none" and kind != "embedding":
        laws_by_number["init_std"] = "1/sqrt(fan_in)"
    if not decays(rules, kind):
        laws_by_number |= {"weight_decay": "none", _DECAY_SHARE: "none"}
    elif independent:
        laws_by_number["weight_decay"] = "share / lr"
    return laws_by_number


def _format_size_powers(powers: Powers) -> str:
    return str(dataclasses.replace(powers, batch=0.0, duration=0.0))


def _describe_token_powers(rules: Parametrization) -> list[str]:
    """Return a line on the factors of batch and tokens in every row; no line if there are none."""
    rule = kind_rule(rules, "embedding")  # AdamW updates embeddings under every optimizer.
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


def forward_laws(rules: Parametrization) -> dict[str, str]:
    """Return the law of each forward multiplier."""
    rule = forward_rule(rules)
    inverse = rules.attention == "inverse_head_dim"
    return {
        "embedding": "1",
        "attention": "sqrt(base head_dim) / head_dim" if inverse else "1 / sqrt(head_dim)",
        "residual": str(rule["residual"]),
        "output": str(rule["output"]),
    }


def _describe_choices(rules: Parametrization) -> dict[str, Json]:
    choices: dict[str, Json] = {}
    for choice, answers in sources.CHOICES.items():
        value = getattr(rules, choice)
        alternatives: dict[str, Json] = {v: text for v, text in answers.items() if v != str(value)}
        choices[choice] = {
            "value": value,
            "source": sources.answer_in_words(choice, value),
            "others": alternatives,
        }
    return {
        "parametrization": str(rules),
        "choices": choices,
        "forward_laws": {**forward_laws(rules)},
    }


def _format_choices(rules: Parametrization) -> str:
    """Format every choice with its source, and its alternatives below it."""
    lines = ["choices with their sources, and the alternatives (--set CHOICE=VALUE):"]
    for choice, answers in sources.CHOICES.items():
        value = getattr(rules, choice)
        mark = " (changed)" if choice in rules.changed else ""
        lines.append(f"  {choice} = {value}{mark}: {sources.answer_in_words(choice, value)}")
        lines += [
            f"      {alternative}: {text}"
            for alternative, text in answers.items()
            if alternative != str(value)
        ]
    return "\n".join([*lines, sources.SECOND_HAND])
