"""The verb that explains where numbers come from, in a frozen config or a parametrization:
explain.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import cast, get_args

import click

from launcher.base.study_names import (
    StudyNameError,
    configs_in,
    default_study,
    frozen_named,
    shown_name,
)
from launcher.cli.names import AnyName, lookup_option, study_of_line
from launcher.cli.options import answer, full_option, json_option, sound_config, typed_options
from launcher.explanations import parametrizations, plan_keys
from launcher.plan import sources
from proxies.core import canon
from proxies.core.canon import Json
from proxies.core.checks import SpecError
from proxies.core.hyperparameters import LEARNING_RATE, Hparams, hyperparameter_named
from proxies.core.optimizers import RECIPES
from proxies.core.rules import named
from proxies.core.shape import Family, Shape


def explained_fields(
    frozen: Path, field: str | None, *, full: bool = False
) -> tuple[dict[str, Json], str]:
    """Return every field of a config, or those of a name. The text has a few of all fields, unless
    `full` is set.

    Raises:
        FrozenError: There is no launch config.
        TamperedError: The config or its provenance was edited.
        NoProvenanceError: The config has no provenance record.
        UnknownFieldError: No field has that name.
    """
    from launcher.explanations.record import fields_of, find, read_provenance
    from launcher.explanations.text import MOST_BLOCKS, fields_text, summary_text, table_text

    decision, folder = sound_config(frozen)
    every = fields_of(decision)
    records = read_provenance(folder, decision.digest, [one.path for one in every])
    told = [(one, records[one.path]) for one in (every if field is None else find(every, field))]
    body: dict[str, Json] = {
        "digest": decision.digest,
        "fields": [
            {**cast(dict[str, Json], canon.to_json(record)), "value": one.value}
            for one, record in told
        ],
    }
    config = shown_name(frozen)
    if field is not None:
        text = fields_text(told, field)
        if len(told) > MOST_BLOCKS:
            text += f"\n\none field whole: forerun explain {config} {told[0][0].path}"
        return body, text
    after = f"one field whole: forerun explain {config} seed"
    if full:
        return body, f"{table_text(told)}\n\n{after}"
    return body, f"{summary_text(told)}\n\nall fields: forerun explain {config} --full\n{after}"


_KEYS = {
    "layers": "num_layers",
    "width": "width",
    "heads": "num_heads",
    "kv_heads": "num_kv_heads",
    "ffn": "ffn_width",
    "vocab": "vocab_size",
    "seq_len": "seq_len",
}
_LIST, _PLAN = "*", "plan"
_RATE = 0.01
"""Learning rate that is shown if `--lr` is not given."""


def _hyperparameter_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each hyperparameter that sets something of an optimizer, with its
    conventional value.
    """
    names = dict.fromkeys(name for recipe in RECIPES.values() for name in recipe.hyperparameters)
    for name in reversed(names):
        one = hyperparameter_named(name)
        default = (
            _RATE
            if name == LEARNING_RATE
            else one.convention.value
            if one.convention
            else one.default
        )
        flag, about = f"--{one.told_as.replace('_', '-')}", f"Value at the base: {one.label}."
        verb = click.option(flag, name, type=float, default=default, show_default=True, help=about)(
            verb
        )
    return verb


