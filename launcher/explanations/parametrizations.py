"""A parametrization as tables: its laws per kind of parameter, its numbers at a shape, the source
of each choice.
"""

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

_RULED = ("init_std", "learning_rate", "weight_decay", "eps")
_BETAS = ("beta1", "beta2")
_SHARE = "weight_decay_share"
_HEAD = ("init std", "learning rate", "weight decay", "lr*wd", "eps")
_COLUMNS = ("init_std", "learning_rate", "weight_decay", _SHARE, "eps")
_NOTE = "lr*wd is the share of a weight that decay removes in one step at the peak of the schedule"


def laws(rules: Parametrization) -> tuple[dict[str, Json], str]:
    """The powers of every kind of parameter, and the choices behind them: as JSON, and as text."""
    by_kind = {kind: _laws(rules, kind) for kind in KINDS}
    rows = [(kind, *(by_kind[kind][column] for column in _COLUMNS)) for kind in KINDS]
    ratios = (
        "m_N, m_L, m_B, m_D: width (fan-in of a matrix), depth, batch and tokens, relative to "
        "the base run"
    )
    parts = [
        str(rules),
        "\n".join([table(("", *_HEAD), rows), *_besides(rules), ratios, _NOTE]),
        table(("forward multipliers", "law"), list(forward_laws(rules).items())),
        _choices(rules),
    ]
    return {
        **_answers(rules),
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
    """The numbers of every group of parameters at a shape, and their laws: as JSON, and as text.

    Args:
        rules: the parametrization.
        shape: of the model.
        base: where `hparams` were tuned.
        hparams: at the base.
        batch_ratio: the batch over the base run's.
        duration_ratio: the tokens over the base run's.

    Raises:
        SpecError: shapes that cannot be compared, or a run that this parametrization cannot be used
            for.
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
    groups = _groups(rules, parameters, rows)
    # of the embedding, which Muon does not step
    betas = [rows[0].settings[name] for name in _BETAS]
    lines = [line for group in groups for line in _two_lines(group)]
    values = [
        (name, f"{getattr(forward, name):.6g}", law) for name, law in forward_laws(rules).items()
    ]
    parts = [
        _heading(rules, shape, base, ratios),
        "\n".join(
            [
                table(("", "m_N", *_HEAD), lines),
                *_besides(rules),
                f"betas {betas[0]:.6g}, {betas[1]:.6g}; {_NOTE}",
            ]
        ),
        table(("forward multipliers", "", "law"), values),
        _choices(rules),
    ]
    body: dict[str, Json] = {
        **_answers(rules),
        "ratios": dataclasses.asdict(ratios),
        "groups": list(groups),
        "betas": [*betas],
        "forward": dataclasses.asdict(forward),
    }
    return body, "\n\n".join(parts)


def _groups(
    rules: Parametrization, parameters: tuple[Parameter, ...], rows: tuple[ParameterNumbers, ...]
) -> list[dict[str, Json]]:
    """Parameters that share their numbers, as the frozen config groups them."""
    from launcher.frozen.frozen import assign_groups, groups_of

    claimed = assign_groups(groups_of(rows), [row.name for row in rows])
    members: dict[str, list[tuple[Parameter, ParameterNumbers]]] = {}
    for parameter, row in zip(parameters, rows, strict=True):
        members.setdefault(claimed[row.name].pattern, []).append((parameter, row))
    found: list[dict[str, Json]] = []
    for pattern, group in members.items():
        parameter, row = group[0]
        said: dict[str, Json] = {**_laws(rules, row.kind)}
        if parameter.base_std:
            # Without a width rule a matrix starts from its own fan-in, which is no power of a
            # ratio.
            own = rules.width == "none" and parameter.base_std == 1 / math.sqrt(row.size[-1])
            law = "" if said["init_std"] == "1" else f" {said['init_std']}"
            said["init_std"] = "1/sqrt(fan_in)" if own else f"{parameter.base_std:.4g}{law}"
        values: dict[str, Json] = {
            "init_std": row.init_std,
            **{name: row.settings.get(name) for name in _RULED[1:]},
        }
        found.append(
            {
                "parameters": _readable([p.name for p, _ in group]),
                "pattern": pattern,
                "kind": row.kind,
                "width_multiplier": row.width_multiplier,
                **values,
                _SHARE: row.decay_share,
                "laws": said,
            }
        )
    return found


def _two_lines(group: dict[str, Json]) -> list[tuple[str, ...]]:
    """The numbers, and below them the laws."""
    said = group["laws"]
    assert isinstance(said, dict)
    cells = (group[column] for column in ("width_multiplier", *_COLUMNS))
    values = ("none" if cell is None else f"{cell:.4g}" for cell in cells)
    return [
        (str(group["parameters"]), *values),
        (f"  {group['kind']}", "", *(str(said[c]) for c in _COLUMNS)),
    ]


def _heading(rules: Parametrization, shape: Shape, base: Shape, ratios: Ratios) -> str:
    here, there = (f"width {of.width}, {counted(of.num_layers, 'layer')}" for of in (shape, base))
    tokens = f", m_B = {ratios.batch:g}, m_D = {ratios.duration:g}" if rules.needs_tokens else ""
    return (
        f"{rules} at {here}, relative to the base of {there}: m_N = {ratios.width:g}, m_L = "
        f"{ratios.depth:g}{tokens}"
    )


def _readable(names: list[str]) -> str:
    """`layers.*.attention.wq wk wv wo, feed_forward.w1 w3` for the names of a group."""
    by_place: dict[str, dict[str, None]] = {}
    for name in names:
        folded = re.sub(r"\.\d+\.", ".*.", name).removesuffix(".weight")
        found = re.match(r"layers\.\*\.((attention|feed_forward)\.)?", folded)
        place = found.group() if found else ""
        by_place.setdefault(place, {})[folded.removeprefix(place)] = None
    parts = [place + " ".join(lasts) for place, lasts in by_place.items()]
    return ", ".join([parts[0], *(part.removeprefix("layers.*.") for part in parts[1:])])


def _laws(rules: Parametrization, kind: Kind) -> dict[str, str]:
    """The powers of width and depth; those of batch and tokens are the same for all kinds
    (`_besides`).
    """
    rule = kind_rule(rules, kind)
    independent = rules.weight_decay == "independent"
    share = rule.weight_decay if independent else rule.learning_rate.times(rule.weight_decay)
    said = {name: _of_size(getattr(rule, name)) for name in _RULED} | {_SHARE: _of_size(share)}
    if rules.rates_by_shape and kind == "hidden":
        by_shape = SHAPE_RULES[rules.muon_rate].law
        by_shape += f" m_N^{rules.muon_width_power:g}" if rules.muon_width_power else ""
        depth = _of_size(dataclasses.replace(rule.learning_rate, width=0.0))
        said["learning_rate"] = by_shape if depth == "1" else f"{by_shape} {depth}"
        said |= {} if independent else {"weight_decay": f"1 / ({by_shape})"}
    settings = find_recipe(rates_by_shape=rules.rates_by_shape).optimizer_for(kind).settings
    said |= {name: "none" for name in _RULED[1:] if name not in settings}
    if kind.endswith(("gain", "bias")):
        said["init_std"] = "ones" if kind.endswith("gain") else "zeros"
    elif rules.width == "none" and kind != "embedding":
        said["init_std"] = "1/sqrt(fan_in)"
    if not decays(rules, kind):
        said |= {"weight_decay": "none", _SHARE: "none"}
    elif independent:
        said["weight_decay"] = "share / lr"
    return said


def _of_size(powers: Powers) -> str:
    return str(dataclasses.replace(powers, batch=0.0, duration=0.0))


def _besides(rules: Parametrization) -> list[str]:
    """What batch and tokens multiply every row with: no line, or one."""
    rule = kind_rule(rules, "embedding")  # which AdamW steps
    powers = {n: str(dataclasses.replace(getattr(rule, n), width=0.0, depth=0.0)) for n in _RULED}
    if rules.weight_decay == "independent":
        powers["lr*wd"] = powers.pop("weight_decay")
    said = [
        f"{name.replace('_', ' ')} times {power}" for name, power in powers.items() if power != "1"
    ]
    if rules.moments == "scaled":
        said.append("1 - beta times m_B m_D^-1")
    return ["batch and tokens also scale every row: " + "; ".join(said)] if said else []


def forward_laws(rules: Parametrization) -> dict[str, str]:
    """The law of each forward multiplier."""
    rule = forward_rule(rules)
    inverse = rules.attention == "inverse_head_dim"
    return {
        "embedding": "1",
        "attention": "sqrt(base head_dim) / head_dim" if inverse else "1 / sqrt(head_dim)",
        "residual": str(rule["residual"]),
        "output": str(rule["output"]),
    }


def _answers(rules: Parametrization) -> dict[str, Json]:
    choices: dict[str, Json] = {}
    for choice, answers in sources.CHOICES.items():
        value = getattr(rules, choice)
        others: dict[str, Json] = {v: text for v, text in answers.items() if v != str(value)}
        choices[choice] = {
            "value": value,
            "source": sources.answer_in_words(choice, value),
            "others": others,
        }
    return {
        "parametrization": str(rules),
        "choices": choices,
        "forward_laws": {**forward_laws(rules)},
    }


def _choices(rules: Parametrization) -> str:
    """Every choice with its source, and its alternatives below it."""
    lines = ["choices with their sources, and the alternatives (--set CHOICE=VALUE):"]
    for choice, answers in sources.CHOICES.items():
        value = getattr(rules, choice)
        own = " (changed)" if choice in rules.changed else ""
        lines.append(f"  {choice} = {value}{own}: {sources.answer_in_words(choice, value)}")
        lines += [
            f"      {other}: {text}" for other, text in answers.items() if other != str(value)
        ]
    return "\n".join([*lines, sources.SECOND_HAND])