@click.command()
@click.argument("frozen", metavar="[FROZEN", required=False, type=AnyName())
@click.argument("field", metavar="[FIELD]]", required=False)
@lookup_option
@click.option(
    "--parametrization",
    "name",
    is_flag=False,
    flag_value=_LIST,
    default=_LIST,
    metavar="NAME",
    help="Parametrization to explain; without NAME: a list of all, one sentence each.",
)
@click.option(
    "--shape",
    "shape_text",
    metavar="KEY=N,...",
    help=f"{', '.join(_KEYS)} (kv_heads: as heads). Default: rules only, no numbers.",
)
@click.option(
    "--base",
    "base_text",
    metavar="KEY=N,...",
    help="Shape the numbers were tuned at: width=256,layers=4; head dim and ratios stay.",
)
@click.option(
    "--batch-ratio",
    type=float,
    default=1.0,
    show_default=True,
    help="Batch relative to the base run.",
)
@click.option(
    "--duration-ratio",
    type=float,
    default=1.0,
    show_default=True,
    help="Tokens relative to the base run.",
)
@_hyperparameter_options
@click.option(
    "--family",
    type=click.Choice(get_args(Family)),
    default="llama",
    show_default=True,
    help="Model family.",
)
@click.option("--tied", is_flag=True, help="Embedding and readout share one matrix.")
@click.option("--qk-norm", is_flag=True, help="RMSNorm over each head's queries and keys.")
@click.option(
    "--set",
    "choices",
    multiple=True,
    metavar="CHOICE=VALUE",
    help="Replace one choice of the source, such as depth_alpha=0.5; repeatable.",
)
@full_option
@json_option
@click.pass_context
def explain(
    ctx: click.Context,
    /,
    frozen: str | None,
    field: str | None,
    name: str,
    shape_text: str | None,
    base_text: str | None,
    batch_ratio: float,
    duration_ratio: float,
    family: Family,
    tied: bool,
    qk_norm: bool,
    choices: tuple[str, ...],
    full: bool,
    as_json: bool,
    **at_base: float,
) -> None:
    """Show where numbers come from.

    FROZEN [FIELD]: every field of a frozen config (its folder, or launch.json), or the fields of a
    name: value, source, strength of the evidence, what would change it. Names are `batch_tokens`,
    `groups.embedding.lr`, `schedule`, `groups.*.wd`; a prefix selects everything below it. FIELD
    alone: of the study's only frozen config. Exit 4 without the record that `freeze` writes, 5 if
    something was edited.

    plan [KEY]: every key of a plan, or those of a name: what it means, its allowed values, its
    value in the study and its default.

    With neither, a parametrization: per group of parameters init std, learning rate, weight decay
    and eps at a shape, the forward multipliers, and for each choice its source and what other
    sources do.
    """
    if frozen is not None:
        if frozen == _PLAN and not Path(frozen).exists():
            return answer(
                as_json, *plan_keys.explained_keys(field, study_of_line(ctx) or default_study())
            )
        if given := [
            option
            for name, option in typed_options(ctx).items()
            if name not in ("as_json", "full", "study")
        ]:
            raise click.UsageError(
                f"{', '.join(given)}: for a parametrization, cannot be used with FROZEN"
            )
        return answer(as_json, *explained_fields(*_config_and_field(ctx, frozen, field), full=full))
    if name == _LIST and not (shape_text or base_text or choices):
        return answer(as_json, {"parametrizations": dict(sources.PRESETS)}, _list())
    if name not in sources.PRESETS:
        raise click.BadParameter(f"--parametrization {name}: must be one of\n{_list()}")
    rules = named(name, **_choices(choices))
    if shape_text is None:
        if base_text is not None:
            raise click.BadParameter("--base needs --shape")
        return answer(as_json, *parametrizations.laws(rules))
    shape = _shape(shape_text, family, tied=tied, qk_norm=qk_norm)
    base = shape if base_text is None else _base(base_text, shape)
    hparams = Hparams.at(at_base, {})
    return answer(
        as_json, *parametrizations.numbers(rules, shape, base, hparams, batch_ratio, duration_ratio)
    )


def _config_and_field(ctx: click.Context, name: str, field: str | None) -> tuple[Path, str | None]:
    """Return the config and the field that the arguments name. A single argument that names no
    config is a field of the default study's only config.
    """
    try:
        return frozen_named(name, study_of_line(ctx)), field
    except StudyNameError as error:
        configs = configs_in(study_of_line(ctx) or default_study())
        if field is None and "/" not in name and not Path(name).exists():
            if len(configs) == 1:
                return configs[0], name
            with contextlib.suppress(plan_keys.UnknownKeyError):
                plan_keys.explained_keys(name)
                sentence = (
                    f"{error}\nnext: forerun explain plan {name}, or, of a frozen config: "
                    f"explain FROZEN {name}"
                )
                raise click.BadParameter(sentence, ctx) from error
        raise click.BadParameter(str(error), ctx) from error


def _list() -> str:
    return "\n".join(f"  {name.ljust(18)}{sentence}" for name, sentence in sources.PRESETS.items())


def _choices(given: tuple[str, ...]) -> dict[str, object]:
    """Parse `--set` options: a number, none, or a word."""
    found: dict[str, object] = {}
    for text in given:
        choice, sign, word = text.partition("=")
        if not sign:
            raise click.BadParameter(f"--set {text}: must be CHOICE=VALUE")
        try:
            found[choice] = float(word)
        except ValueError:
            found[choice] = None if word.lower() == "none" else word
    return found


def _sizes(option: str, text: str, keys: tuple[str, ...]) -> dict[str, int]:
    """Parse `width=256,layers=4` as fields of a shape; report every problem at once."""
    found, problems = {}, []
    for part in filter(None, text.replace(" ", "").split(",")):
        key, _, number = part.partition("=")
        if key not in keys:
            problems.append(f"{part}: must be one of {', '.join(keys)}")
        elif not re.fullmatch(r"[0-9]{1,12}", number):
            problems.append(f"{part}: must be a whole number")
        else:
            found[_KEYS[key]] = int(number)
    if problems:
        raise SpecError(option, problems)
    return found


def _shape(text: str, family: Family, *, tied: bool, qk_norm: bool) -> Shape:
    sizes = _sizes("--shape", text, tuple(_KEYS))
    if "num_heads" in sizes:
        sizes.setdefault("num_kv_heads", sizes["num_heads"])
    if missing := [key for key, field in _KEYS.items() if field not in sizes and key != "kv_heads"]:
        raise SpecError("--shape", [f"{key} is missing" for key in missing])
    return Shape(**sizes, family=family, tied=tied, qk_norm=qk_norm)


def _base(text: str, shape: Shape) -> Shape:
    """Return the shape at another width and depth; head dim and ratios stay."""
    sizes = _sizes("--base", text, ("layers", "width"))
    return shape.at_width(sizes.get("width", shape.width)).at_depth(
        sizes.get("num_layers", shape.num_layers)
    )
